"""Takes secrets out of text that leaves the deployment: those known by their value, and what looks like one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

HIDDEN = "[redacted]"
MIN_SECRET_CHARS = 6  # of a value; shorter ones would take innocent text with them
ANY = r"[^\s\"',;&]+"

_SECRET_NAME = re.compile(r"(?i)(secret|password|passwd|token|pepper|api_?key|_key$|^key$|authorization|cookie)")
_COUNTS = re.compile(r"(?i)(max|num|keys?_per|tokens?$|_window_tokens|server_key|public_key|_per_)")
_SHAPES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"mty_([A-Za-z0-9]{16})\.[A-Za-z0-9]+"), rf"mty_\1.{HIDDEN}"),
    (re.compile(r"(://[^/\s:@]*:)[^/\s@]+@"), rf"\1{HIDDEN}@"),
    (re.compile(rf"(?i)\b(bearer|basic)\s+{ANY}"), rf"\1 {HIDDEN}"),
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL), HIDDEN),
    (re.compile(r"\b(sk-|hf_|ghp_|xox[abp]-|AKIA)[A-Za-z0-9_-]{8,}"), HIDDEN),
    (re.compile(r"\beyJ[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*"), HIDDEN),
    (
        re.compile(
            rf"(?i)([\"']?[\w-]*(?:secret(?:_key)?|password|passwd|pepper|api[_-]?key|(?<!num_)token)[\"']?\s*[:=]\s*[\"']?)(?!null\b){ANY}"
        ),
        rf"\1{HIDDEN}",
    ),
)


def redact_text(text: str, secrets: Iterable[str]) -> str:
    """Without the `secrets`, and without what has a secret's shape or stands after a secret's name."""
    for secret in sorted({one for one in secrets if len(one) >= MIN_SECRET_CHARS}, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    for shape, shown in _SHAPES:
        text = shape.sub(shown, text)
    return text


def redact_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Names and values, of secrets only whether they are set."""
    return {
        name: HIDDEN if value is not None and is_secret(name) else value if value is None else _plain(value)
        for name, value in settings.items()
    }


def is_secret(name: str) -> bool:
    return _SECRET_NAME.search(name) is not None and _COUNTS.search(name) is None


def _plain(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float)) else str(value)
