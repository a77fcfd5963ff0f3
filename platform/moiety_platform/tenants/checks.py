"""Validation of names, weights, classes and ids. Pure; every failure is a BadRequest that names the field."""

from __future__ import annotations

import math
import re
import secrets
import string
import unicodedata
from datetime import UTC, datetime

from moiety_platform.errors import BadRequest
from moiety_platform.openapi.schemas import shows
from moiety_platform.tenants.models import MAX_NAME_LENGTH, SpeculativePrefillMode, TenantStatus

MAX_WEIGHT = 1000.0
MIN_WEIGHT = 0.001

_ALPHABET = string.ascii_lowercase + string.digits
_BLANKS = frozenset({0x2800, 0x3164, 0xFFA0, 0x115F, 0x1160})  # Braille blank, Hangul fillers
_IGNORABLE = (  # DerivedCoreProperties.txt, Default_Ignorable_Code_Point
    (0x00AD, 0x00AD), (0x034F, 0x034F), (0x061C, 0x061C), (0x17B4, 0x17B5), (0x180B, 0x180F), (0x200B, 0x200F),
    (0x202A, 0x202E), (0x2060, 0x206F), (0xFE00, 0xFE0F), (0xFEFF, 0xFEFF), (0xFFF0, 0xFFF8), (0x1BCA0, 0x1BCA3),
    (0x1D173, 0x1D17A), (0xE0000, 0xE0FFF),
)  # fmt: skip
_ID = re.compile(r"[A-Za-z0-9_]{1,32}", re.ASCII)


NAME = shows(
    minLength=1,
    maxLength=MAX_NAME_LENGTH,
    format="name",
    description=f"1 to {MAX_NAME_LENGTH} printable characters, without a space at either end.",
)
WEIGHT = shows(minimum=MIN_WEIGHT, maximum=MAX_WEIGHT)


def new_id(prefix: str) -> str:
    """Return a random id such as `ten_4k…`: 103 bits, so without collisions."""
    return f"{prefix}_{''.join(secrets.choice(_ALPHABET) for _ in range(20))}"


def is_id(text: str) -> bool:
    """Return whether this could be an id, worth a look-up."""
    return _ID.fullmatch(text) is not None


def check_name(name: str, param: str = "name") -> str:
    """Return a display name in NFC: 1 to 100 visible characters, no outer space. Raises BadRequest."""
    name = unicodedata.normalize("NFC", name)
    if not 1 <= len(name) <= MAX_NAME_LENGTH:
        raise BadRequest(f"'{param}' must have 1 to {MAX_NAME_LENGTH} characters, not {len(name)}.", param=param)
    if not name.isprintable():
        raise BadRequest(f"'{param}' must not contain control or other unprintable characters.", param=param)
    if name != name.strip():
        raise BadRequest(f"'{param}' must not begin or end with a space.", param=param)
    hidden = next((character for character in name if is_invisible(character)), None)
    if hidden is not None:
        message = f"'{param}' must not contain the invisible character U+{ord(hidden):04X}."
        raise BadRequest(message, param=param)
    return name


def is_invisible(character: str) -> bool:
    """Return whether a character has no visible shape.

    These are the characters of Unicode's property Default_Ignorable_Code_Point that str.isprintable() accepts, and
    blanks that count as letters or symbols.
    """
    code = ord(character)
    return code in _BLANKS or any(first <= code <= last for first, last in _IGNORABLE)


def check_moment(moment: datetime, param: str) -> datetime:
    """Return a moment in UTC, from one with any time zone.

    Raises BadRequest where it has no time zone, or lies outside UTC's calendar.
    """
    if moment.tzinfo is None:
        raise BadRequest(f"'{param}' needs a time zone, such as 2026-01-31T12:00:00Z.", param=param)
    try:
        return moment.astimezone(UTC)
    except OverflowError as exc:
        raise BadRequest(f"'{param}' lies outside the years 1 to 9999 in UTC.", param=param) from exc


def check_weight(weight: float) -> float:
    """Return a tenant's fair-share weight: a finite positive number. Raises BadRequest."""
    if not math.isfinite(weight) or not MIN_WEIGHT <= weight <= MAX_WEIGHT:
        raise BadRequest(f"'weight' must be a number from {MIN_WEIGHT} to {MAX_WEIGHT:g}.", param="weight")
    return weight


def check_speculative_prefill(speculative_prefill: str) -> str:
    """Return a valid mode of speculative prefill. Raises BadRequest."""
    if speculative_prefill not in frozenset(SpeculativePrefillMode):
        raise BadRequest(
            f"'speculative_prefill' must be one of: {', '.join(SpeculativePrefillMode)}.", param="speculative_prefill"
        )
    return speculative_prefill


def check_status(status: str) -> str:
    """Return a valid tenant status. Raises BadRequest."""
    if status not in frozenset(TenantStatus):
        raise BadRequest(f"'status' must be one of: {', '.join(TenantStatus)}.", param="status")
    return status
