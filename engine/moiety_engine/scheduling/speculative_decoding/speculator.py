"""Which sequences of a step get drafts, and how long: what is predicted to bring the most tokens a second.

A drafted token costs a row of the step and comes true with a chance. Both are learned: chances by request, rows by what
steps took. So drafts shrink where they are wrong, and where the batch is large enough that a row more costs as much as
it brings, there are none.
"""

from __future__ import annotations

import math

from moiety_engine.scheduling.speculative_decoding.costs import MOST_BEHIND, Drafting, RowCosts
from moiety_engine.scheduling.speculative_decoding.proposal import Proposal
from moiety_engine.scheduling.speculative_decoding.proposer import Proposer
from moiety_engine.scheduling.step_planner import StepPlanner
from moiety_engine.scheduling.step_time_model import StepShape, StepTimeModel
from moiety_engine.sequence import Sequence

# Tokens a second, times those without drafts: less is lost in looking for guesses, and on wrong ones; and where several
# share a step, those that get ahead leave the others to steps that fewer share.
_GAIN_ALONE, _GAIN_TOGETHER = 1.2, 1.5
_LEAST_CHANCE = 0.05
_HOPE = 0.97  # a draft is tried only where one that is so likely to come true would pay
_OTHERS_WAIT = 1.25  # times a step without drafts: what one's draft may delay others who are late anyway
_SMALL = 1  # sequences, up to which looking costs next to nothing
_LONGEST_PAUSE = 16  # steps
_REST_EVERY = 16  # looks, so that it stays known what a step takes without them


