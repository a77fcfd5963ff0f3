"""Widths of text columns whose longest text the browser's own sizing would cut. Pure; knows no page.

The browser sizes a column by a few of its rows and leaves out those that are much longer than the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

CHARACTER_PX, PADDING_PX = 7.2, 18
MOST_PX = {"tenant": 200, "actor": 200}  # a longer text is cut, and shown whole by a click
MOST_OF_OTHERS_PX = 330
NUM_FIRST = 9  # rows that are measured, besides the last one
MANY = 5  # measured rows from which on twice the mean is left out


def width_of(texts: Sequence[str]) -> int:
    """Return the pixels of a column that shows the longest of the texts."""
    return round(CHARACTER_PX * max((len(text) for text in texts), default=0)) + PADDING_PX


def measured(texts: Sequence[str]) -> list[str]:
    """Return the texts by which the browser sizes a column."""
    sampled = [*texts[:NUM_FIRST], *texts[NUM_FIRST:][-1:]]
    if len(sampled) <= MANY:
        return sampled
    mean_px = sum(width_of([text]) for text in sampled) / len(sampled)
    return [text for text in sampled if width_of([text]) < 2 * mean_px]


def too_narrow(frame: pd.DataFrame, columns: Mapping[str, Any]) -> dict[str, int]:
    """Return the width of each text column without one that would be narrower than its longest text."""
    found: dict[str, int] = {}
    for name, config in columns.items():
        has_width = isinstance(config, Mapping) and config.get("width") is not None
        if has_width or name not in frame.columns or not len(frame):
            continue
        texts = [value if isinstance(value, str) else "" for value in frame[name]]
        if (width := width_of(texts)) > width_of(measured(texts)):
            found[name] = min(width, MOST_PX.get(name, MOST_OF_OTHERS_PX))
    return found
