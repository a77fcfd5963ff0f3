"""Which sequences of a step get drafts, and how long: what is predicted to bring the most tokens a second.

A drafted token costs a row of the step and comes true with a chance. Both are learned: chances by request, rows by what
steps took. So drafts shrink where they are wrong, and where the batch is large enough that a row more costs as much as
it brings, there are none.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from moiety_engine.scheduling.planner import Planner
from moiety_engine.scheduling.speculation.costs import RowCosts
from moiety_engine.scheduling.speculation.history import History
from moiety_engine.scheduling.steptime import StepShape, StepTimeModel
from moiety_engine.sequence import Sequence

# Tokens a second, times those without drafts: less is lost in looking for guesses, and on wrong ones; and where several
# share a step, those that get ahead leave the others to steps that fewer share.
_GAIN_ALONE, _GAIN_TOGETHER = 1.2, 1.5
_LEAST_CHANCE = 0.05
_OTHERS_WAIT = 1.25  # times a step without drafts: what one's draft may delay others who are late anyway
_SMALL = 1  # sequences, up to which looking costs next to nothing
_LONGEST_PAUSE = 16  # steps
_REST_EVERY = 16  # looks, so that it stays known what a step takes without them


class Guess(NamedTuple):
    """What may follow a sequence's newest token. `first`: the chance that its first token is right; `chance`: that one
    is right after others that are."""

    token_ids: list[int]
    first: float = 0.0
    chance: float = 0.0


class Speculator:
    """Extends the decodes of a planned step by drafts. One scheduler's."""

    def __init__(self, num_tokens: int, step_time: StepTimeModel) -> None:
        """`num_tokens`: the longest draft."""
        self._num_tokens = num_tokens
        self.costs = RowCosts(step_time)
        self._pause = self._num_in_vain = self._num_looks = 0  # steps
        self._last: tuple[int, StepShape, int] | None = None  # of the step before: when planned, shape, drafted tokens

    def extend(self, planner: Planner, slack_s: float, now_ns: int, *, overlaps: bool) -> None:
        """Give decodes of the step drafts, where that pays. `slack_s`: until the first token is due that is owed in
        time. `overlaps`: the next step is planned while this one runs, without those that have a draft in it."""
        if self._last is not None:  # from plan to plan: what is done with a step's tokens takes time, too
            planned_ns, shape, num_drafted = self._last
            self.costs.observe(shape, num_drafted, (now_ns - planned_ns) / 1e9)
        looks = not self._pause
        if looks:
            self._extend(planner, slack_s, overlaps=overlaps)
        else:
            self._pause -= 1
        in_vain = looks and not planner.num_drafted and len(planner.decodes) > _SMALL  # no measure of what goes without
        self._last = None if planner.empty or in_vain else (now_ns, planner.shape, planner.num_drafted)

    def _extend(self, planner: Planner, slack_s: float, *, overlaps: bool) -> None:
        num_decodes = len(planner.decodes)
        if not num_decodes or planner.rows_left <= 0 or num_decodes >= self.costs.sizes[-1]:
            return
        guesses = [self._guess(chunk.sequence) for chunk in planner.decodes]
        likeliest = _by_chance(guesses)[: planner.rows_left]
        missed = 1.0 if overlaps and num_decodes > 1 else 0.0
        lengths = [0] * num_decodes
        for _, place, _ in likeliest[: self._best(planner.shape, likeliest, slack_s, missed)]:
            lengths[place] += 1
        for place, length in enumerate(lengths):
            if length:
                planner.draft(place, guesses[place].token_ids[:length])
        self._num_looks += 1
        self._num_in_vain = 0 if any(lengths) else self._num_in_vain + 1
        if num_decodes > _SMALL:
            rest = self._num_looks % _REST_EVERY == 0
            self._pause = max(rest, min(self._num_in_vain, _LONGEST_PAUSE))

    def _guess(self, sequence: Sequence) -> Guess:
        """The token that the running step samples is guessed, too, and not drafted. Answers that are held to a form are
        not guessed: what their guide lets through after a guess is not known before it comes true."""
        if sequence.guide is not None:
            return Guess([])
        history: History | None = sequence.history
        if history is None:
            history = sequence.history = History()
        draft = history.guess(sequence, self._num_tokens + 1)
        room = min(sequence.credit_tokens, sequence.submit.max_tokens) - sequence.num_output - 1
        if not draft or room <= 0:
            return Guess([])
        first = chance = history.chance
        if sequence.pending:
            draft, first = draft[1:], chance * chance
        return Guess(draft[: min(room, self._num_tokens)], first, chance)

    def _best(self, shape: StepShape, likeliest: list[tuple[float, int, bool]], slack_s: float, missed: float) -> int:
        """How many of the drafted tokens bring the most tokens a second. `missed`: what a sequence with a draft loses
        of the step after this."""
        rows = shape.decode_rows
        seconds = self.costs.seconds(shape, 0)
        longest_s = max(slack_s, _OTHERS_WAIT * seconds) if rows > 1 else math.inf
        tokens = float(rows + shape.prefill_rows)
        best, best_rate = 0, (_GAIN_TOGETHER if rows > 1 else _GAIN_ALONE) * tokens / seconds
        for count, (chance, _, is_first) in enumerate(likeliest, 1):
            tokens += chance - missed * is_first
            if rows + count in self.costs.sizes:
                seconds = self.costs.seconds(shape, count)
                if seconds <= longest_s and tokens / seconds > best_rate:
                    best, best_rate = count, tokens / seconds
        return best


def _by_chance(guesses: list[Guess]) -> list[tuple[float, int, bool]]:
    """Of each guessed token the chance that it and all before it are right, whose it is, and whether it is the first;
    the likeliest first."""
    found = []
    for place, guess in enumerate(guesses):
        all_right = guess.first
        for i in range(len(guess.token_ids)):
            if all_right < _LEAST_CHANCE:
                break
            found.append((all_right, place, i == 0))
            all_right *= guess.chance
    return sorted(found, key=lambda one: -one[0])
