"""Where sequences are: waiting, running, parked or returning; each move between them has one method here.

*Waiting*: never started. *Running*: in the batch, with credit (or a padding_row of the padded strategy). *Parked*:
without
credit; it keeps its blocks while nobody needs them, and no place in the batch. *Returning*: was running and will again,
after a preemption or with new credit; it, too, keeps its blocks while nobody needs them. *Finishing*: the running step
is its last; it has no blocks, and only its result is waited for.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter
from itertools import islice
from operator import attrgetter

from moiety_engine.scheduling.plan import Chunk
from moiety_engine.sequence import Sequence, SequenceState

by_arrival = attrgetter("order")
_due_s, _num_computed, _predicted_output = map(attrgetter, ("next_due_s", "num_computed", "predicted_output"))


class RequestQueues:
    """All sequences that have not ended. Lists are in order of arrival."""

    def __init__(self) -> None:
        self.by_key: dict[int, Sequence] = {}
        self.waiting: dict[int, Sequence] = {}  # by key
        self._waiting_of: dict[tuple[int, str], dict[int, Sequence]] = {}  # by rank and class
        self.running: list[Sequence] = []
        self.decoding: dict[Sequence, Chunk] = {}  # of them, those that lack only their newest token: their rows
        self.verifying: dict[Sequence, None] = {}  # those whose draft runs: what they lack is known with its result
        self.prefilling: dict[Sequence, None] = {}  # and the others
        self.filled: dict[Sequence, None] = {}  # who may need another block for its next token: all that do are here
        self._ranks: Counter[int] = Counter()  # of those running
        self._decode_sums: tuple[float, int] | None = None  # of `sums_of`, for all; None: to be reckoned anew
        self._predicted_output: float | None = None
        self.parked: list[Sequence] = []
        self.returning: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        self.by_key[sequence.key] = sequence
        self.waiting[sequence.key] = sequence
        self._waiting_of.setdefault(_queue_of(sequence), {})[sequence.key] = sequence

    def newest_of_worst_rank(self) -> Sequence | None:
        """The waiting request that is missed least; None if none waits."""
        queues = {queue: members for queue, members in self._waiting_of.items() if members}
        worst = max((rank for rank, _ in queues), default=None)
        newest = (next(reversed(members.values())) for (rank, _), members in queues.items() if rank == worst)
        return max(newest, key=by_arrival, default=None)

    def oldest_unix_ns(self, now_ns: int) -> int:
        """When the first of those that wait or return came; now if there is none."""
        firsts = [*self.returning[:1], *islice(self.waiting.values(), 1)]
        return min((sequence.queued_unix_ns for sequence in firsts), default=now_ns)

    def oldest_unix_s(self) -> dict[str, float]:
        """By class, when the first of those that wait or return came."""
        firsts = [next(iter(members.values())) for members in self._waiting_of.values() if members]
        oldest: dict[str, float] = {}
        for sequence in (*firsts, *self.returning):
            came_s = sequence.queued_unix_ns / 1e9
            oldest[sequence.service.name] = min(came_s, oldest.get(sequence.service.name, came_s))
        return oldest

    @property
    def worst_rank_running(self) -> int:
        """-1 if none runs."""
        return max(self._ranks, default=-1)

    def sums_of(self, decoding: list[Chunk]) -> tuple[float, int]:
        """Of all decoding sequences, or those of them that a step takes: (when the first token is due that one of them
        still owes in time, tokens whose KV they read)."""
        if len(decoding) == len(self.decoding):
            return self._sums_of_all()
        due_s = min([chunk.sequence.next_due_s for chunk in decoding], default=math.inf)
        return due_s, sum([chunk.sequence.num_computed for chunk in decoding])

    def predicted_output(self) -> float:
        """Tokens that all running answers are predicted to have in all."""
        if self._predicted_output is None:
            self._predicted_output = sum(map(_predicted_output, self.running))
        return self._predicted_output

    def stepped(self) -> None:
        """All that run have been told what the step gave them. They are summed up at once, while they are at hand."""
        self.moved_on()
        self._sums_of_all()
        self.predicted_output()

    def moved_on(self) -> None:
        """What was summed up of those that run does not hold any more."""
        self._decode_sums = self._predicted_output = None

    def run(self, sequence: Sequence) -> None:
        """From waiting or returning into the batch."""
        if sequence.place is SequenceState.WAITING:
            self._wait_no_more(sequence)
        else:
            self.returning.remove(sequence)
        insort(self.running, sequence, key=by_arrival)
        sequence.place = SequenceState.RUNNING
        self._predicted_output = None
        self._ranks[sequence.service.rank] += 1
        self.prefilling[sequence] = None
        self.computed(sequence)

    def computed(self, sequence: Sequence) -> bool:
        """More of the sequence was computed. True: it lacks no more than its newest token, and decodes from now on."""
        if (
            sequence.place is not SequenceState.RUNNING
            or not sequence.decoding
            or sequence.padding_row
            or sequence in self.verifying
        ):
            return False
        self.decoding[sequence] = Chunk(sequence, 1, True)
        self.filled[sequence] = None
        self._decode_sums = None
        self.prefilling.pop(sequence, None)
        return True

    def verify(self, sequence: Sequence) -> None:
        """A draft of the sequence runs: until its result is there, nothing can be planned for it."""
        del self.decoding[sequence]
        self.verifying[sequence] = None

    def verified(self, sequence: Sequence) -> None:
        """It is there, and the sequence decodes again."""
        del self.verifying[sequence]
        self.computed(sequence)

    def keep_as_padding(self, sequence: Sequence) -> None:
        """A row of a padded batch has ended, and goes on to be computed with the others."""
        sequence.padding_row = True
        self.decoding[sequence] = Chunk(sequence, 0, False, num_pad=1)
        self._decode_sums = None
        self.prefilling.pop(sequence, None)

    def park(self, sequence: Sequence) -> None:
        """Out of the batch, for want of credit."""
        self._run_no_more(sequence)
        insort(self.parked, sequence, key=by_arrival)
        sequence.place = SequenceState.PARKED

    def send_back(self, sequence: Sequence) -> None:
        """From the batch, or from parked, to those that will return to it."""
        if sequence.place is SequenceState.RUNNING:
            self._run_no_more(sequence)
        else:
            self.parked.remove(sequence)
        insort(self.returning, sequence, key=by_arrival)
        sequence.place = SequenceState.RETURNING

    def finish(self, sequence: Sequence) -> None:
        """Out of the batch, for its last step runs."""
        self._run_no_more(sequence)
        sequence.place = SequenceState.FINISHING

    def end(self, sequence: Sequence) -> None:
        """Nothing is kept of it."""
        del self.by_key[sequence.key]
        match sequence.place:
            case SequenceState.WAITING:
                self._wait_no_more(sequence)
            case SequenceState.RUNNING:
                self._run_no_more(sequence)
            case SequenceState.PARKED:
                self.parked.remove(sequence)
            case SequenceState.RETURNING:
                self.returning.remove(sequence)
        sequence.place = SequenceState.ENDED

    def tenant_blocks(self, most: int) -> dict[str, int]:
        """Blocks that sequences hold, by tenant, of so many tenants that hold most. A block that several sequences
        share counts for each of them."""
        held = Counter[str]()
        for sequence in (*self.running, *self.parked, *self.returning):
            held[sequence.tenant] += len(sequence.blocks)
        return {tenant: count for tenant, count in held.most_common(most) if count}

    def _sums_of_all(self) -> tuple[float, int]:
        if self._decode_sums is None:
            due_s = min(map(_due_s, self.decoding), default=math.inf)
            self._decode_sums = due_s, sum(map(_num_computed, self.decoding))
        return self._decode_sums

    def _run_no_more(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._decode_sums = self._predicted_output = None
        self.decoding.pop(sequence, None)
        self.verifying.pop(sequence, None)
        self.prefilling.pop(sequence, None)
        rank = sequence.service.rank
        self._ranks[rank] -= 1
        if not self._ranks[rank]:
            del self._ranks[rank]

    def _wait_no_more(self, sequence: Sequence) -> None:
        del self.waiting[sequence.key]
        del self._waiting_of[_queue_of(sequence)][sequence.key]


def _queue_of(sequence: Sequence) -> tuple[int, str]:
    return sequence.service.rank, sequence.service.name
