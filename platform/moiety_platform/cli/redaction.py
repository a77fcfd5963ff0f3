"""Redaction of secrets from settings that leave the deployment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from moiety_platform.redaction import HIDDEN

_SECRET_NAME = re.compile(r"(?i)(secret|password|passwd|token|pepper|api_?key|_key$|^key$|authorization|cookie)")
_COUNTS = re.compile(r"(?i)(max|num|keys?_per|tokens?$|_window_tokens|server_key|public_key|_per_)")


def redact_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return names and values; for a secret, only whether it is set."""
    return {
        name: HIDDEN if value is not None and is_secret(name) else value if value is None else _plain(value)
        for name, value in settings.items()
    }


def is_secret(name: str) -> bool:
    return _SECRET_NAME.search(name) is not None and _COUNTS.search(name) is None


def _plain(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float)) else str(value)
