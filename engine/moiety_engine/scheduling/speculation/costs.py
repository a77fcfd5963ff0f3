"""What a step takes with drafted rows in it, where a regression that is straight in the rows is wrong: a few rows more
may cost nothing, or read as many experts more."""

from __future__ import annotations

from bisect import bisect_left

from moiety_engine.scheduling.steptime import StepShape, StepTimeModel

SIZES = (1, 2, 4, 8, 16, 32, 64)  # rows of steps with drafts: few sizes, since what replays a step is made for each
_WEIGHT = 0.1  # of a step
_MOST, _LEAST = 1.5, 0.67  # a step may say that the figure is wrong by so much, and no more
_FORGET = 0.998  # a step: what was not tried for long is tried again
_PER_CONTEXT = 10_000  # tokens, the unit of the model's coefficient
_CONTEXT_TERM = 4


class RowCosts:
    """Steps without drafts are the regression's business. What more rows take is measured before the first request,
    and corrected by what steps with drafts took."""

    def __init__(self, step_time: StepTimeModel) -> None:
        self._step_time = step_time
        self.sizes: tuple[int, ...] = SIZES
        self._measured_s: list[float] = []  # by size
        self._wrong = dict.fromkeys((0, *SIZES), 1.0)  # measured ÷ predicted, by rows; 0: steps without drafts

    def measured(self, seconds: list[float]) -> None:
        """A step of decodes took so long at each of the first SIZES; larger ones are not for drafts."""
        self._measured_s = seconds
        self.sizes = SIZES[: len(seconds)]

    def seconds(self, shape: StepShape, num_drafted: int) -> float:
        """Of a step of this shape, of whose decoding rows so many are to be drafted in addition."""
        plain_s = self._step_time.predict_s(shape) * self._wrong[0]
        if not num_drafted:
            return plain_s
        rows = shape.decode_rows
        return self._with_drafts_s(shape, plain_s, num_drafted) * self._wrong[rows + num_drafted]

    def observe(self, shape: StepShape, num_drafted: int, seconds: float) -> None:
        """A step of this shape, which counts the drafted rows, took so long."""
        if shape.prefill_rows or seconds <= 0:
            return
        for rows, wrong in self._wrong.items():
            self._wrong[rows] = 1 + _FORGET * (wrong - 1)
        place, rows = 0, shape.decode_rows
        if num_drafted:
            place = rows
            if place not in self._wrong:
                return
            context = shape.decode_context * (rows - num_drafted) // rows
            shape = shape._replace(decode_rows=rows - num_drafted, decode_context=context)
        known = self._wrong[place]
        predicted_s = self.seconds(shape, num_drafted) / known
        found = min(max(seconds / predicted_s, _LEAST * known), _MOST * known)
        self._wrong[place] += _WEIGHT * (found - known)

    def _with_drafts_s(self, shape: StepShape, plain_s: float, num_drafted: int) -> float:
        rows = shape.decode_rows
        context = num_drafted * shape.decode_context // rows
        if not self._measured_s or shape.prefill_rows:
            more = shape._replace(decode_rows=rows + num_drafted, decode_context=shape.decode_context + context)
            return plain_s * self._step_time.predict_s(more) / self._step_time.predict_s(shape)
        context_s = self._step_time.coefficients[_CONTEXT_TERM] * context / _PER_CONTEXT
        return plain_s * self._of_rows(rows + num_drafted) / self._of_rows(rows) + context_s

    def _of_rows(self, rows: int) -> float:
        """Measured, or on a straight line between what was."""
        at = bisect_left(self.sizes, rows)
        if at == len(self.sizes):
            return self._measured_s[-1] * rows / self.sizes[-1]
        if self.sizes[at] == rows:
            return self._measured_s[at]
        share = (rows - self.sizes[at - 1]) / (self.sizes[at] - self.sizes[at - 1])
        return self._measured_s[at - 1] + share * (self._measured_s[at] - self._measured_s[at - 1])
