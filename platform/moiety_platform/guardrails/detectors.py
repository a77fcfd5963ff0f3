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
_KEY_BEGIN = re.compile(r"-----BEGIN [A-Z ]{0,32}PRIVATE KEY-----", re.ASCII)
_KEY_END = re.compile(r"-----END [A-Z ]{0,32}PRIVATE KEY-----", re.ASCII)
_NOT_OF_KEYS = re.compile(r"[^A-Za-z0-9+/=:,\s\\-]", re.ASCII)
MAX_KEY_CHARS = 16_384  # of a private key between its markers
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
    text = _without_private_keys(text)
    text = _SECRETS.sub(_REDACTED[Detector.SECRETS], text)
    for form in (_PLAIN_CARD, _CARD):
        text = form.sub(_without_card, text)
    spans = [match.span(1) for match in _GROUPED_CARD.finditer(text) if has_check_digit(match[1])]
    for start, end in reversed(spans):
        text = text[:start] + _REDACTED[Detector.CARD_NUMBERS] + text[end:]
    return text


def _without_private_keys(text: str) -> str:
    """Return the text without private keys: to their end, or as much as follows of one at the text's end.

    Not one regular expression, which would look through MAX_KEY_CHARS again for each marker in a text of markers.
    """
    ends = [match.span() for match in _KEY_END.finditer(text)]
    breaks = [match.start() for match in _NOT_OF_KEYS.finditer(text)] if _KEY_BEGIN.search(text) else []
    parts, done, end_number, break_number = [], 0, 0, 0
    for begin in _KEY_BEGIN.finditer(text):
        if begin.start() < done:
            continue
        while end_number < len(ends) and ends[end_number][0] < begin.end():
            end_number += 1
        while break_number < len(breaks) and breaks[break_number] < begin.end():
            break_number += 1
        until = min(begin.end() + MAX_KEY_CHARS, breaks[break_number] if break_number < len(breaks) else len(text))
        if end_number < len(ends) and ends[end_number][0] <= until:
            key_end = ends[end_number][1]
        elif until >= len(text):
            key_end = len(text)
        else:
            continue
        parts += [text[done : begin.start()], _REDACTED[Detector.SECRETS]]
        done = key_end
    return "".join([*parts, text[done:]])


def _without_card(match: re.Match[str]) -> str:
    return _REDACTED[Detector.CARD_NUMBERS] if has_check_digit(match[0]) else match[0]


def has_check_digit(number: str) -> bool:
    """Return whether the last digit is the check digit of the others (Luhn, US patent 2,950,048, 1960)."""
    digits = number.replace(" ", "").replace("-", "")
    if len(set(digits)) == 1:
        return False  # zeros have a right check digit, and are no card
    codes = digits[-1::-2].encode(), digits[-2::-2].translate(_DOUBLED).encode()
    return (sum(map(sum, codes)) - ord("0") * len(digits)) % 10 == 0
