"""Redaction of secrets in text: those known by value, and text in the form of a secret."""

from __future__ import annotations

import re
from collections.abc import Iterable

HIDDEN = "[redacted]"
MIN_SECRET_CHARS = 6  # of a value; shorter ones would match innocent text
ANY = r"[^\s\"',;&]+"

_URL_PASSWORD = re.compile(r"(://[^/\s:@\"]*:)(?:(?!://)(?:\\\"|[^\s\"]))+@")
_NAMES = r"secret(?:_key)?|password|passwd|pepper|api[ _-]?key(?: provided)?|(?<!num_)token"
_SHAPES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"mty_([A-Za-z0-9]{16})\.[A-Za-z0-9]+"), rf"mty_\1.{HIDDEN}"),
    (re.compile(rf"(?i)\b(bearer|basic)\s+{ANY}"), rf"\1 {HIDDEN}"),
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL), HIDDEN),
    (re.compile(r"\b(sk-|hf_|ghp_|xox[abp]-|AKIA)[A-Za-z0-9_-]{8,}"), HIDDEN),
    (re.compile(r"\beyJ[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*"), HIDDEN),
    (re.compile(rf"(?i)((?<![\w-])[\w-]*(?:{_NAMES})[\"']?\s*[:=]\s*[\"']?)(?!null\b){ANY}"), rf"\1{HIDDEN}"),
)


def hide_url_passwords(text: str, shown: str = HIDDEN) -> str:
    """Return the text with `shown` in place of the passwords of its URLs.

    A password may have any characters but white space and quotes, also `/`, `?` and `@`, which a URL must escape but
    people do not. So a text between a port and an `@` is hidden too.
    """
    if "://" not in text or "@" not in text:
        return text
    return _URL_PASSWORD.sub(lambda found: f"{found[1]}{shown}@", text)


def redact_text(text: str, secrets: Iterable[str]) -> str:
    """Return the text without the `secrets`, text in the form of a secret, and values after a secret's name."""
    for secret in sorted({one for one in secrets if len(one) >= MIN_SECRET_CHARS}, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    text = hide_url_passwords(text)
    for shape, shown in _SHAPES:
        text = shape.sub(shown, text)
    return text
