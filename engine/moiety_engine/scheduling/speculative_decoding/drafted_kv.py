"""KV cache contents of a draft model.

The draft model's cache has one block for each block of the target model, with the same number. Its contents are
identified by hash: the tokens of the draft model's block and all tokens before them. So it needs no notice when blocks
change owner, are swapped, evicted, shared or loaded from another engine: it processes again what it does not have by
hash. As with the target model, the hash chain starts from the tenant's salt.
"""

from __future__ import annotations

from moiety_engine.sequence import Sequence, SequenceState

_PRUNED_FROM = 512  # sequences


class _SequenceKv:
    """Draft model's KV of one sequence.

    The KV of the first `num_there` tokens is in `blocks`, the sequence's block list when last examined; a sequence that
    lost its blocks has another list. `proposed` holds draft tokens after those, whose KV is valid if they are accepted.
    """

    __slots__ = ("blocks", "num_marked", "num_there", "proposed")

    def __init__(self, blocks: list[int], num_marked: int, num_there: int) -> None:
        self.blocks, self.num_marked, self.num_there = blocks, num_marked, num_there
        self.proposed: list[int] = []


class DraftedKv:
    """Draft model's KV of one engine. Used by the step loop's thread only.

    An MTP layer reads each token together with the next one (`lag` 1), and has one token less to process. The last
    position of a block then depends on the next block, and is written by each sequence that shares it. Its KV for its
    own draft tokens is not reused, since it differs from their KV after acceptance. Of several MTP layers each reads
    one token further ahead, so the last `num_layers` - 1 positions depend on draft tokens and are processed again.
    """

    def __init__(self, block_size: int, lag: int = 0, num_layers: int = 1) -> None:
        self._block_size, self.lag, self._num_ahead = block_size, lag, lag * num_layers
        self._hash_of: dict[tuple[int, int], bytes] = {}  # of full blocks, by rank group and block
        self._held: dict[Sequence, _SequenceKv] = {}
        self._pruned_from = _PRUNED_FROM

    def num_there(self, sequence: Sequence) -> int:
        """Return how many of the sequence's tokens need no processing; never the newest one that it reads."""
        held = self._held.get(sequence)
        if held is None or held.blocks is not sequence.kv.blocks:
            held = self._found(sequence)
        else:
            self._come_true(sequence, held)
        self._mark(sequence, held)
        return min(held.num_there, len(sequence.tokens) - self.lag - 1)

    def num_behind(self, sequence: Sequence) -> int:
        """Return how many tokens must be processed before a token after the newest one can be drafted; at least one."""
        return len(sequence.tokens) - self.lag - self.num_there(sequence)

    def record_computed(
        self, sequence: Sequence, first: int, end: int, proposed: list[int], num_guessed: int = 0
    ) -> None:
        """Record that tokens `first` to `end` - 1 were processed, and then the draft tokens `proposed`.

        `num_guessed`: number of the last tokens before `end` that were processed with draft tokens after them.
        """
        held = self._held[sequence]
        assert held.blocks is sequence.kv.blocks and first <= held.num_there, (
            "taken in after something that is not there"
        )
        held.num_there, held.proposed = max(0, end - num_guessed), [] if self.lag else proposed
        first_block, size = first // self._block_size, self._block_size
        for block in sequence.kv.blocks[first_block : -(-(end + len(proposed)) // size)]:
            self._hash_of.pop((sequence.kv.group, block), None)
        held.num_marked = min(held.num_marked, first_block)

    def forget(self) -> None:
        """Drop all records: the cache's contents are lost."""
        self._hash_of.clear()
        self._held.clear()

    def _found(self, sequence: Sequence) -> _SequenceKv:
        """Look up the sequence's blocks by their hashes, from the first on."""
        self._prune()
        count, hash_of, size = 0, self._hash_of, self._block_size
        for block in sequence.kv.blocks[: sequence.num_known // size]:
            if hash_of.get((sequence.kv.group, block)) != sequence.block_hashes.at(count, size):
                break
            count += 1
        num_there = max(0, count * size - self._num_ahead)
        held = self._held[sequence] = _SequenceKv(sequence.kv.blocks, count, num_there)
        return held

    def _come_true(self, sequence: Sequence, held: _SequenceKv) -> None:
        proposed, tokens = held.proposed, sequence.tokens
        while proposed and held.num_there < sequence.num_known:
            if proposed.pop(0) != tokens[held.num_there]:
                proposed.clear()
                return
            held.num_there += 1

    def _mark(self, sequence: Sequence, held: _SequenceKv) -> None:
        """Record the hashes of the blocks that are full by now, so that other sequences can use them."""
        size = self._block_size
        for index in range(held.num_marked, min(held.num_there, sequence.num_known) // size):
            self._hash_of[sequence.kv.group, held.blocks[index]] = sequence.block_hashes.at(index, size)
            held.num_marked = index + 1

    def _prune(self) -> None:
        if len(self._held) >= self._pruned_from:
            self._held = {s: held for s, held in self._held.items() if s.state is not SequenceState.ENDED}
            self._pruned_from = max(_PRUNED_FROM, 2 * len(self._held))
