"""Recurrent states of sequences: their slots, the snapshots that prompts keep, and the undoing of drafts."""

from __future__ import annotations

from moiety_engine.cache.block_pool import BlockPool
from moiety_engine.cache.host import HostTier
from moiety_engine.cache.state_slots import StateSlots
from moiety_engine.cache.table_layout import TableLayout
from moiety_engine.scheduling.kv.prefix_search import PrefixHits
from moiety_engine.scheduling.kv.table_blocks import TableBlocks
from moiety_engine.sequence import Sequence


class StateLedger(TableBlocks):
    """State slots of one rank group's sequences, beside their blocks. `states` is None without recurrent layers."""

    def __init__(
        self,
        pool: BlockPool,
        layout: TableLayout,
        host: HostTier | None,
        states: StateSlots | None,
        *,
        prefix_caching: bool,
    ) -> None:
        super().__init__(pool, layout, host, prefix_caching=prefix_caching)
        self.states = states

    @property
    def has_state_slot(self) -> bool:
        """True if a sequence can start as far as recurrent states are concerned."""
        return self.states is None or self.states.pool.num_free > 0

    def begin_draft(self, sequence: Sequence) -> bool:
        """Keep the state before a draft, so that the draft can be undone. Return False if no slot is available."""
        if self.states is None:
            return True
        sequence.kv.draft_slot = self.states.begin_draft(sequence.kv.state_slot)
        return sequence.kv.draft_slot >= 0

    def settle_draft(self, sequence: Sequence, num_drafted: int, num_right: int) -> None:
        """Release the state before a draft if all of it was accepted; else continue from there.

        The token before the draft and the `num_right` accepted ones are replayed. Does nothing for a sequence that has
        been released.
        """
        kv = sequence.kv
        if self.states is None or kv.draft_slot < 0:
            return
        if num_right == num_drafted:
            self.states.end_draft(kv.draft_slot)
        else:
            kv.state_slot = self.states.undo_draft(kv.state_slot, kv.draft_slot, 1 + num_right)
        kv.draft_slot = -1

    def take_state_replays(self) -> list[tuple[int, int]]:
        """Return the queued replays (slot, number of tokens), once per plan, to run before the copies."""
        return [] if self.states is None else self.states.take_replays()

    def take_state_copies(self) -> list[tuple[int, int]]:
        """Return the queued copies of recurrent states (source, target), once per plan, to run in order."""
        return [] if self.states is None else self.states.take_copies()

    def _end_state(self, sequence: Sequence) -> None:
        """Release the sequence's state slots, if it has any."""
        kv = sequence.kv
        if self.states is None or kv.state_slot < 0:
            return
        if kv.draft_slot >= 0:
            self.states.end_draft(kv.draft_slot)
        self.states.end(kv.state_slot)
        kv.state_slot, kv.draft_slot, kv.snapshot_ends = -1, -1, ()

    def _start_state(self, sequence: Sequence, prefix: PrefixHits, states: StateSlots) -> None:
        """Give the sequence a state slot, and choose the blocks after which it keeps snapshots.

        These are the end of the prompt, where the next turn of a conversation continues, and the point up to which
        others have computed the same tokens: a prefix that is met twice is likely to be met again (Marconi, Pan et al.
        2024, arXiv 2411.19379).
        """
        hashes, size, num_hits = sequence.block_hashes, self.block_size, len(prefix)
        if num_hits:
            sequence.kv.state_slot = states.resume(hashes.at(num_hits - 1, size))
        else:
            sequence.kv.state_slot = states.begin()
        ends = {prefix.num_kept, (sequence.num_reusable - 1) // size} if self.caches(sequence) else set()
        sequence.kv.snapshot_ends = tuple(sorted(end for end in ends if end > num_hits))
