"""Heartbeats between rank 0 and the other ranks, over one connection each.

A broken connection means that a rank is lost, and with it the group; so does a silence of a few seconds in which this
process was scheduled. Rank 0 then sends the others the reason, and each rank ends its process. A rank that ends
normally, or fails and can still report it, also says so over this connection. Torch's own collectives would notice
a lost rank too, but late and without the reason.
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

LOST_RANK = 5  # exit code of a process that lost a rank
BEAT_INTERVAL_S = 0.5
SILENCE_S = 4.0
_TOGETHER_S = 0.1  # time within which the other lost ranks of the same host are detected
_LENGTH = struct.Struct("!I")
_RECEIVE_BYTES = 1 << 16
_MAX_BYTES = 1 << 20  # of a message; a longer one is invalid


class RankHello(msgspec.Struct, frozen=True, tag=True):
    """First message of a rank that joins.

    `settings` and `checkpoint` must equal those of rank 0; `secret` proves that the rank read rank 0's address in the
    store.
    """

    rank: int
    secret: str
    settings: dict[str, str]
    checkpoint: str


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """All ranks have joined except those in `excluded`, which are excluded from the group."""

    excluded: tuple[int, ...] = ()


class Beat(msgspec.Struct, frozen=True, tag=True):
    """Heartbeat. `waited_s`: total time that the rank has waited for the ranks with the other half of each layer.

    `figures`: load figures of the rank, which rank 0 adds to its own.
    """

    waited_s: float = 0.0
    figures: dict[str, int] = {}


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The rank has loaded its share of the model."""


class RankFailed(msgspec.Struct, frozen=True, tag=True):
    """The rank, or the whole group, ends for this reason.

    `own`: the others could have continued, so this rank counts as lost.
    """

    reason: str
    own: bool = False


class RankGroupEnd(msgspec.Struct, frozen=True, tag=True):
    """The group ends normally."""


RankMessage = RankHello | Welcome | Beat | Loaded | RankFailed | RankGroupEnd


class RankConnection:
    """Message connection over one socket. One thread sends at a time."""

    def __init__(self, end: socket.socket) -> None:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = end
        self._bytes = bytearray()
        self._sending = threading.Lock()
        self._decoder: msgspec.msgpack.Decoder[RankMessage] = msgspec.msgpack.Decoder(RankMessage)

    def send(self, word: RankMessage) -> None:
        """Send a message. Raises OSError if the connection is closed."""
        data = msgspec.msgpack.encode(word)
        with self._sending:
            self.socket.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> list[RankMessage]:
        """Return the messages received so far; wait for data as long as the socket's timeout.

        Raises OSError; EOFError at the end; msgspec.DecodeError for an invalid message.
        """
        data = self.socket.recv(_RECEIVE_BYTES)
        if not data:
            raise EOFError
        self._bytes += data
        words = []
        while len(self._bytes) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._bytes)[0]
            if end > _MAX_BYTES:
                raise msgspec.DecodeError("the message is too long")
            if len(self._bytes) < end:
                break
            words.append(self._decoder.decode(bytes(self._bytes[_LENGTH.size : end])))
            del self._bytes[:end]
        return words

    def close(self) -> None:
        self.socket.close()


@contextmanager
def explaining() -> Iterator[None]:
    """Delay a RuntimeError, which may come from a collective that lost a rank.

    The heartbeat then ends this process first, and reports the reason.
    """
    try:
        yield
    except RuntimeError:
        time.sleep(SILENCE_S + 1)
        raise


