"""Figures of many requests, added up by what they are kept by."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

Figures = tuple[float, ...]


def sum_by_key(figures: Iterable[tuple[tuple[Any, ...], Figures]]) -> list[tuple[Any, ...]]:
    """Each key with its sums behind it, in the order of the keys."""
    grouped: defaultdict[tuple[Any, ...], list[Figures]] = defaultdict(list)
    for key, of_one in figures:
        grouped[key].append(of_one)
    return [(*key, *map(sum, zip(*of_all, strict=True))) for key, of_all in sorted(grouped.items())]
