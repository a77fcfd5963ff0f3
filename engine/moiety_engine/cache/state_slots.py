"""Slots of recurrent states: one per sequence that holds blocks, and snapshots that prefix hits continue from.

A slot is *live* (it belongs to a sequence), a *snapshot* (the state after a full block, found by the hash of that
block), or *blank*. Live slots evict snapshots, least recently used first, and snapshots evict each other; a block pool
keeps the slots, so that its laws hold for them.

A swapped-out sequence has a host slot instead. Host slots are numbered after the slots on the device, so that one list
has all copies. They are queued while a step is planned and run before its forward pass, one after the other in the
order of the queue. So a slot may be given to another sequence as soon as a copy from it is queued.

The slots know only numbers and hashes; the runner moves the bytes.
"""

from __future__ import annotations

from moiety_engine.cache.block_pool import BlockPool


class StateSlots:
    """Owner of the slots of `pool`, 0 … num_slots-1, of the host slots after them, and of the queued copies.

    Single-threaded. The pool's used blocks are live slots, its cached ones snapshots; callers have direct access to its
    counts, to the retention of snapshots and to their invalidation.
    """

    def __init__(self, num_slots: int, num_host_slots: int = 0, max_drafts: int = 0) -> None:
        """Create the slots. `max_drafts`: the most drafts that are verified at a time, each with a slot of its own."""
        self._num_drafts, self._max_drafts = 0, max_drafts
        self._replays: list[tuple[int, int]] = []  # (slot, number of recorded tokens)
        self.pool = BlockPool(num_slots)
        self._host = BlockPool(num_host_slots) if num_host_slots else None
        self.num_host_slots = num_host_slots
        self._copies: list[tuple[int, int]] = []  # (source, target)
        self.snapshots_total = 0
        self.resumed_total = 0  # sequences that continued from a snapshot

    @property
    def num_slots(self) -> int:
        return self.pool.num_blocks

    @property
    def num_host_free(self) -> int:
        return 0 if self._host is None else self._host.num_free

    def has_snapshot(self, block_hash: bytes) -> bool:
        """Return whether the state after the block with this hash is known."""
        return self.pool.find(block_hash) is not None

    def begin(self) -> int:
        """Return a slot for a sequence without computed tokens; its content is undefined. Raises NoFreeBlocks."""
        return self.pool.allocate(1)[0]

    def resume(self, block_hash: bytes) -> int:
        """Return a slot for a sequence that continues after this block, and queue the copy of its snapshot.

        The caller has checked that the snapshot is there and that a slot is free. The snapshot itself may be evicted
        for the slot if no other is free; the state then stays where it is.
        """
        snapshot = self.pool.find(block_hash)
        assert snapshot is not None, "a sequence continues from a snapshot that is not there"
        self.resumed_total += 1
        if self.pool.num_free == 1:
            self.pool.share(snapshot)
            self.pool.invalidate([block_hash])
            return snapshot
        self.pool.share(snapshot)  # so that the slot is another one
        (slot,) = self.pool.allocate(1)
        self.pool.free([snapshot])
        self._copies.append((snapshot, slot))
        return slot

    def keep_snapshot(self, slot: int, block_hash: bytes) -> None:
        """Queue a copy of the slot's state, found by the hash of the block after which it is; if a slot is free."""
        if self.pool.find(block_hash) is not None or not self.pool.num_free:
            return
        (snapshot,) = self.pool.allocate(1)
        self.pool.seal(snapshot, block_hash)
        self.pool.free([snapshot])
        self._copies.append((slot, snapshot))
        self.snapshots_total += 1

    def end(self, slot: int) -> None:
        """Release a sequence's slot, on the device or on the host."""
        if slot < self.num_slots:
            self.pool.free([slot])
        elif self._host is not None:
            self._host.free([slot - self.num_slots])

    def swap_out(self, slot: int) -> int:
        """Release the slot, queue the copy of its state to the host, and return the host slot. Raises NoFreeBlocks."""
        assert self._host is not None, "a state is swapped out without host slots"
        (host_slot,) = self._host.allocate(1)
        self._copies.append((slot, self.num_slots + host_slot))
        self.end(slot)
        return self.num_slots + host_slot

    def swap_in(self, host_slot: int) -> int:
        """Release the host slot, queue the copy of its state back, and return the slot. Raises NoFreeBlocks."""
        (slot,) = self.pool.allocate(1)
        self._copies.append((host_slot, slot))
        self.end(host_slot)
        return slot

    def begin_draft(self, slot: int) -> int:
        """Queue the copy of a slot's state to a new slot, from which a draft can be undone; -1 if none is available."""
        if self._num_drafts == self._max_drafts or not self.pool.num_free:
            return -1
        self._num_drafts += 1
        (before,) = self.pool.allocate(1)
        self._copies.append((slot, before))
        return before

    def end_draft(self, before: int) -> None:
        """Release the slot of a draft that is not undone."""
        self._num_drafts -= 1
        self.pool.free([before])

    def undo_draft(self, slot: int, before: int, num_tokens: int) -> int:
        """Release the slot whose state has rejected tokens, and return the sequence's new slot.

        It is the one with the state before the draft, for which a replay of the first `num_tokens` tokens that ran is
        queued.
        """
        self._num_drafts -= 1
        self.pool.free([slot])
        self._replays.append((before, num_tokens))
        return before

    def forget(self) -> None:
        """Drop all snapshots and queued copies. No slot may be live."""
        self.pool.forget()
        if self._host is not None:
            self._host.forget()
        self._copies, self._replays = [], []

    def take_replays(self) -> list[tuple[int, int]]:
        """Return the queued replays (slot, number of tokens) and clear the queue; to run before the copies.

        A slot is replayed before it is the source or target of any copy that is queued with the replay.
        """
        replays, self._replays = self._replays, []
        return replays

    def take_copies(self) -> list[tuple[int, int]]:
        """Return the queued copies (source, target) and clear the queue; to run in order, before the forward pass."""
        copies, self._copies = self._copies, []
        return copies
