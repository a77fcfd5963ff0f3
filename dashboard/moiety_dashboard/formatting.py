"""Number formats for people. Pure."""

from __future__ import annotations

from datetime import datetime, tzinfo

NO_VALUE = "–"


def short(number: float | None) -> str:
    """Format 12345 as 12.3 k."""
    if number is None:
        return NO_VALUE
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= 10 * size or (unit != "k" and number >= size):
            return f"{number / size:,.1f} {unit}"
    if number == round(number) or number >= 100:
        return f"{number:,.0f}"
    return f"{number:.1f}" if number >= 0.1 else f"{number:.1g}"


def in_bytes(count: float | None) -> str:
    """Format 12345678 bytes as 12.3 MB; the largest unit is EB."""
    if count is None:
        return NO_VALUE
    if count < 999.5:
        return f"{count:.0f} B"
    size, prefixes = count / 1000, iter("kMGTPE")
    prefix = next(prefixes)
    while size >= 999.95 and (larger := next(prefixes, None)) is not None:
        size, prefix = size / 1000, larger
    return f"{size:,.1f} {prefix}B"


def short_address(address: str, longest: int = 28) -> str:
    """Shorten an address to its end, in which engines of one machine differ.

    ipc:///var/lib/moiety/run/engine.sock → …/run/engine.sock.
    """
    return address if len(address) <= longest else "…" + address[1 - longest :]


def percent(share: float | None) -> str:
    """Format 0.98765 as 98.8 %; a share just below 1 is not rounded to 100 %."""
    if share is None:
        return NO_VALUE
    if 0.999 <= share < 1:
        return f"{int(share * 10_000) / 100:.2f} %"
    return f"{share * 100:.1f} %" if share not in (0, 1) else f"{share * 100:.0f} %"


def ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def milliseconds(ms: float | None) -> str:
    """Format 0.83 as 0.8 ms, 1234 as 1.23 s."""
    if ms is None:
        return NO_VALUE
    if ms >= 1000:
        return f"{ms / 1000:,.2f} s"
    return f"{ms:,.0f} ms" if ms >= 10 else f"{ms:.1f} ms"


def time_left(seconds: float | None) -> str:
    """Format 5400 as 1 h 30 min."""
    if seconds is None:
        return NO_VALUE
    if seconds < 60:
        return "under a minute"
    minutes = int(seconds // 60)
    hours, days = minutes // 60, minutes // (24 * 60)
    if days >= 2:
        return f"{days} d {hours % 24} h"
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min"


def dollars(nano: float | None) -> str:
    if nano is None:
        return NO_VALUE
    amount = nano / 1e9
    return f"${amount:,.2f}" if amount >= 0.01 or amount == 0 else f"${amount:.6f}"


def moment(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)


def show_time(text: str | None, zone: tzinfo) -> str | None:
    """Format a time to the minute, in the user's time zone."""
    at = moment(text)
    return None if at is None else f"{at.astimezone(zone):%Y-%m-%d %H:%M}"
