"""Which sequences of a step get drafts, and how long: what is predicted to bring the most tokens a second.

A drafted token costs a row of the step and comes true with a chance. Both are learned: chances by request, rows by what
steps took. So drafts shrink where they are wrong, and where the batch is large enough that a row more costs as much as
it brings, there are none.
"""

from __future__ import annotations

from collections.abc import Iterable

from moiety_engine.scheduling.plan import Plan
from moiety_engine.scheduling.planner import Planner
from moiety_engine.scheduling.speculation.costs import RowCosts
from moiety_engine.scheduling.speculation.history import History
from moiety_engine.scheduling.steptime import StepShape, StepTimeModel
from moiety_engine.sequence import Sequence

MOST_ROWS = 64  # drafted tokens of a step, of all sequences
_GAIN = 1.05  # tokens a second, times those without drafts: less is not worth being wrong
_LEAST_CHANCE = 0.05
_OTHERS_WAIT = 1.25  # times a step without drafts: what one's draft may delay others who are late anyway
_SMALL = 8  # sequences, up to which looking costs next to nothing
_LONGEST_PAUSE = 16  # steps


class Speculator:
    """Extends the decodes of a planned step by drafts. One scheduler's."""

    def __init__(self, num_tokens: int, step_time: StepTimeModel) -> None:
        """`num_tokens`: the longest draft."""
        self._num_tokens = num_tokens
        self._costs = RowCosts(step_time)
        self._pause = self._num_in_vain = 0  # steps

    def extend(self, planner: Planner, slack_s: float) -> None:
        """Give decodes of the step drafts, where that pays. `slack_s`: until the first token is due that is owed in
        time."""
        if self._pause:
            self._pause -= 1
            return
        num_decodes = len(planner.decodes)
        most = min(MOST_ROWS, planner.rows_left)
        if not num_decodes or most <= 0:
            return
        guesses = [self._guess(chunk.sequence) for chunk in planner.decodes]
        chances = sorted(_chances(guesses), reverse=True)[:most]
        lengths = [0] * num_decodes
        for _, place in chances[: self._best(planner.shape, [chance for chance, _ in chances], slack_s)]:
            lengths[place] += 1
        for place, length in enumerate(lengths):
            if length:
                planner.draft(place, guesses[place][0][:length])
        self._num_in_vain = 0 if any(lengths) else self._num_in_vain + 1
        if num_decodes > _SMALL:
            self._pause = min(self._num_in_vain, _LONGEST_PAUSE)

    def stepped(self, plan: Plan, seconds: float) -> None:
        """The step took so long."""
        self._costs.observe(plan.shape, seconds)

    def _guess(self, sequence: Sequence) -> tuple[list[int], float, float]:
        """A draft, and the chances of its first token and of each that follows it. The token that the running step
        samples is guessed, too, and not drafted."""
        history: History | None = sequence.history
        if history is None:
            history = sequence.history = History()
        draft = history.guess(sequence, self._num_tokens + 1)
        room = min(sequence.credit_tokens, sequence.submit.max_tokens) - sequence.num_output - 1
        if not draft or room <= 0:
            return [], 0.0, 0.0
        first = chance = history.chance
        if sequence.pending:
            draft, first = draft[1:], chance * chance
        return draft[: min(room, self._num_tokens)], first, chance

    def _best(self, shape: StepShape, chances: list[float], slack_s: float) -> int:
        """How many of the drafted tokens, the likeliest first, bring the most tokens a second."""
        rows, context = shape.decode_rows, shape.decode_context // shape.decode_rows
        seconds = self._costs.seconds(shape)
        longest_s = max(slack_s, _OTHERS_WAIT * seconds) if rows > 1 else float("inf")
        tokens = float(rows + shape.prefill_rows)
        best, best_rate = 0, _GAIN * tokens / seconds
        for i, chance in enumerate(chances, 1):
            tokens += chance
            with_drafts = shape._replace(decode_rows=rows + i, decode_context=shape.decode_context + i * context)
            seconds = self._costs.seconds(with_drafts)
            if seconds <= longest_s and tokens / seconds > best_rate:
                best, best_rate = i, tokens / seconds
        return best


def _chances(guesses: list[tuple[list[int], float, float]]) -> Iterable[tuple[float, int]]:
    """Of each drafted token, that it and all before it are right, and whose it is."""
    for place, (draft, first, chance) in enumerate(guesses):
        all_right = first
        for _ in draft:
            if all_right < _LEAST_CHANCE:
                break
            yield all_right, place
            all_right *= chance
