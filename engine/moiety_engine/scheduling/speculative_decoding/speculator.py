"""Choice of the sequences of a step that get drafts, and of the drafts' lengths, by predicted tokens per second.

A draft token costs a row of the step and is accepted with some probability. Both are learned: acceptance by request,
row costs from the durations of steps. So drafts shrink where they are wrong, and there are none when the batch is so
large that one more row costs as much as it yields.
"""

from __future__ import annotations

import math

from moiety_engine.scheduling.kv.kv_groups import KvGroups
from moiety_engine.scheduling.speculative_decoding.costs import MAX_BEHIND, DraftCost, RowCosts
from moiety_engine.scheduling.speculative_decoding.proposal import Proposal
from moiety_engine.scheduling.speculative_decoding.proposer import Proposer
from moiety_engine.scheduling.step_planner import StepPlanner
from moiety_engine.scheduling.step_time.step_time_model import StepShape, StepTimeModel
from moiety_engine.sequence import Sequence

# Required gain in tokens per second over a step without drafts. It covers the cost of proposals and of wrong ones; and
# in a shared step, sequences with drafts get ahead and leave the others to steps that fewer share.
_GAIN_ALONE, _GAIN_TOGETHER = 1.2, 1.5
_MIN_ACCEPTANCE = 0.05
_ATTEMPT_ACCEPTANCE = 0.97  # acceptance assumed for an attempt: it is made only where this would pay
_OTHERS_WAIT = 1.25  # times a step without drafts: how much a draft may delay others that are late anyway
_SMALL = 1  # sequences up to which proposals cost almost nothing
_LONGEST_PAUSE = 16  # steps
_REST_EVERY = 16  # proposals, so that steps without drafts are still measured


