"""Which tokens' KV a draft model has in its cache.

Its cache has a block for each of the model's, by the same number, and what is where is known by contents: the hash of
the tokens that a block of the draft's holds, and of those before them. So nobody tells it when blocks change hands, are
swapped, evicted, shared or filled from another engine: what it does not have by its hash it takes in again. The chain
of a hash starts from the tenant's salt, as the model's own does.
"""

from __future__ import annotations

from moiety_engine.sequence import Sequence, SequenceState

_PRUNED_FROM = 512  # sequences


class _SequenceKv:
    """Of one sequence: its first `num_there` tokens' KV is in `blocks`, the list as it was looked at; it is another one
    once the sequence has lost its blocks. `guessed` are tokens after those, whose KV is there if they come true."""

    __slots__ = ("blocks", "guessed", "num_marked", "num_there")

    def __init__(self, blocks: list[int], num_marked: int, num_there: int) -> None:
        self.blocks, self.num_marked, self.num_there = blocks, num_marked, num_there
        self.guessed: list[int] = []


class DraftedKv:
    """Of one engine. Used by the step loop's thread only. What reads each token beside the one after it (`lag` 1) has
    one less to take in; the last place of a block hangs on the next block, and is written by whoever shares it. What it
    says after its own guesses, it says otherwise than once they came true."""

    def __init__(self, block_size: int, lag: int = 0) -> None:
        self._block_size, self.lag = block_size, lag
        self._hash_of: dict[int, bytes] = {}  # of blocks that are full of it
        self._held: dict[Sequence, _SequenceKv] = {}
        self._pruned_from = _PRUNED_FROM

    def num_there(self, sequence: Sequence) -> int:
        """How many of the sequence's tokens need not be taken in again; never its newest one that it reads."""
        held = self._held.get(sequence)
        if held is None or held.blocks is not sequence.blocks:
            held = self._found(sequence)
        else:
            self._come_true(sequence, held)
        self._mark(sequence, held)
        return min(held.num_there, len(sequence.tokens) - self.lag - 1)

    def num_behind(self, sequence: Sequence) -> int:
        """How many are to be taken in before a token after the newest one can be said; at least one."""
        return len(sequence.tokens) - self.lag - self.num_there(sequence)

    def took_in(self, sequence: Sequence, first: int, end: int, guessed: list[int]) -> None:
        """Its tokens `first` to `end` - 1 have been taken in, after `num_there`, and guesses after them."""
        held = self._held[sequence]
        assert held.blocks is sequence.blocks and first <= held.num_there, "taken in after something that is not there"
        held.num_there, held.guessed = end, [] if self.lag else guessed
        first_block, size = first // self._block_size, self._block_size
        for block in sequence.blocks[first_block : -(-(end + len(guessed)) // size)]:
            self._hash_of.pop(block, None)
        held.num_marked = min(held.num_marked, first_block)

    def forget(self) -> None:
        """The cache's contents are lost."""
        self._hash_of.clear()
        self._held.clear()

    def _found(self, sequence: Sequence) -> _SequenceKv:
        """By the hashes of its blocks, from the first on."""
        self._prune()
        count, hash_of, size = 0, self._hash_of, self._block_size
        for block in sequence.blocks[: sequence.num_known // size]:
            if hash_of.get(block) != sequence.hash_at(count, size):
                break
            count += 1
        num_there = max(0, count * size - self.lag)
        held = self._held[sequence] = _SequenceKv(sequence.blocks, count, num_there)
        return held

    def _come_true(self, sequence: Sequence, held: _SequenceKv) -> None:
        guessed, tokens = held.guessed, sequence.tokens
        while guessed and held.num_there < sequence.num_known:
            if guessed.pop(0) != tokens[held.num_there]:
                guessed.clear()
                return
            held.num_there += 1

    def _mark(self, sequence: Sequence, held: _SequenceKv) -> None:
        """Whoever gets a block that is full by now finds it so."""
        size = self._block_size
        for index in range(held.num_marked, min(held.num_there, sequence.num_known) // size):
            self._hash_of[held.blocks[index]] = sequence.hash_at(index, size)
            held.num_marked = index + 1

    def _prune(self) -> None:
        if len(self._held) >= self._pruned_from:
            self._held = {s: held for s, held in self._held.items() if s.place is not SequenceState.ENDED}
            self._pruned_from = max(_PRUNED_FROM, 2 * len(self._held))
