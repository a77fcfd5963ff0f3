"""Settings in a form for administrators: plain values, and of secrets only whether they are set."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from moiety_platform.redaction import hide_url_passwords

SET = "(set)"
_IN_QUERY = re.compile(r"(?i)([?&](?!key_file=)[^=&\s]*(?:password|token|secret|key)[^=&\s]*=)[^&\s]+")


def shown(value: Any) -> Any:
    """Return a value that JSON can represent, without secrets."""
    if isinstance(value, SecretStr):
        return SET
    if isinstance(value, str | Path):
        return _IN_QUERY.sub(rf"\1{SET}", hide_url_passwords(str(value), SET))
    if isinstance(value, tuple | list):
        return [shown(one) for one in value]
    if isinstance(value, Mapping):
        return {str(key): shown(one) for key, one in value.items()}
    return value
