"""Built-in detectors: regular expressions for secrets, and card numbers by their check digit. Pure.

Every quantifier is bounded, so that the time is linear in the length of the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from moiety_platform.guardrails.terms import Detector

MAX_MATCH_CHARS = 512  # no detector needs more text before the end of what it finds
MIN_CARD_DIGITS = 13
MAX_CARD_DIGITS = 19

_SECRETS = re.compile(
    r"-----BEGIN [A-Z ]{0,32}PRIVATE KEY-----"
    r"|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"  # AWS
    r"|\bgh[pousr]_[A-Za-z0-9]{36,255}"  # GitHub
    r"|\bglpat-[A-Za-z0-9_-]{20,64}"  # GitLab
    r"|\bsk-[A-Za-z0-9_-]{20,200}"  # OpenAI, Anthropic
    r"|\bxox[abprs]-[A-Za-z0-9-]{10,200}"  # Slack
    r"|\bAIza[0-9A-Za-z_-]{35}"  # Google
    r"|\bmty_[A-Za-z0-9]{8,32}\.[A-Za-z0-9_-]{16,128}",
    re.ASCII,
)
_CARD = re.compile(rf"(?<![0-9])(?:[0-9][ -]?){{{MIN_CARD_DIGITS - 1},{MAX_CARD_DIGITS - 1}}}[0-9](?![0-9])", re.ASCII)

_GROUPED_CARD = re.compile(  # looks ahead, since a date or a CVV beside it must not hide a number
    r"(?<![0-9])(?=((?:[0-9]{4}[ -]){3}[0-9]{4}(?![0-9])|[0-9]{4}[ -][0-9]{6}[ -][0-9]{5}(?![0-9])))", re.ASCII
)
_PRIVATE_KEY = re.compile(  # to its end, or as much as follows of it
    r"-----BEGIN [A-Z ]{0,32}PRIVATE KEY-----[A-Za-z0-9+/=:,\s\\-]{0,16384}?"
    r"(?:-----END [A-Z ]{0,32}PRIVATE KEY-----|\Z)",
    re.ASCII,
)
_REDACTED = {one: f"[redacted: {one.value.replace('_', ' ')}]" for one in Detector}
_DOUBLED = str.maketrans("0123456789", "0246813579")  # the digit sum of twice each digit
_PLAIN_CARD = re.compile(rf"(?<![0-9])([0-9]{{{MIN_CARD_DIGITS},{MAX_CARD_DIGITS}}})(?![0-9])", re.ASCII)


def find(text: str, detectors: Iterable[Detector]) -> Detector | None:
    """Return the first of the detectors that finds something in the text, or None."""
    for detector in detectors:
        if detector is Detector.SECRETS:
            if _SECRETS.search(text) is not None:
                return detector
        elif any(has_check_digit(match[0]) for match in _CARD.finditer(text)) or any(
            has_check_digit(match[1]) for form in (_PLAIN_CARD, _GROUPED_CARD) for match in form.finditer(text)
        ):
            return detector
    return None


def redact(text: str) -> str:
    """Return the text with all secrets and card numbers that the detectors find replaced by their name in brackets."""
    text = _PRIVATE_KEY.sub(_REDACTED[Detector.SECRETS], text)
    text = _SECRETS.sub(_REDACTED[Detector.SECRETS], text)
    for form in (_PLAIN_CARD, _CARD):
        text = form.sub(_without_card, text)
    spans = [match.span(1) for match in _GROUPED_CARD.finditer(text) if has_check_digit(match[1])]
    for start, end in reversed(spans):
        text = text[:start] + _REDACTED[Detector.CARD_NUMBERS] + text[end:]
    return text


def _without_card(match: re.Match[str]) -> str:
    return _REDACTED[Detector.CARD_NUMBERS] if has_check_digit(match[0]) else match[0]


def has_check_digit(number: str) -> bool:
    """Return whether the last digit is the check digit of the others (Luhn, US patent 2,950,048, 1960)."""
    digits = number.replace(" ", "").replace("-", "")
    if len(set(digits)) == 1:
        return False  # zeros have a right check digit, and are no card
    codes = digits[-1::-2].encode(), digits[-2::-2].translate(_DOUBLED).encode()
    return (sum(map(sum, codes)) - ord("0") * len(digits)) % 10 == 0
