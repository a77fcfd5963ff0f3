"""KV reservations: requests that must never lack blocks, and the resulting limits for others.

*Reserved*: a request of a class that is not preempted reserves its predicted peak from the time it joins; it grows up
to the peak undisturbed, and is not protected beyond it. *Owed*: a request that was preempted as often as allowed, and
may need blocks for its prompt and all of `max_tokens`. Reserving all of these would leave most of them unused, so owed
requests get blocks by the banker's algorithm (Dijkstra, "Cooperating sequential processes", 1965): only while there is
an order in which each of them can grow to its maximum and end, on the free blocks and those that the requests before it
released. Everything else can be preempted, so it counts as free. The existence of an order does not ensure good
progress, so owed requests join only if the blocks suffice for the predicted ends of all of them, and for the maximum of
one.
"""

from __future__ import annotations

from collections.abc import Iterable

from moiety_engine.cache.table_layout import TableLayout
from moiety_engine.sequence import Sequence, SequenceState


class KvReservations:
    """Reservations of one policy; holds no blocks itself.

    Reservations count only for running sequences, and for those in the same rank group.
    """

    def __init__(self, num_blocks: int, layout: TableLayout) -> None:
        self._num_blocks = num_blocks
        self._layout = layout
        self._tokens: dict[Sequence, int] = {}  # tokens for which a sequence has reserved blocks
        self._reserved: dict[Sequence, int] = {}  # blocks
        self._reserved_total = 0
        self._guaranteed: dict[Sequence, int] = {}  # maximum number of blocks that it may need

    def protects(self, sequence: Sequence) -> bool:
        """Return whether its blocks may not be taken."""
        return sequence in self._guaranteed or (sequence in self._reserved and self._within(sequence))

    def is_guaranteed(self, sequence: Sequence) -> bool:
        """Return whether it was preempted as often as allowed, so that it must stay in the batch until it ends."""
        return sequence in self._guaranteed

    def reserve(self, sequence: Sequence, num_tokens: int) -> None:
        """Reserve blocks for `num_tokens` tokens, from its start on."""
        self._tokens[sequence] = num_tokens
        self._reserved[sequence] = self._layout.held_for(num_tokens)
        self._reserved_total += self._reserved[sequence]

    def reserved_tokens(self, sequence: Sequence) -> int:
        """Return the tokens that it may hold without losing its protection from preemption; 0 without a reservation."""
        return self._tokens.get(sequence, 0)

    def guarantee(self, sequence: Sequence) -> None:
        """Protect the sequence from further preemption."""
        self._reserved_total -= self._reserved.pop(sequence, 0)
        self._guaranteed[sequence] = self._layout.held_for(
            sequence.request.num_prompt + sequence.request.submit.max_tokens
        )

    def forget(self, sequence: Sequence) -> None:
        """Remove a sequence that has ended."""
        self._reserved_total -= self._reserved.pop(sequence, 0)
        self._guaranteed.pop(sequence, None)
        self._tokens.pop(sequence, None)

    def can_join(self, sequence: Sequence, num_tokens: int) -> bool:
        """Return whether the sequence can join without breaking a reservation.

        It needs blocks for `num_tokens` tokens, or up to its predicted end if it is owed. Alone it can always join.
        """
        needed = self._layout.held_for(max(num_tokens, len(sequence.tokens)))
        if not self._guaranteed and self._reserved_total + needed <= self._num_blocks:
            return True  # even if all reserved requests ran now
        firm = self._firm(sequence.kv.group)
        owed = self._guaranteed_of(sequence.kv.group)
        if not firm and not owed:
            return True
        if sequence in self._guaranteed:
            owed.append(sequence)
        else:
            firm += needed
        ends = [self._predicted(s) for s in owed]
        unlikely = max((self._guaranteed[s] - end for s, end in zip(owed, ends, strict=True)), default=0)
        return firm + sum(ends) + unlikely <= self._num_blocks

    def waiting_for_others(self, growing: Iterable[Sequence]) -> list[Sequence]:
        """Return the owed sequences among these that must wait for others to end.

        `growing` are sequences of one group that need one more block of each table now.
        """
        asking = [s for s in growing if s in self._guaranteed] if self._guaranteed else []
        if not asking:
            return []
        states = {s: self._state(s) for s in self._guaranteed_of(asking[0].kv.group)}
        firm = self._firm(asking[0].kv.group)
        nearest = min(states, key=lambda s: (states[s][0], s.request.order))
        held_up = []
        for s in sorted(asking, key=lambda s: (states[s][0], s.request.order)):
            left, held = states[s]
            states[s] = left - self._layout.num_tables, held + self._layout.num_tables
            if s is not nearest and not self._all_can_end(firm, list(states.values())):
                states[s] = left, held
                held_up.append(s)
        return held_up

    # ── internal ──

    def _guaranteed_of(self, group: int) -> list[Sequence]:
        return [s for s in self._guaranteed if s.state is SequenceState.RUNNING and s.kv.group == group]

    def _firm(self, group: int) -> int:
        """Return the blocks held by reservations in the group."""
        running = [
            (s, n) for s, n in self._reserved.items() if s.state is SequenceState.RUNNING and s.kv.group == group
        ]
        return sum(n for s, n in running if self._within(s))

    def _within(self, sequence: Sequence) -> bool:
        return len(sequence.tokens) <= self._tokens[sequence]

    def _predicted(self, sequence: Sequence) -> int:
        """Return the number of blocks with which it is predicted to end."""
        num_output = max(sequence.predicted_output, sequence.num_output + 1.0)
        return min(self._guaranteed[sequence], self._layout.held_for(sequence.request.num_prompt + int(num_output)))

    def _state(self, sequence: Sequence) -> tuple[int, int]:
        """Return (blocks that it may still need, blocks that it holds once its tokens are computed)."""
        held = sequence.kv.num_held if sequence.decoding else self._layout.held_for(len(sequence.tokens))
        return max(0, self._guaranteed[sequence] - held), held

    def _all_can_end(self, firm: int, owed: list[tuple[int, int]]) -> bool:
        free = self._num_blocks - firm - sum(held for _, held in owed)
        if free < 0:
            return False
        for left, held in sorted(owed):
            if left > free:
                return False
            free += held
        return True
