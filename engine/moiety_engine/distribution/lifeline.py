"""How ranks know that the others live: a line from each to rank 0, over which every rank says something all the time.

A line that breaks, or over which nothing comes for a few seconds in which this process itself gets to run, means that
a rank is lost, and with it the group: rank 0 tells the others why, and each ends its process. Also when a rank ends in
order, or cannot go on and can say so, that is said here. Torch's own collectives would notice a lost rank too, but
late, and not why.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING

import msgspec
import structlog

from moiety_engine.distribution.group import Waited
from moiety_engine.distribution.silence import Silence
from moiety_engine.errors import RanksError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

LOST_RANK = 5  # exit code
BEAT_INTERVAL_S = 0.5
SILENCE_S = 4.0
_LENGTH = struct.Struct("!I")
_RECEIVE_BYTES = 1 << 16
_MOST_BYTES = 1 << 20  # of a message; what says that more will come is none of ours


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A rank comes. `settings` and `checkpoint` must be those of rank 0; `secret` says that it was told the way."""

    rank: int
    secret: str
    settings: dict[str, str]
    checkpoint: str


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """All ranks are there but those that are masked: the group does without them."""

    masked: tuple[int, ...] = ()


class Beat(msgspec.Struct, frozen=True, tag=True):
    """The rank lives. `waited_s`: so far, for those that compute the other half of each layer."""

    waited_s: float = 0.0


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The rank has its share of the model."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The rank, or the whole group, ends because of this."""

    reason: str


class Bye(msgspec.Struct, frozen=True, tag=True):
    """The group ends in order."""


Word = Hello | Welcome | Beat | Loaded | Failed | Bye


class Line:
    """Whole messages over one socket. One thread sends at a time."""

    def __init__(self, end: socket.socket) -> None:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = end
        self._bytes = bytearray()
        self._sending = threading.Lock()
        self._decoder: msgspec.msgpack.Decoder[Word] = msgspec.msgpack.Decoder(Word)

    def send(self, word: Word) -> None:
        """Raises OSError where nobody is at the other end any more."""
        data = msgspec.msgpack.encode(word)
        with self._sending:
            self.socket.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> list[Word]:
        """What is there by now; waits for it as long as the socket's timeout says. Raises OSError, EOFError at the end
        and msgspec.DecodeError for what is no message."""
        data = self.socket.recv(_RECEIVE_BYTES)
        if not data:
            raise EOFError
        self._bytes += data
        words = []
        while len(self._bytes) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._bytes)[0]
            if end > _MOST_BYTES:
                raise msgspec.DecodeError("no message is so long")
            if len(self._bytes) < end:
                break
            words.append(self._decoder.decode(bytes(self._bytes[_LENGTH.size : end])))
            del self._bytes[:end]
        return words

    def close(self) -> None:
        self.socket.close()


class Lifeline:
    """A rank's lines: rank 0 has one to each other, they have one to rank 0. Beats in a thread of its own.

    Until `guard` is called a loss is only noted, and raised by `check` and `wait_loaded`; from then on it ends the
    process, which may be in the middle of a computation with those that are lost.
    """

    def __init__(self, rank: int, lines: Mapping[int, Line]) -> None:
        self.rank = rank
        self._lines = dict(lines)
        self.waited_s: dict[int, float] = {}  # as the others have said last
        self._waited = Waited()
        self._loaded: set[int] = set()
        self._reason: str | None = None
        self._note: Callable[[int], None] = lambda rank: None
        self._changed = threading.Condition()
        self._guards = self._over = False
        self._thread = threading.Thread(target=self._watch, name="lifeline", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises RanksError where a rank is lost."""
        if self._reason is not None:
            raise RanksError(self._reason)

    def tell(self, word: Word) -> None:
        """To all at the other ends that are still there."""
        for line in self._lines.values():
            with contextlib.suppress(OSError):
                line.send(word)

    def tell_of(self, waited: Waited) -> None:
        """From now on the others hear how long this rank has waited."""
        self._waited = waited

    def note_losses(self, note: Callable[[int], None]) -> None:
        """From now on this is told which rank at the other end was lost, if it did not say why."""
        self._note = note

    def wait_loaded(self) -> None:
        """Until all others have their shares. Raises RanksError."""
        with self._changed:
            self._changed.wait_for(lambda: self._reason is not None or len(self._loaded) == len(self._lines))
        self.check()

    def guard(self) -> None:
        """From now on a loss ends the process."""
        with self._changed:
            self._guards = True
        if self._reason is not None:
            self._end_process(self._reason)

    def fail(self, reason: str) -> None:
        """This rank cannot go on: say why, and hang up."""
        self._hang_up(Failed(reason))

    def close(self) -> None:
        """The group ends in order."""
        self._hang_up(Bye())

    def _hang_up(self, word: Word) -> None:
        self._over = True
        self.tell(word)  # also where one end has said goodbye first: the others have not heard it
        self._thread.join()
        for line in self._lines.values():
            line.close()

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, line in self._lines.items():
                line.socket.settimeout(SILENCE_S)
                selector.register(line.socket, selectors.EVENT_READ, rank)
            beat_at_s = 0.0
            turn_s = BEAT_INTERVAL_S / 2
            silence = Silence(self._lines, limit_s=SILENCE_S, turn_s=turn_s, now_s=time.monotonic())
            while not self._over:
                found = selector.select(turn_s)
                silence.turn(now_s := time.monotonic())
                for key, _ in found:
                    self._hear(key.data)
                    silence.heard(key.data)
                if now_s - beat_at_s >= BEAT_INTERVAL_S:
                    beat_at_s = now_s
                    self.tell(Beat(self._waited.seconds))
                for rank in silence.too_long():
                    self._lose(rank, f"rank {rank} has said nothing for {SILENCE_S:g} s: it hangs, or its host is away")

    def _hear(self, rank: int) -> None:
        try:
            words: Iterable[Word] = self._lines[rank].receive()
        except (OSError, EOFError, msgspec.DecodeError):
            self._lose(rank, f"rank {rank} is lost: its process has ended, or the connection to its host")
            return
        for word in words:
            if isinstance(word, Beat):
                self.waited_s[rank] = word.waited_s
            elif isinstance(word, Loaded):
                with self._changed:
                    self._loaded.add(rank)
                    self._changed.notify_all()
            elif isinstance(word, Failed):
                self._lose(None, word.reason if rank == 0 else f"rank {rank}: {word.reason}")
            elif isinstance(word, Bye):
                self._over = True

    def _lose(self, rank: int | None, reason: str) -> None:
        if self._over:
            return
        self._over = True
        self.tell(Failed(reason))  # rank 0 to those that are left; the others to a rank 0 that may hear it
        if rank is not None:
            self._note(rank)
        with self._changed:
            self._reason = reason
            guards = self._guards
            self._changed.notify_all()
        if guards:
            self._end_process(reason)

    def _end_process(self, reason: str) -> None:
        structlog.get_logger().error("rank_lost", rank=self.rank, reason=reason, advice="start the engine again")
        os._exit(LOST_RANK)  # the main thread may wait in a collective that never ends
