"""What a step of decodes takes by its rows, where a regression that is straight in the rows is wrong: a few rows more
may cost nothing, or read as many experts more."""

from __future__ import annotations

import math
from bisect import bisect_left

from moiety_engine.scheduling.steptime import StepShape, StepTimeModel

_EXACT_ROWS = 16  # up to which each number of rows is learned by itself
_PER_OCTAVE = 4
_WEIGHT = 0.15
_MOST, _LEAST = 2.0, 0.5  # a step may say that the figure is wrong by so much, and no more: a hiccup is soon forgotten
_FORGET = 0.998  # a step: what was not seen for long is tried again


def _place(rows: int) -> int:
    if rows <= _EXACT_ROWS:
        return rows
    return _EXACT_ROWS + round(_PER_OCTAVE * math.log2(rows / _EXACT_ROWS))


class RowCosts:
    """Seconds of steps, by what the model of steps' times says and by how wrong it was about so many rows."""

    def __init__(self, step_time: StepTimeModel) -> None:
        self._step_time = step_time
        self._places: list[int] = []  # in order
        self._ratios: list[float] = []  # measured ÷ predicted
        self._seen_once: set[int] = set()

    def seconds(self, shape: StepShape) -> float:
        predicted = self._step_time.predict_s(shape)
        return predicted if shape.prefill_rows else predicted * self._ratio(_place(shape.decode_rows))

    def observe(self, shape: StepShape, seconds: float) -> None:
        """A step took so long. The first of its kind is not believed: it may have compiled or recorded something."""
        if shape.prefill_rows or seconds <= 0:
            return
        place = _place(shape.decode_rows)
        if place not in self._seen_once:
            self._seen_once.add(place)
            return
        ratio = seconds / self._step_time.predict_s(shape)
        mean = sum(self._ratios) / len(self._ratios) if self._ratios else ratio
        self._ratios = [mean + _FORGET * (known - mean) for known in self._ratios]
        at = bisect_left(self._places, place)
        if at < len(self._places) and self._places[at] == place:
            known = self._ratios[at]
            self._ratios[at] += _WEIGHT * (min(max(ratio, _LEAST * known), _MOST * known) - known)
        else:
            self._places.insert(at, place)
            self._ratios.insert(at, ratio)

    def _ratio(self, place: int) -> float:
        """Between two that are known, on a straight line; beyond them, as the nearest."""
        places, ratios = self._places, self._ratios
        if not places:
            return 1.0
        at = bisect_left(places, place)
        if at == len(places):
            return ratios[-1]
        if places[at] == place or at == 0:
            return ratios[at]
        share = (place - places[at - 1]) / (places[at] - places[at - 1])
        return ratios[at - 1] + share * (ratios[at] - ratios[at - 1])
