"""Requirements and measurements of a scenario, and rows from the figures of several seeds. Knows no scenario."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

OURS = "moiety"


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of one run of the script."""

    traces: Path
    duration_s: float = 600.0
    hour_s: float = 3600.0
    first_seed: int = 0  # some rivals, which only give the scale, run on this one alone


@dataclass(frozen=True, slots=True)
class Ask:
    """One figure. With `at_most` or `at_least` it is a target, which holds if every seed meets it."""

    key: str
    text: str
    at_most: float | None = None
    at_least: float | None = None
    strict: bool = False  # below or above, not equal
    published: str = ""  # what others have reported of it
    form: str = "{:.3f}"

    @property
    def target(self) -> str:
        if self.at_most is not None:
            return ("< " if self.strict else "≤ ") + self.form.format(self.at_most)
        if self.at_least is not None:
            return ("> " if self.strict else "≥ ") + self.form.format(self.at_least)
        return ""

    def kept(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        if self.at_most is not None:
            return value < self.at_most if self.strict else value <= self.at_most
        assert self.at_least is not None
        return value > self.at_least if self.strict else value >= self.at_least


@dataclass(slots=True)
class Measurement:
    """Measurement of one seed: figure → policy → value.

    `series` is the data of charts, `notes` what a reader should know about this run.
    """

    figures: dict[str, dict[str, float]] = field(default_factory=dict)
    series: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def put(self, key: str, policy: str, value: float) -> None:
        self.figures.setdefault(key, {})[policy] = float(value)


Measure = Callable[[Settings, int], Measurement]


@dataclass(frozen=True, slots=True)
class Scenario:
    """A scenario; `setting` describes its load and device in words."""

    name: str
    title: str
    setting: str
    asks: tuple[Ask, ...]
    measure: Measure
    seeded: bool = True  # False: nothing in it is drawn, and one run says all


def make_rows(scenario: Scenario, by_seed: Mapping[int, Measurement]) -> list[dict[str, Any]]:
    """Return a row for each figure: our and the rivals' values, and whether the target holds (None: no target)."""
    rows = []
    for ask in scenario.asks:
        values: dict[str, list[float]] = {}
        for measurement in by_seed.values():
            for policy, value in measurement.figures.get(ask.key, {}).items():
                values.setdefault(policy, []).append(value)
        ours = values.get(OURS, [])
        is_target = ask.at_most is not None or ask.at_least is not None
        rows.append(
            {
                "key": ask.key,
                "asked": ask.text,
                "target": ask.target,
                "published": ask.published,
                "holds": all(map(ask.kept, ours)) and bool(ours) if is_target else None,
                "ours": summarise(ours, ask.form),
                "rivals": {name: summarise(found, ask.form) for name, found in values.items() if name != OURS},
                "values": {name: [_plain(value) for value in found] for name, found in values.items()},
            }
        )
    return rows


def summarise(values: Sequence[float], form: str) -> str:
    """Return the median, and the smallest and largest value where they differ from it as printed."""
    if not values:
        return "–"
    ordered = sorted(values)
    middle, least, greatest = (form.format(value) for value in (median(ordered), ordered[0], ordered[-1]))
    return middle if least == greatest else f"{middle} ({least} to {greatest})"


def _plain(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None