class Speculator:
    """Extends the decodes of a planned step by drafts. One scheduler's."""

    def __init__(self, num_tokens: int, step_time: StepTimeModel, proposer: Proposer) -> None:
        """`num_tokens`: the longest draft."""
        self._num_tokens = num_tokens
        self._proposer = proposer
        self.costs = RowCosts(step_time)
        self._pause = self._num_in_vain = self._num_looks = 0  # steps
        self._last: tuple[int, StepShape, int] | None = None  # of the step before: when planned, shape, drafted tokens

    def extend(self, planner: StepPlanner, slack_s: float, now_ns: int, *, overlaps: bool) -> None:
        """Give decodes of the step drafts, where that pays. `slack_s`: until the first token is due that is owed in
        time. `overlaps`: the next step is planned while this one runs, without those that have a draft in it."""
        drafting_s = self._proposer.passes.take_s()
        if self._last is not None:  # from plan to plan: what is done with a step's tokens takes time, too
            planned_ns, shape, num_drafted = self._last
            self.costs.observe(shape, num_drafted, (now_ns - planned_ns) / 1e9 - drafting_s)
        looks = not self._pause
        if looks:
            self._extend(planner, slack_s, overlaps=overlaps)
        else:
            self._pause -= 1
        in_vain = looks and not planner.num_drafted and len(planner.decodes) > _SMALL  # no measure of what goes without
        self._last = None if planner.empty or in_vain else (now_ns, planner.shape, planner.num_drafted)

    def verified(self, sequence: Sequence, num_right: int, *, one_wrong: bool) -> None:
        """So many tokens of a draft came true, and the one after them did or did not."""
        self._proposer.verified(sequence, num_right, one_wrong=one_wrong)

    def _extend(self, planner: StepPlanner, slack_s: float, *, overlaps: bool) -> None:
        num_decodes = len(planner.decodes)
        if not num_decodes or planner.rows_left <= 0 or num_decodes >= self.costs.sizes[-1]:
            return
        sequences = [chunk.sequence for chunk in planner.decodes]
        guesses = [self._guess(sequence) for sequence in sequences]
        missed = 1.0 if overlaps and num_decodes > 1 else 0.0
        lengths = self._lengths(planner, guesses, slack_s, missed)
        if not any(lengths) and (attempt := self._proposer.attempt(sequences, guesses)):
            hoped = [guess._replace(first=_HOPE, chance=_HOPE) for guess in guesses]
            most = self._lengths(planner, hoped, slack_s, missed)[attempt.place]
            lengths[attempt.place] = min(most, attempt.num_tokens)
        self._give(planner, guesses, lengths)
        self._num_looks += 1
        self._num_in_vain = 0 if any(lengths) else self._num_in_vain + 1
        if num_decodes > _SMALL:
            rest = self._num_looks % _REST_EVERY == 0
            self._pause = max(rest, min(self._num_in_vain, _LONGEST_PAUSE))

    def _give(self, planner: StepPlanner, guesses: list[Proposal], lengths: list[int]) -> None:
        """Drafts of these lengths. Whose draft model is too far behind has it take in some tokens first."""
        room, passes, piece_s = MOST_BEHIND, self._proposer.passes, 0.0
        drafting = Drafting(passes, guesses)
        for place, (guess, length) in enumerate(zip(guesses, lengths, strict=True)):
            if not length:
                continue
            if guess.num_behind <= room:
                room -= guess.num_behind
                planner.draft(place, guess.token_ids[:length])
                for depth in range(length):
                    drafting.add(place, depth)
            elif room == MOST_BEHIND:
                planner.take_in(place, room)
                room, piece_s = 0, passes.seconds(room)
        passes.expect(piece_s + drafting.seconds)

    def _guess(self, sequence: Sequence) -> Proposal:
        """Answers that are held to a form are not guessed: what their guide lets through after a guess is not known
        before it comes true."""
        room = min(sequence.credit_tokens, sequence.submit.max_tokens) - sequence.num_output - 1
        if sequence.guide is not None or room <= 0:
            return Proposal([])
        guess = self._proposer.guess(sequence, self._num_tokens)
        return guess._replace(token_ids=guess.token_ids[:room])

    def _lengths(self, planner: StepPlanner, guesses: list[Proposal], slack_s: float, missed: float) -> list[int]:
        """Of each sequence's draft."""
        likeliest = _by_chance(guesses)[: planner.rows_left]
        lengths = [0] * len(guesses)
        best = self._best(planner.shape, likeliest, Drafting(self._proposer.passes, guesses), slack_s, missed)
        for _, place, _ in likeliest[:best]:
            lengths[place] += 1
        return lengths

    def _best(
        self,
        shape: StepShape,
        likeliest: list[tuple[float, int, int]],
        drafting: Drafting,
        slack_s: float,
        missed: float,
    ) -> int:
        """How many of the drafted tokens bring the most tokens a second. `missed`: what a sequence with a draft loses
        of the step after this."""
        rows = shape.decode_rows
        seconds = self.costs.seconds(shape, 0)
        longest_s = max(slack_s, _OTHERS_WAIT * seconds) if rows > 1 else math.inf
        tokens = float(rows + shape.prefill_rows)
        best, best_rate = 0, (_GAIN_TOGETHER if rows > 1 else _GAIN_ALONE) * tokens / seconds
        for count, (chance, place, depth) in enumerate(likeliest, 1):
            tokens += chance - missed * (depth == 0)
            drafting.add(place, depth)
            if rows + count in self.costs.sizes:
                seconds = self.costs.seconds(shape, count)
                rate = tokens / (seconds + drafting.counted_s)
                if seconds + drafting.seconds <= longest_s and rate > best_rate:
                    best, best_rate = count, rate
        return best


def _by_chance(guesses: list[Proposal]) -> list[tuple[float, int, int]]:
    """Of each guessed token the chance that it and all before it are right, whose it is, and how many are before it;
    the likeliest first."""
    found = []
    for place, guess in enumerate(guesses):
        all_right = guess.first
        for depth in range(len(guess.token_ids)):
            if all_right < _LEAST_CHANCE:
                break
            found.append((all_right, place, depth))
            all_right *= guess.chance
    return sorted(found, key=lambda one: -one[0])