class Speculator:
    """Extends the decodes of a planned step by drafts. Each scheduler has its own."""

    def __init__(self, num_tokens: int, step_time: StepTimeModel, proposer: Proposer, kv: KvGroups) -> None:
        """Create the speculator. `num_tokens` is the longest draft."""
        self._kv = kv
        self._num_tokens = num_tokens
        self._proposer = proposer
        self.costs = RowCosts(step_time)
        self._pause = self._num_in_vain = self._num_calls = 0  # steps
        self._last: tuple[int, StepShape, int] | None = None  # previous step: planning time, shape, draft tokens

    def extend(self, planner: StepPlanner, slack_s: float, now_ns: int, *, overlaps: bool) -> None:
        """Add drafts to decodes of the step where that pays.

        `slack_s` is the time until the first deadline of a request that is on time. `overlaps` means that the next step
        is planned while this one runs, without the sequences that have a draft in it.
        """
        drafting_s = self._proposer.passes.take_s()
        if self._last is not None:  # from plan to plan: processing the tokens takes time, too
            planned_ns, shape, num_drafted = self._last
            self.costs.observe(shape, num_drafted, (now_ns - planned_ns) / 1e9 - drafting_s)
        is_active = not self._pause
        if is_active:
            self._extend(planner, slack_s, overlaps=overlaps)
        else:
            self._pause -= 1
        in_vain = is_active and not planner.num_drafted and len(planner.decodes) > _SMALL  # no measure of plain steps
        self._last = None if planner.empty or in_vain else (now_ns, planner.shape, planner.num_drafted)

    def verified(self, sequence: Sequence, num_drafted: int, num_right: int, *, one_wrong: bool) -> None:
        """Record the result of a verified draft of `num_drafted` tokens, and undo the rejected part of its state.

        `num_right` tokens were accepted; `one_wrong`: the next one was rejected.
        """
        self._kv.of(sequence).settle_draft(sequence, num_drafted, num_right)
        self._proposer.verified(sequence, num_right, one_wrong=one_wrong)

    def ended(self, sequence: Sequence) -> None:
        """Drop what the proposer keeps for a sequence that has ended."""
        self._proposer.ended(sequence)

    def _extend(self, planner: StepPlanner, slack_s: float, *, overlaps: bool) -> None:
        num_decodes = len(planner.decodes)
        if not num_decodes or planner.rows_left <= 0 or num_decodes >= self.costs.sizes[-1]:
            return
        sequences = [chunk.sequence for chunk in planner.decodes]
        proposals = [self._propose(sequence) for sequence in sequences]
        missed = 1.0 if overlaps and num_decodes > 1 else 0.0
        lengths = self._lengths(planner, proposals, slack_s, missed)
        if not any(lengths) and (attempt := self._proposer.attempt(sequences, proposals)):
            hoped = [
                proposal._replace(first=_ATTEMPT_ACCEPTANCE, acceptance=_ATTEMPT_ACCEPTANCE) for proposal in proposals
            ]
            most = self._lengths(planner, hoped, slack_s, missed)[attempt.place]
            lengths[attempt.place] = min(most, attempt.num_tokens)
        self._assign_drafts(planner, proposals, lengths)
        self._num_calls += 1
        self._num_in_vain = 0 if any(lengths) else self._num_in_vain + 1
        if num_decodes > _SMALL:
            rest = self._num_calls % _REST_EVERY == 0
            self._pause = max(rest, min(self._num_in_vain, _LONGEST_PAUSE))

    def _assign_drafts(self, planner: StepPlanner, proposals: list[Proposal], lengths: list[int]) -> None:
        """Give the step drafts of these lengths; a draft model that is too far behind first processes some tokens."""
        behind_left, passes, piece_s = MAX_BEHIND, self._proposer.passes, 0.0
        draft_cost = DraftCost(passes, proposals)
        for place, (proposal, length) in enumerate(zip(proposals, lengths, strict=True)):
            if not length:
                continue
            if proposal.num_behind <= behind_left:
                behind_left -= proposal.num_behind
                planner.draft(place, proposal.token_ids[:length])
                for depth in range(length):
                    draft_cost.add(place, depth)
            elif behind_left == MAX_BEHIND:
                planner.add_catch_up(place, behind_left)
                behind_left, piece_s = 0, passes.seconds(behind_left)
        passes.expect(piece_s + draft_cost.seconds)

    def _propose(self, sequence: Sequence) -> Proposal:
        """Return a proposal for a sequence.

        Structured outputs get none: the grammar's mask after a proposed token is unknown before the token is accepted.
        Nor does a nearly used thought budget after a pending token, which may begin or end the reasoning.
        """
        tokens_left = min(sequence.credit_tokens, sequence.request.submit.max_tokens) - sequence.num_output - 1
        if sequence.request.grammar is not None or tokens_left <= 0:
            return Proposal([])
        if sequence.pending and (scan := sequence.thought_scan) is not None and scan.depends_on_pending:
            return Proposal([])
        proposal = self._proposer.propose(sequence, self._num_tokens)
        return proposal._replace(token_ids=proposal.token_ids[:tokens_left])

    def _lengths(self, planner: StepPlanner, proposals: list[Proposal], slack_s: float, missed: float) -> list[int]:
        """Return the length of each sequence's draft."""
        likeliest = _by_acceptance(proposals)[: planner.rows_left]
        lengths = [0] * len(proposals)
        best = self._best(planner.shape, likeliest, DraftCost(self._proposer.passes, proposals), slack_s, missed)
        for _, place, _ in likeliest[:best]:
            lengths[place] += 1
        return lengths

    def _best(
        self,
        shape: StepShape,
        likeliest: list[tuple[float, int, int]],
        draft_cost: DraftCost,
        slack_s: float,
        missed: float,
    ) -> int:
        """Return how many of the draft tokens give the most tokens per second.

        `missed` is what a sequence with a draft loses in the following step.
        """
        rows = shape.decode_rows
        seconds = self.costs.seconds(shape, 0)
        longest_s = max(slack_s, _OTHERS_WAIT * seconds) if rows > 1 else math.inf
        tokens = float(rows + shape.prefill_rows)
        best, best_rate = 0, (_GAIN_TOGETHER if rows > 1 else _GAIN_ALONE) * tokens / seconds
        for count, (acceptance, place, depth) in enumerate(likeliest, 1):
            tokens += acceptance - missed * (depth == 0)
            draft_cost.add(place, depth)
            if rows + count in self.costs.sizes:
                seconds = self.costs.seconds(shape, count)
                rate = tokens / (seconds + draft_cost.counted_s)
                if seconds + draft_cost.seconds <= longest_s and rate > best_rate:
                    best, best_rate = count, rate
        return best


def _by_acceptance(proposals: list[Proposal]) -> list[tuple[float, int, int]]:
    """Return (probability that the token and all before it are accepted, sequence index, depth) of each proposed token.

    The most likely comes first.
    """
    found = []
    for place, proposal in enumerate(proposals):
        all_right = proposal.first
        for depth in range(len(proposal.token_ids)):
            if all_right < _MIN_ACCEPTANCE:
                break
            found.append((all_right, place, depth))
            all_right *= proposal.acceptance
    return sorted(found, key=lambda one: -one[0])