class RankHeartbeat:
    """A rank's connections: rank 0 has one to each other rank, each other rank has one to rank 0.

    Beats in its own thread.

    Until `guard` is called, and except within `guarding`, a loss is only recorded, and raised by `check` and
    `wait_loaded`. Afterwards a loss ends the process, which may be in the middle of a collective with the lost ranks.
    """

    def __init__(
        self, rank: int, lines: Mapping[int, RankConnection], note: Callable[[int], None] | None = None
    ) -> None:
        """Start the heartbeat. `note` is called with each lost rank, including those lost together with it."""
        self.rank = rank
        self._lines = dict(lines)
        self.waited_s: dict[int, float] = {}  # as last reported by the others
        self.figures: dict[int, dict[str, int]] = {}  # as last reported by the others
        self._waited = Waited()
        self._own_figures: Callable[[], dict[str, int]] = dict
        self._loaded: set[int] = set()
        self._reason: str | None = None
        self._note = note
        self._changed = threading.Condition()
        self._guards = self._over = False
        self._dispensable: set[int] = set()  # ranks that join or leave while the group runs
        self._joining: dict[int, RankConnection] = {}  # not watched yet
        self.waited_before_s = 0.0  # of ranks that have left
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise RanksError if a rank is lost."""
        if self._reason is not None:
            raise RanksError(self._reason)

    def send(self, word: RankMessage) -> None:
        """Send a message to all connected ranks."""
        for line in self._lines.values():
            with contextlib.suppress(OSError):
                line.send(word)

    def report_waited(self, waited: Waited) -> None:
        """Report this waiting time to the others from now on."""
        self._waited = waited

    def report_figures(self, read: Callable[[], dict[str, int]]) -> None:
        """Report these load figures to the others from now on. `read` is called in the heartbeat's thread."""
        self._own_figures = read

    def watch_candidates(self, lines: Mapping[int, RankConnection]) -> None:
        """Exchange heartbeats with these ranks too, whose loss is not that of the group until they are admitted."""
        with self._changed:
            self._dispensable |= lines.keys()
            self._joining |= lines

    def lost_candidates(self, ranks: Iterable[int]) -> list[int]:
        """Return those of these ranks that are not connected any more."""
        with self._changed:
            return [rank for rank in ranks if rank not in self._lines and rank not in self._joining]

    def admit(self, ranks: Iterable[int]) -> None:
        """Count the loss of these candidates as a loss of the group from now on."""
        with self._changed:
            self._dispensable -= set(ranks)
        for rank in self.lost_candidates(ranks):
            self._report_loss(f"rank {rank} is lost: its process ended", [rank])

    def dismiss(self, ranks: Iterable[int]) -> None:
        """Let these ranks end from now on without a loss of the group."""
        with self._changed:
            self._dispensable |= set(ranks)

    def wait_loaded(self) -> None:
        """Wait until all other ranks have loaded their shares. Raises RanksError."""
        with self._changed:
            self._changed.wait_for(lambda: self._reason is not None or len(self._loaded) == len(self._lines))
        self.check()

    def guard(self) -> None:
        """End the process on any loss from now on."""
        with self._changed:
            self._guards = True
        if self._reason is not None:
            self._end_process(self._reason)

    @contextmanager
    def guarding(self) -> Iterator[None]:
        """End the process on a loss within this context."""
        self.guard()
        try:
            yield
        finally:
            with self._changed:
                self._guards = False

    def fail(self, reason: str, *, own: bool = False) -> None:
        """Report that this rank cannot continue, and close the connections. `own`: see `RankFailed`."""
        self._end_connections(RankFailed(reason, own))

    def close(self) -> None:
        """End the group normally."""
        self._end_connections(RankGroupEnd())

    def _end_connections(self, word: RankMessage) -> None:
        self._over = True
        self.send(word)  # also if another rank sent RankGroupEnd first: the other ranks have not received it
        self._thread.join()
        for line in self._lines.values():
            line.close()

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, line in self._lines.items():
                line.socket.settimeout(SILENCE_S)
                selector.register(line.socket, selectors.EVENT_READ, rank)
            beat_at_s = 0.0
            interval_s = BEAT_INTERVAL_S / 2
            silence = HeartbeatTimeout(self._lines, limit_s=SILENCE_S, interval_s=interval_s, now_s=time.monotonic())
            while not self._over:
                self._watch_joining(selector, silence)
                found = selector.select(interval_s)
                silence.begin_interval(now_s := time.monotonic())
                for key, _ in found:
                    if self._receive_messages(key.data):
                        silence.record(key.data)
                    else:
                        self._forget_rank(key.data, selector, silence)
                if now_s - beat_at_s >= BEAT_INTERVAL_S:
                    beat_at_s = now_s
                    self.send(Beat(self._waited.seconds, self._own_figures()))
                for rank in self._dispensable.intersection(silence.too_long()):
                    self._forget_rank(rank, selector, silence)
                if silent := silence.too_long():
                    reason = (
                        f"rank {silent[0]} sent no heartbeat for {SILENCE_S:g} s: its process hangs, or its "
                        "host is not reachable"
                    )
                    self._report_loss(reason, silence.longer_than(SILENCE_S / 2))

    def _watch_joining(self, selector: selectors.BaseSelector, silence: HeartbeatTimeout) -> None:
        with self._changed:
            joining, self._joining = self._joining, {}
            self._lines = self._lines | joining
        for rank, line in joining.items():
            line.socket.settimeout(SILENCE_S)
            selector.register(line.socket, selectors.EVENT_READ, rank)
            silence.record(rank)

    def _forget_rank(self, rank: int, selector: selectors.BaseSelector, silence: HeartbeatTimeout) -> None:
        """Close the connection of a rank whose loss is not that of the group."""
        with self._changed:
            line = self._lines[rank]
            self._lines = {other: one for other, one in self._lines.items() if other != rank}
            self._dispensable.discard(rank)
        self.waited_before_s += self.waited_s.pop(rank, 0.0)
        self.figures.pop(rank, None)
        selector.unregister(line.socket)
        silence.forget(rank)
        line.close()

    def _receive_messages(self, rank: int) -> bool:
        """Process the messages of a rank. Return False if it has ended and its loss is not that of the group."""
        try:
            words: Iterable[RankMessage] = self._lines[rank].receive()
        except (OSError, EOFError, msgspec.DecodeError):
            if rank in self._dispensable:
                return False
            self._report_loss(
                f"rank {rank} is lost: its process ended, or the connection to its host is closed", [rank]
            )
            return True
        for word in words:
            if rank in self._dispensable and isinstance(word, RankFailed | RankGroupEnd):
                return False
            if isinstance(word, Beat):
                self.waited_s[rank], self.figures[rank] = word.waited_s, word.figures
            elif isinstance(word, Loaded):
                with self._changed:
                    self._loaded.add(rank)
                    self._changed.notify_all()
            elif isinstance(word, RankFailed):
                self._report_loss(
                    word.reason if rank == 0 else f"rank {rank}: {word.reason}", [rank] if word.own else []
                )
            elif isinstance(word, RankGroupEnd):
                self._over = True
        return True

    def _report_loss(self, reason: str, ranks: list[int]) -> None:
        if self._over:
            return
        self._over = True
        if ranks and self._note is not None:
            for rank in sorted({*ranks, *self._find_ranks_lost_together(ranks)}):
                self._note(rank)
        self.send(RankFailed(reason))  # rank 0 to the remaining ranks; the others to rank 0, which may still read
        with self._changed:
            self._reason = reason
            guards = self._guards
            self._changed.notify_all()
        if guards:
            self._end_process(reason)

    def _find_ranks_lost_together(self, ranks: list[int]) -> list[int]:
        """Return the ranks whose connections end now as well, as those of one host do.

        It excludes ranks that report that they end because of this loss.
        """
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
                        if not any(isinstance(word, RankFailed | RankGroupEnd) for word in words):
                            continue
                    selector.unregister(key.fileobj)
        return found

    def _end_process(self, reason: str) -> None:
        structlog.get_logger().error("rank_lost", rank=self.rank, reason=reason, advice="start the engine again")
        os._exit(LOST_RANK)  # the main thread may be blocked in a collective forever
