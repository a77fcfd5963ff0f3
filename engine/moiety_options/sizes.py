"""Sizes in bytes, as options and configuration files write them."""

from __future__ import annotations

import re
from collections.abc import Callable

import typer

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i)?B?", re.IGNORECASE)
_UNITS = ("TiB", "GiB", "MiB", "KiB")


def parse_size(text: str | int) -> int:
    """Return the bytes of `1500000`, `512M`, `4GiB` (1024) or `4GB` (1000). Raises typer.BadParameter."""
    found = _SIZE.fullmatch(str(text).strip())
    if found is None:
        raise typer.BadParameter(f"{text!r} is not a size; write for example 4GiB, 512MB or a number of bytes")
    number, unit, binary = found.groups()
    decimal = str(text).strip().upper().endswith("B") and not binary
    power = " KMGT".index(unit.upper() or " ")
    return int(float(number) * (1000 if decimal else 1024) ** power)


def size_parser(least: float | None) -> Callable[[str | int], int]:
    """Return a parser of sizes that raises typer.BadParameter for fewer than `least` bytes; None: no such bound."""
    if least is None:
        return parse_size

    def parse_bounded_size(text: str | int) -> int:
        if (num_bytes := parse_size(text)) < least:
            raise typer.BadParameter(f"{text!r} is too small; write at least {format_size(int(least))}")
        return num_bytes

    return parse_bounded_size


def format_size(num_bytes: int) -> str:
    """Return the shortest text that `parse_size` reads as this number of bytes, such as `512MiB`."""
    for power, unit in zip((4, 3, 2, 1), _UNITS, strict=True):
        if num_bytes and num_bytes % 1024**power == 0:
            return f"{num_bytes // 1024**power}{unit}"
    return str(num_bytes)
