"""Queues of the scheduler's sequences, with one method for each transition.

*Waiting*: never started. *Running*: in the batch, with credit (or a padding row of padded batching). *Paused*: without
credit; it has no slot in the batch and keeps its blocks until another sequence needs them. *Returning*: was running and
will run again, after a preemption or with new credit; it also keeps its blocks until another sequence needs them.
*Finishing*: the running step is its last; it has no blocks, and only the result is missing.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from itertools import islice
from operator import attrgetter

from moiety_engine.scheduling.plan import Chunk
from moiety_engine.scheduling.queues.running_counts import RunningCounts
from moiety_engine.sequence import Sequence, SequenceState

by_arrival = attrgetter("request.order")
_next_due_s, _num_computed = attrgetter("deadlines.next_due_s"), attrgetter("kv.num_computed")
_predicted_output, _num_prompt = attrgetter("predicted_output"), attrgetter("request.num_prompt")


class RequestQueues:
    """All sequences that have not ended. Lists are in order of arrival."""

    def __init__(self) -> None:
        self.by_key: dict[int, Sequence] = {}
        self.waiting: dict[int, Sequence] = {}  # by key
        self._waiting_of: dict[tuple[int, str], dict[int, Sequence]] = {}  # by rank and class
        self._num_waiting_tokens = 0  # uncached tokens of the waiting sequences
        self.running: list[Sequence] = []
        self._orders: list[int] = []  # orders of arrival of the running sequences
        self.decoding: dict[Sequence, Chunk] = {}  # those that lack only the newest token's KV
        self.verifying: dict[Sequence, None] = {}  # running sequences that wait for the result of a running step
        self.prefilling: dict[Sequence, None] = {}  # all other running sequences
        self.filled: dict[Sequence, None] = {}  # includes all decodes that need another block
        self.counts = RunningCounts()
        self._decode_sums: tuple[float, int, int] | None = None  # result of `_sums_of_all`; None: outdated
        self._remaining_output: float | None = None
        self.paused: list[Sequence] = []
        self.returning: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        self.by_key[sequence.key] = sequence
        self.waiting[sequence.key] = sequence
        self._num_waiting_tokens += sequence.kv.num_uncached
        queue = sequence.service.rank, sequence.service.name
        self._waiting_of.setdefault(queue, {})[sequence.key] = sequence

    def newest_of_worst_rank(self) -> Sequence | None:
        """Return the waiting request to shed first: the newest of the worst rank; None if none waits."""
        queues = {queue: members for queue, members in self._waiting_of.items() if members}
        worst = max((rank for rank, _ in queues), default=None)
        newest = (next(reversed(members.values())) for (rank, _), members in queues.items() if rank == worst)
        return max(newest, key=by_arrival, default=None)

    def oldest_unix_ns(self, now_ns: int) -> int:
        """Return the arrival time of the oldest waiting or returning request; `now_ns` if there is none."""
        firsts = [*self.returning[:1], *islice(self.waiting.values(), 1)]
        return min((sequence.request.queued_unix_ns for sequence in firsts), default=now_ns)

    def oldest_unix_s(self) -> dict[str, float]:
        """Return the arrival time of the oldest waiting or returning request, by class."""
        firsts = [next(iter(members.values())) for members in self._waiting_of.values() if members]
        oldest: dict[str, float] = {}
        for sequence in (*firsts, *self.returning):
            came_s = sequence.request.queued_unix_ns / 1e9
            oldest[sequence.service.name] = min(came_s, oldest.get(sequence.service.name, came_s))
        return oldest

    def sums_of(self, decoding: list[Chunk]) -> tuple[float, int]:
        """Return (earliest on-time deadline, total tokens of KV read) of all decodes or of those in a step."""
        if len(decoding) == len(self.decoding):
            return (self._decode_sums or self._sums_of_all())[:2]
        due_s = min([chunk.sequence.deadlines.next_due_s for chunk in decoding], default=math.inf)
        return due_s, sum([chunk.sequence.kv.num_computed for chunk in decoding])

    def remaining_output(self) -> float:
        """Return an upper bound of the predicted number of tokens that all running requests still generate.

        It exceeds their sum by up to two tokens for each decode, and by what was generated before a preemption for
        the others.
        """
        if self._remaining_output is None:
            generated = self._sums_of_all()[2]
            self._remaining_output = sum(map(_predicted_output, self.running)) - generated + len(self.running)
        return self._remaining_output

    def renew_sums(self) -> None:
        """Renew the sums over running sequences, right after the results of a step were recorded."""
        self._decode_sums = self._remaining_output = None
        self._sums_of_all()
        self.remaining_output()

    def invalidate_sums(self) -> None:
        """Mark the sums over running sequences as outdated."""
        self._decode_sums = self._remaining_output = None

    def run(self, sequence: Sequence) -> None:
        """Move a waiting or returning sequence into the batch."""
        if sequence.state is SequenceState.WAITING:
            self._remove_waiting(sequence)
        else:
            self.returning.remove(sequence)
        order = sequence.request.order
        place = bisect_right(self._orders, order)
        self._orders.insert(place, order)
        self.running.insert(place, sequence)
        sequence.state = SequenceState.RUNNING
        if self._remaining_output is not None:
            self._remaining_output += sequence.predicted_output + 1
        self.counts.add(sequence)
        self.prefilling[sequence] = None
        if len(sequence.tokens) > sequence.request.num_prompt and self.computed(sequence):
            self._remaining_output = None

    def computed(self, sequence: Sequence) -> bool:
        """Update the queues after more of the sequence was computed. Return whether it starts to decode."""
        if (
            sequence.state is not SequenceState.RUNNING
            or not sequence.decoding
            or sequence.padded_row.is_finished
            or sequence in self.verifying
        ):
            return False
        self.decoding[sequence] = Chunk(sequence, 1, True)
        self.filled[sequence] = None
        self._decode_sums = None
        self.prefilling.pop(sequence, None)
        return True

    def verify(self, sequence: Sequence) -> None:
        """Mark a sequence that cannot be planned, nor lose its blocks, before the result of the running step is known.

        It has a draft in this step, or further steps are in the pipeline.
        """
        self.decoding.pop(sequence, None)
        self.prefilling.pop(sequence, None)
        self.verifying[sequence] = None
        self._decode_sums = None

    def verified(self, sequence: Sequence) -> None:
        """Return a sequence whose result is known to the decodes."""
        del self.verifying[sequence]
        self.computed(sequence)

    def keep_as_padding(self, sequence: Sequence) -> None:
        """Keep the finished row of a padded batch as padding, which is computed with the other rows."""
        sequence.padded_row = sequence.padded_row._replace(is_finished=True)
        self.decoding[sequence] = Chunk(sequence, 0, False, num_pad=1)
        self._decode_sums = None
        self.prefilling.pop(sequence, None)

    def pause(self, sequence: Sequence) -> None:
        """Move a sequence without credit out of the batch."""
        self._remove_running(sequence)
        insort(self.paused, sequence, key=by_arrival)
        sequence.state = SequenceState.PAUSED

    def queue_for_return(self, sequence: Sequence) -> None:
        """Move a running or paused sequence to those that return to the batch."""
        if sequence.state is SequenceState.RUNNING:
            self._remove_running(sequence)
        else:
            self.paused.remove(sequence)
        insort(self.returning, sequence, key=by_arrival)
        sequence.state = SequenceState.RETURNING

    def finish(self, sequence: Sequence) -> None:
        """Move a sequence whose last step is running out of the batch."""
        self._remove_running(sequence)
        sequence.state = SequenceState.FINISHING

    def end(self, sequence: Sequence) -> None:
        """Remove a sequence that has ended."""
        del self.by_key[sequence.key]
        match sequence.state:
            case SequenceState.WAITING:
                self._remove_waiting(sequence)
            case SequenceState.RUNNING:
                self._remove_running(sequence)
            case SequenceState.PAUSED:
                self.paused.remove(sequence)
            case SequenceState.RETURNING:
                self.returning.remove(sequence)
        sequence.state = SequenceState.ENDED

    def num_pending_tokens(self) -> int:
        """Return how many tokens the sequences that wait, return or are in prefill have to compute before they decode.

        Waiting sequences count with the tokens that no cache had on their arrival.
        """
        begun = [len(one.tokens) - one.kv.num_computed for one in (*self.prefilling, *self.returning)]
        return self._num_waiting_tokens + sum(begun)

    def tenant_blocks(self, most: int) -> dict[str, int]:
        """Return the blocks that sequences hold, by tenant, for the `most` tenants with the most blocks.

        A block that several sequences share counts for each.
        """
        held = Counter[str]()
        for sequence in (*self.running, *self.paused, *self.returning):
            held[sequence.request.tenant] += sequence.kv.num_held
        most_held = held.items() if len(held) <= most else held.most_common(most)
        return {tenant: count for tenant, count in most_held if count}

    def kv_slots(self, block_size: int) -> tuple[int, int]:
        """Return (slots of KV blocks that running sequences hold, slots of these that hold a token)."""
        allocated = sum(len(sequence.kv.blocks) for sequence in self.running) * block_size
        return allocated, sum(map(_num_computed, self.running))

    def _sums_of_all(self) -> tuple[float, int, int]:
        """Return the sums of all decodes, and how many tokens they have generated, less up to one for each."""
        if self._decode_sums is None:
            due_s = min(map(_next_due_s, self.decoding), default=math.inf)
            context = sum(map(_num_computed, self.decoding))
            self._decode_sums = due_s, context, context - sum(map(_num_prompt, self.decoding))
        return self._decode_sums

    def _remove_running(self, sequence: Sequence) -> None:
        place = bisect_left(self._orders, sequence.request.order)
        assert self.running[place] is sequence, "two requests have the same order of arrival"
        del self.running[place], self._orders[place]
        self._decode_sums = self._remaining_output = None
        self.decoding.pop(sequence, None)
        self.verifying.pop(sequence, None)
        self.prefilling.pop(sequence, None)
        self.counts.remove(sequence)

    def _remove_waiting(self, sequence: Sequence) -> None:
        key, service = sequence.key, sequence.service
        del self.waiting[key]
        self._num_waiting_tokens -= sequence.kv.num_uncached
        del self._waiting_of[service.rank, service.name][key]
