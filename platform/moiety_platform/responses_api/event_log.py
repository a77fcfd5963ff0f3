"""Events of a streamed background response on their way into the database, in compressed chunks.

Knows no database. A chunk is sealed once and stays the same until it is stored, so it may be written twice.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

CHUNK_BYTES = 64 * 1024  # of events, before their compression
MAX_LOG_BYTES = 16 * 1024 * 1024  # of all chunks of one response; later events are not stored
CHUNKS_A_STATEMENT = 64
LEVEL = 6

_END = b"\n\n"  # of an event; there is no other empty line, since data is JSON


@dataclass(frozen=True, slots=True)
class EventChunk:
    """Consecutive events, compressed. `first_number` is the sequence number of the first one."""

    first_number: int
    num_events: int
    events: bytes

    @property
    def next_number(self) -> int:
        return self.first_number + self.num_events

    def events_from(self, number: int) -> bytes:
        """Return the events with this sequence number and later ones, as a client reads them."""
        data, start = zlib.decompress(self.events), 0
        for _ in range(number - self.first_number):
            start = data.index(_END, start) + len(_END)
        return data[start:]


class EventLog:
    """Events of one response that are not stored yet. Owned by the task that serves its request."""

    def __init__(self) -> None:
        self.num_events = 0  # so far
        self._parts: list[bytes] = []
        self._part_bytes = 0
        self._first_number = 0
        self._sealed: list[EventChunk] = []
        self._sealed_bytes = 0
        self._is_closed = False

    def add(self, data: bytes, num_events: int) -> None:
        """Add encoded events, with which there are `num_events`. A log that is full or closed only counts them."""
        self.num_events = num_events
        if data and not self._is_closed and self._sealed_bytes < MAX_LOG_BYTES:
            self._parts.append(data)
            self._part_bytes += len(data)
            if self._part_bytes >= CHUNK_BYTES:
                self._seal()

    def chunks(self) -> list[EventChunk]:
        """Return everything that is not stored yet."""
        if self._parts:
            self._seal()
        return list(self._sealed)

    def note_stored(self, chunks: Collection[EventChunk]) -> None:
        """Forget chunks that are stored."""
        self._sealed = [chunk for chunk in self._sealed if chunk not in chunks]

    def close(self) -> None:
        """Forget what is not stored yet, and store nothing more."""
        self._is_closed = True
        self._sealed, self._parts, self._part_bytes = [], [], 0

    def _seal(self) -> None:
        chunk = EventChunk(
            self._first_number, self.num_events - self._first_number, zlib.compress(b"".join(self._parts), LEVEL)
        )
        self._sealed.append(chunk)
        self._sealed_bytes += len(chunk.events)
        self._first_number = self.num_events
        self._parts, self._part_bytes = [], 0


def numbered(chunks: Collection[EventChunk], number: int) -> Iterator[tuple[bytes, int]]:
    """Yield the events of consecutive chunks from a sequence number on, and the number after them.

    Ends before a gap.
    """
    for chunk in chunks:
        if chunk.first_number > number:
            return
        yield chunk.events_from(number), chunk.next_number
        number = chunk.next_number


def statements_of(chunks: Collection[EventChunk]) -> Iterator[Sequence[EventChunk]]:
    """Yield the chunks in order, as many at a time as one statement stores."""
    ordered = list(chunks)
    for start in range(0, len(ordered), CHUNKS_A_STATEMENT):
        yield ordered[start : start + CHUNKS_A_STATEMENT]
