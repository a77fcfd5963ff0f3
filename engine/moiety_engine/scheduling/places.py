"""Where sequences are: waiting, running, parked or returning; each move between them has one method here.

*Waiting*: never started. *Running*: in the batch, with credit (or a ghost of the padded strategy). *Parked*: without
credit; it keeps its blocks while nobody needs them, and no place in the batch. *Returning*: was running and will again,
after a preemption or with new credit; it, too, keeps its blocks while nobody needs them.
"""

from __future__ import annotations

from bisect import insort
from operator import attrgetter

from moiety_engine.sequence import Place, Sequence

_order = attrgetter("order")


class Places:
    """All sequences that have not ended. Lists are in order of arrival."""

    def __init__(self) -> None:
        self.by_key: dict[int, Sequence] = {}
        self.waiting: dict[int, Sequence] = {}  # by key
        self._waiting_of_rank: dict[int, dict[int, Sequence]] = {}
        self.running: list[Sequence] = []
        self.parked: list[Sequence] = []
        self.returning: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        self.by_key[sequence.key] = sequence
        self.waiting[sequence.key] = sequence
        self._waiting_of_rank.setdefault(sequence.service.rank, {})[sequence.key] = sequence

    def newest_of_worst_rank(self) -> Sequence | None:
        """The waiting request that is missed least; None if none waits."""
        worst = max((rank for rank, members in self._waiting_of_rank.items() if members), default=None)
        return None if worst is None else next(reversed(self._waiting_of_rank[worst].values()))

    def run(self, sequence: Sequence) -> None:
        """From waiting or returning into the batch."""
        if sequence.place is Place.WAITING:
            self._wait_no_more(sequence)
        else:
            self.returning.remove(sequence)
        insort(self.running, sequence, key=_order)
        sequence.place = Place.RUNNING

    def park(self, sequence: Sequence) -> None:
        """Out of the batch, for want of credit."""
        self.running.remove(sequence)
        insort(self.parked, sequence, key=_order)
        sequence.place = Place.PARKED

    def send_back(self, sequence: Sequence) -> None:
        """From the batch, or from parked, to those that will return to it."""
        (self.running if sequence.place is Place.RUNNING else self.parked).remove(sequence)
        insort(self.returning, sequence, key=_order)
        sequence.place = Place.RETURNING

    def end(self, sequence: Sequence) -> None:
        """Nothing is kept of it."""
        del self.by_key[sequence.key]
        sequence.decode_chunk = None  # it names the sequence: a cycle
        match sequence.place:
            case Place.WAITING:
                self._wait_no_more(sequence)
            case Place.RUNNING:
                self.running.remove(sequence)
            case Place.PARKED:
                self.parked.remove(sequence)
            case Place.RETURNING:
                self.returning.remove(sequence)
        sequence.place = Place.ENDED

    def _wait_no_more(self, sequence: Sequence) -> None:
        del self.waiting[sequence.key]
        del self._waiting_of_rank[sequence.service.rank][sequence.key]
