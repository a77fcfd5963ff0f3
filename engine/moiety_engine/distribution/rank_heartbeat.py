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
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec
import structlog

from moiety_engine.distribution.collectives import Waited
from moiety_engine.distribution.heartbeat_timeout import HeartbeatTimeout
from moiety_engine.errors import RanksError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

LOST_RANK = 5  # exit code
BEAT_INTERVAL_S = 0.5
SILENCE_S = 4.0
_TOGETHER_S = 0.1  # within which those of one host are found lost
_LENGTH = struct.Struct("!I")
_RECEIVE_BYTES = 1 << 16
_MOST_BYTES = 1 << 20  # of a message; what says that more will come is none of ours


class RankHello(msgspec.Struct, frozen=True, tag=True):
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


class RankFailed(msgspec.Struct, frozen=True, tag=True):
    """The rank, or the whole group, ends because of this. `own`: others could have gone on, so it counts as lost."""

    reason: str
    own: bool = False


class Bye(msgspec.Struct, frozen=True, tag=True):
    """The group ends in order."""


Word = RankHello | Welcome | Beat | Loaded | RankFailed | Bye


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


@contextmanager
def explaining() -> Iterator[None]:
    """What fails within may be a collective that has lost a rank: its lifeline ends this process, and says why."""
    try:
        yield
    except RuntimeError:
        time.sleep(SILENCE_S + 1)
        raise


class RankHeartbeat:
    """A rank's lines: rank 0 has one to each other, they have one to rank 0. Beats in a thread of its own.

    Until `guard` is called, and but for within `guarding`, a loss is only noted, and raised by `check` and
    `wait_loaded`; then it ends the process, which may be in the middle of a computation with those that are lost.
    """

    def __init__(self, rank: int, lines: Mapping[int, Line], note: Callable[[int], None] | None = None) -> None:
        """`note` is told which ranks at the other ends were lost, and those that were with them."""
        self.rank = rank
        self._lines = dict(lines)
        self.waited_s: dict[int, float] = {}  # as the others have said last
        self._waited = Waited()
        self._loaded: set[int] = set()
        self._reason: str | None = None
        self._note = note
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

    @contextmanager
    def guarding(self) -> Iterator[None]:
        """Within, a loss ends the process."""
        self.guard()
        try:
            yield
        finally:
            with self._changed:
                self._guards = False

    def fail(self, reason: str, *, own: bool = False) -> None:
        """This rank cannot go on: say why, and hang up. `own`: as `RankFailed` has it."""
        self._hang_up(RankFailed(reason, own))

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
            silence = HeartbeatTimeout(self._lines, limit_s=SILENCE_S, turn_s=turn_s, now_s=time.monotonic())
            while not self._over:
                found = selector.select(turn_s)
                silence.turn(now_s := time.monotonic())
                for key, _ in found:
                    self._hear(key.data)
                    silence.heard(key.data)
                if now_s - beat_at_s >= BEAT_INTERVAL_S:
                    beat_at_s = now_s
                    self.tell(Beat(self._waited.seconds))
                if silent := silence.too_long():
                    reason = f"rank {silent[0]} has said nothing for {SILENCE_S:g} s: it hangs, or its host is away"
                    self._lose(reason, silence.longer_than(SILENCE_S / 2))

    def _hear(self, rank: int) -> None:
        try:
            words: Iterable[Word] = self._lines[rank].receive()
        except (OSError, EOFError, msgspec.DecodeError):
            self._lose(f"rank {rank} is lost: its process has ended, or the connection to its host", [rank])
            return
        for word in words:
            if isinstance(word, Beat):
                self.waited_s[rank] = word.waited_s
            elif isinstance(word, Loaded):
                with self._changed:
                    self._loaded.add(rank)
                    self._changed.notify_all()
            elif isinstance(word, RankFailed):
                self._lose(word.reason if rank == 0 else f"rank {rank}: {word.reason}", [rank] if word.own else [])
            elif isinstance(word, Bye):
                self._over = True

    def _lose(self, reason: str, ranks: list[int]) -> None:
        if self._over:
            return
        self._over = True
        if ranks and self._note is not None:
            for rank in sorted({*ranks, *self._lost_with(ranks)}):
                self._note(rank)
        self.tell(RankFailed(reason))  # rank 0 to those that are left; the others to a rank 0 that may hear it
        with self._changed:
            self._reason = reason
            guards = self._guards
            self._changed.notify_all()
        if guards:
            self._end_process(reason)

    def _lost_with(self, ranks: list[int]) -> list[int]:
        """Whose lines have ended as well by now, as those of one host do; but not of those that say that they end since
        they have lost this one."""
        found, until_s = [], time.monotonic() + _TOGETHER_S
        with selectors.DefaultSelector() as selector:
            for rank, line in self._lines.items():
                if rank not in ranks:
                    selector.register(line.socket, selectors.EVENT_READ, rank)
            while (left_s := until_s - time.monotonic()) > 0:
                for key, _ in selector.select(left_s):
                    try:
                        words = self._lines[key.data].receive()
                    except (OSError, EOFError, msgspec.DecodeError):
                        found.append(key.data)
                    else:
                        if not any(isinstance(word, RankFailed | Bye) for word in words):
                            continue
                    selector.unregister(key.fileobj)
        return found

    def _end_process(self, reason: str) -> None:
        structlog.get_logger().error("rank_lost", rank=self.rank, reason=reason, advice="start the engine again")
        os._exit(LOST_RANK)  # the main thread may wait in a collective that never ends
