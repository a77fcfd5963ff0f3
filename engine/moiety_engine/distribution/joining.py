"""How the ranks of a model meet, and find out that they belong together before they compute together: rank 0 waits for
all of them and compares what they bring, and all get the same verdict, with the reason. Those that do not come may be
done without, where the others can have their parts of the model.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import msgspec
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistError

from moiety_engine.distribution.layout import leaving
from moiety_engine.distribution.lifeline import Failed, Hello, Lifeline, Line, Welcome, Word
from moiety_engine.errors import InvalidConfig, RanksError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from moiety_engine.distribution.layout import Layout
    from moiety_engine.distribution.meeting import Meeting

_VERDICT_GRACE_S = 5.0
_HELLO_S = 5.0  # for which one that has come is waited for to say who it is
_ADDRESS = "lifeline"  # the key in the store under which rank 0 says where it waits
_MASKED = "masked"  # and the one under which it says whom it does not wait for any more
LONGEST_WAIT = timedelta(days=365)  # of collectives: who waits for a lost rank is ended by its lifeline


@dataclass(frozen=True, slots=True)
class Sparing:
    """For how long rank 0 waits for ranks that can be done without."""

    layout: Layout
    after_s: float

    def leaving(self, away: Collection[int]) -> tuple[tuple[int, ...], str]:
        """Who leaves with them; or nobody, and why the others cannot do without."""
        try:
            return leaving(self.layout, away), ""
        except InvalidConfig as exc:
            return (), f". The others cannot start without: {exc}"


@dataclass(frozen=True, slots=True)
class Met:
    """A rank's lines to those that came, and who did not, by their numbers before."""

    lifeline: Lifeline
    masked: tuple[int, ...] = ()


