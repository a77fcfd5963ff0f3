"""Prefill planning for padded batching.

Every row of a batch takes the blocks of the longest prompt plus the longest output.
"""

from __future__ import annotations

from moiety_engine.scheduling.kv.kv_ledger import KvLedger
from moiety_engine.scheduling.policies.policy_interface import Policy
from moiety_engine.scheduling.preemption.preemption_execution import Preemptor
from moiety_engine.scheduling.prefill.prefill_planner import PrefillPlanner
from moiety_engine.scheduling.step_planner import StepPlanner
from moiety_engine.sequence import Sequence
from moiety_engine.sequence_records import PaddedRow


class PaddedPrefillPlanner:
    """Starts a whole batch at once, with each row reserved to the longest; then only continues its prefill."""

    def __init__(self, kv: KvLedger, policy: Policy, preemptor: Preemptor, filling: PrefillPlanner) -> None:
        self._kv = kv
        self._policy = policy
        self._preemptor = preemptor
        self._prefill_planner = filling

    def fill(self, planner: StepPlanner, joinable: int, now_ns: int) -> None:
        now_s = now_ns / 1e9
        batch: list[Sequence] = []
        unfinished: list[Sequence] = []
        self._prefill_planner.continue_prefills(planner, now_s)
        while (sequence := self._policy.pop(now_s)) is not None:
            if len(batch) < joinable and self._fits([*batch, sequence]) and self._start(sequence):
                self._prefill_planner.mark_started(sequence, now_ns)  # now: reclaim spares running ones
                batch.append(sequence)
            else:
                unfinished.append(sequence)
                break
        longest, reserve = _padded_lengths(batch) if batch else (0, 0)
        for sequence in batch:
            sequence.padded_row = PaddedRow(longest, reserve)
            self._preemptor.reclaim(self._kv.num_to_grow(sequence, reserve), self._kv)
            reserved = self._kv.grow(sequence, reserve)
            assert reserved or len(batch) == 1, "a padded batch was admitted that does not fit"
        unfinished += [s for s in batch if not planner.add_prefill(s, planner.max_prefill_tokens(s))]
        self._prefill_planner.put_back(unfinished, now_s)

    def _start(self, sequence: Sequence) -> bool:
        num_tokens = len(sequence.tokens)
        return self._prefill_planner.take_blocks(sequence, num_tokens, None) or (
            self._preemptor.reclaim(self._kv.layout.held_for(num_tokens), self._kv)
            and self._prefill_planner.take_blocks(sequence, num_tokens, None)
        )

    def _fits(self, batch: list[Sequence]) -> bool:
        """Return whether the pool can hold the batch with rows padded to the longest; a single sequence always fits."""
        _, reserve = _padded_lengths(batch)
        return (
            len(batch) == 1
            or len(batch) * self._kv.blocks_for(reserve) * self._kv.num_tables <= self._kv.pool.num_blocks
        )


def _padded_lengths(batch: list[Sequence]) -> tuple[int, int]:
    """Return (longest prompt, longest prompt plus longest output) of a batch."""
    longest = max(len(s.tokens) for s in batch)
    return longest, longest + max(s.request.submit.max_tokens - s.num_output for s in batch)
