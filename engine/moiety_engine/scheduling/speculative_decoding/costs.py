"""Step durations with drafted rows, for which a regression that is linear in the rows is wrong.

A few more rows may cost nothing, or read as many more experts.
"""

from __future__ import annotations

from bisect import bisect_left

from moiety_engine.scheduling.speculative_decoding.proposal import Proposal
from moiety_engine.scheduling.step_time.step_time_model import StepShape, StepTimeModel

MAX_BEHIND = 256  # tokens that a draft model processes beside one step
SIZES = (1, 2, 4, 8, 16, 32, 64)  # rows of steps with drafts; few sizes, since each needs a captured graph
_WEIGHT = 0.1  # of a step
_MOST, _LEAST = 1.5, 0.67  # bounds on the correction by a single step
_FORGET = 0.998  # decay per step: sizes that were not tried for long are tried again
_PER_CONTEXT = 10_000  # tokens, the unit of the model's coefficient
_CONTEXT_TERM = 4


class RowCosts:
    """Costs of decode rows.

    Steps without drafts follow the step-time model. The cost of additional rows is measured before the first request,
    and corrected by the durations of steps with drafts.
    """

    def __init__(self, step_time: StepTimeModel) -> None:
        self._step_time = step_time
        self.sizes: tuple[int, ...] = SIZES
        self._measured_s: list[float] = []  # by size
        self._wrong = dict.fromkeys((0, *SIZES), 1.0)  # measured ÷ predicted, by rows; 0: steps without drafts

    def measured(self, seconds: list[float]) -> None:
        """Set the measured seconds of a decode step at each of the first SIZES.

        Larger sizes are not used for drafts.
        """
        self._measured_s = seconds
        self.sizes = SIZES[: len(seconds)]

    def seconds(self, shape: StepShape, num_drafted: int) -> float:
        """Return the predicted seconds of a step of this shape with `num_drafted` additional decode rows."""
        plain_s = self._step_time.predict_s(shape) * self._wrong[0]
        if not num_drafted:
            return plain_s
        rows = shape.decode_rows
        return self._with_drafts_s(shape, plain_s, num_drafted) * self._wrong[rows + num_drafted]

    def observe(self, shape: StepShape, num_drafted: int, seconds: float) -> None:
        """Train the costs with the duration of a step; its shape includes the drafted rows."""
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
        return between(self._measured_s, rows)


class PassCosts:
    """Costs of a draft model's passes by number of rows; zero without a draft model."""

    def __init__(self) -> None:
        self._measured_s: list[float] = []  # by size
        self._wrong = 1.0  # measured ÷ predicted
        self._predicted_s = self._taken_s = 0.0  # of the last planned step

    def measured(self, seconds: list[float]) -> None:
        """Set the measured seconds of a pass at each of the first SIZES."""
        self._measured_s = seconds

    def seconds(self, rows: int) -> float:
        return between(self._measured_s, rows) * self._wrong if self._measured_s and rows else 0.0

    def expect(self, seconds: float) -> None:
        """Set the predicted seconds of the passes in the planned step."""
        self._predicted_s = seconds

    def record_seconds(self, seconds: float) -> None:
        """Train the costs with the actual seconds of these passes."""
        self._taken_s += seconds
        if self._predicted_s > 0 and seconds > 0:
            found = self._wrong * seconds / self._predicted_s
            found = min(max(found, _LEAST * self._wrong), _MOST * self._wrong)
            self._wrong += _WEIGHT * (found - self._wrong)

    def take_s(self) -> float:
        """Return the seconds that passes took since the last call."""
        taken_s, self._taken_s = self._taken_s, 0.0
        return taken_s


class DraftCost:
    """Cost of one step's drafts on the draft model, as one draft token after the other is added.

    The first token of a sequence makes the draft model process the tokens that it is behind. The number of these per
    step is bounded, and their cost is spread over the tokens that the output still has.
    """

    def __init__(self, costs: PassCosts, proposals: list[Proposal]) -> None:
        self._costs, self._proposals = costs, proposals
        self._rows: list[int] = []  # of each pass
        self._passes_s = self._behind_s = self._share_s = 0.0

    def add(self, place: int, depth: int) -> None:
        """Add draft token number `depth` of the sequence at index `place`."""
        proposal = self._proposals[place]
        if not proposal.num_behind:
            return
        if depth == len(self._rows):
            self._rows.append(0)
        rows, seconds = self._rows[depth], self._costs.seconds
        self._passes_s += seconds(rows + 1) - seconds(rows)
        self._rows[depth] = rows + 1
        if depth == 0 and proposal.num_behind > 1:
            one_s = seconds(1)
            self._behind_s += seconds(min(proposal.num_behind, MAX_BEHIND)) - one_s
            self._share_s += (seconds(proposal.num_behind) - one_s) / proposal.num_left

    @property
    def seconds(self) -> float:
        """Predicted seconds of the draft model in this step."""
        return self._passes_s + self._behind_s

    @property
    def counted_s(self) -> float:
        """Predicted seconds that the step's tokens must pay for, including a share of the catch-up in other steps."""
        return self._passes_s + self._share_s


def between(measured_s: list[float], rows: int) -> float:
    """Interpolate linearly between the measurements at the first SIZES."""
    at = bisect_left(SIZES, rows, hi=len(measured_s))
    if at == len(measured_s):
        return measured_s[-1] * rows / SIZES[at - 1]
    if SIZES[at] == rows:
        return measured_s[at]
    share = (rows - SIZES[at - 1]) / (SIZES[at] - SIZES[at - 1])
    return measured_s[at - 1] + share * (measured_s[at] - measured_s[at - 1])