def open_store(meeting: Meeting, timeout_s: float) -> TCPStore:
    """The place where ranks leave each other their addresses. Raises RanksError."""
    serves = meeting.rank == 0 and not meeting.store_runs
    try:
        return TCPStore(
            meeting.host,
            meeting.port,
            None,
            serves,
            timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
    except (DistError, RuntimeError) as exc:
        what = "could not be opened by" if serves else "was not reached by"
        raise RanksError(
            f"the meeting place {meeting.host}:{meeting.port} {what} rank {meeting.rank} within {timeout_s:g} s: see "
            "that rank 0 runs there, and that the port is free and open"
        ) from exc


def meet(
    meeting: Meeting,
    store: Store,
    settings: dict[str, str],
    checkpoint: str,
    *,
    timeout_s: float,
    sparing: Sparing | None = None,
    gone: Callable[[], Mapping[int, str]] = lambda: {},
) -> Met:
    """Wait for the others; returns when all are there and have the same settings and checkpoint, or all but some that
    can be done without. `gone`: the ranks that are known not to come, and why. Raises RanksError, on each rank for the
    same reason."""
    store = PrefixStore(f"moiety/{meeting.attempt}", store)
    if meeting.rank:
        line, masked = _arrive(meeting, store, settings, checkpoint, timeout_s)
        return Met(Lifeline(meeting.rank, {0: line}), masked)
    with _listener(meeting.host) as listener:
        secret = secrets.token_hex()
        where = [meeting.host, listener.getsockname()[1], secret]
        store.set(_ADDRESS, msgspec.json.encode(where).decode())
        own = Hello(0, secret, settings, checkpoint)
        lines: dict[int, Line] = {}
        try:
            masked = _receive_all(listener, own, lines, meeting.num_ranks, timeout_s, sparing, gone)
        except RanksError as exc:
            for line in lines.values():
                with contextlib.suppress(OSError):
                    line.send(Failed(str(exc)))
                line.close()
            raise
        if masked:
            store.set(_MASKED, msgspec.json.encode(masked).decode())
    for line in lines.values():
        line.send(Welcome(masked))
    return Met(Lifeline(0, lines), masked)


def _listener(host: str) -> socket.socket:
    try:
        return socket.create_server((host, 0), family=socket.getaddrinfo(host, 0)[0][0])
    except OSError:  # an address of a translator before this host
        return socket.create_server(("", 0))


def _arrive(
    meeting: Meeting, store: Store, settings: dict[str, str], checkpoint: str, timeout_s: float
) -> tuple[Line, tuple[int, ...]]:
    """The line to rank 0, and who is done without."""
    line: Line | None = None
    unreached = f"rank 0 at {meeting.host} was not reached by rank {meeting.rank} within {timeout_s:g} s"
    try:
        store.set_timeout(timedelta(seconds=timeout_s))
        host, port, secret = msgspec.json.decode(store.get(_ADDRESS), type=tuple[str, int, str])
        line = Line(socket.create_connection((host, port), timeout=timeout_s))
        line.send(Hello(meeting.rank, secret, settings, checkpoint))
        line.socket.settimeout(timeout_s + _VERDICT_GRACE_S)  # rank 0 waits as long, and then says who is missing
        while not (words := line.receive()):
            pass  # a part of it has come
    except (DistError, RuntimeError, OSError, EOFError, msgspec.DecodeError) as exc:
        if line is not None:
            line.close()
        if meeting.rank in _masked_in(store):
            raise RanksError(
                f"rank {meeting.rank} came after the others had started without it, and have its part of the model: it "
                "is taken in again when the group next starts"
            ) from exc
        raise RanksError(f"{unreached}, or went away: see what it says") from exc
    masked: tuple[int, ...] = ()
    for word in words:
        if isinstance(word, Failed):
            line.close()
            raise RanksError(word.reason)
        if isinstance(word, Welcome):
            masked = word.masked
    return line, masked


def _masked_in(store: Store) -> tuple[int, ...]:
    with contextlib.suppress(DistError, RuntimeError):  # it may be gone, with rank 0
        if store.check([_MASKED]):
            return msgspec.json.decode(store.get(_MASKED), type=tuple[int, ...])
    return ()


def _receive_all(
    listener: socket.socket,
    own: Hello,
    lines: dict[int, Line],
    num_ranks: int,
    timeout_s: float,
    sparing: Sparing | None,
    gone: Callable[[], Mapping[int, str]],
) -> tuple[int, ...]:
    """Those that are done without."""
    listener.settimeout(0.2)
    begin_s = time.monotonic()
    while missing := [rank for rank in range(1, num_ranks) if rank not in lines]:
        left, waited_s = gone(), time.monotonic() - begin_s
        for rank, why in left.items():
            if rank in lines or sparing is None:
                raise RanksError(why)
        why_not, none_will_come = "", left.keys() >= set(missing)
        if sparing is not None and (none_will_come or waited_s > sparing.after_s):
            masked, why_not = sparing.leaving(missing)
            if masked:
                _dismiss(set(masked) & lines.keys(), lines)
                return masked
        if none_will_come:
            raise RanksError("; ".join(left.values()) + why_not)
        if waited_s > timeout_s:
            raise RanksError(
                f"of {num_ranks} ranks these did not come in time: {', '.join(map(str, missing))}. See that they were "
                "started, and that they reach this host; --join-timeout-s sets how long they are waited for" + why_not
            )
        try:
            line = Line(listener.accept()[0])
        except OSError:
            continue
        hello = _hello(line)
        if not isinstance(hello, Hello) or not secrets.compare_digest(hello.secret.encode(), own.secret.encode()):
            line.close()
            continue
        if hello.rank in left:
            with contextlib.suppress(OSError):
                line.send(Failed(left[hello.rank]))
            line.close()
            continue
        known = hello.rank in lines or not 0 < hello.rank < num_ranks
        lines[hello.rank] = line
        if known:
            raise RanksError(f"a rank {hello.rank} of {num_ranks} came twice, or cannot be: see what started it")
        _compare(own, hello)
    return ()


def _dismiss(ranks: Collection[int], lines: dict[int, Line]) -> None:
    for rank in ranks:
        line = lines.pop(rank)
        with contextlib.suppress(OSError):
            line.send(Failed(f"rank {rank} is done without, as another rank that it shares heads with did not come"))
        line.close()


def _hello(line: Line) -> Word | None:
    """What comes first over a new line, in however many pieces; None where it is no word of ours, or none comes."""
    line.socket.settimeout(_HELLO_S)
    until_s = time.monotonic() + _HELLO_S
    try:
        while not (words := line.receive()):
            if time.monotonic() > until_s:
                return None
    except (OSError, EOFError, msgspec.DecodeError):
        return None
    return words[0]


def _compare(own: Hello, other: Hello) -> None:
    if own.settings != other.settings:
        names = own.settings.keys() | other.settings.keys()
        differing = "; ".join(
            f"{name} is {other.settings.get(name)} there and {own.settings.get(name)} on rank 0"
            for name in sorted(names)
            if own.settings.get(name) != other.settings.get(name)
        )
        raise RanksError(f"rank {other.rank} was started with other settings: {differing}. Give all ranks the same")
    if own.checkpoint != other.checkpoint:
        raise RanksError(
            f"rank {other.rank} has another checkpoint than rank 0: config.json or the safetensors files differ. Give "
            "all ranks copies of the same"
        )
