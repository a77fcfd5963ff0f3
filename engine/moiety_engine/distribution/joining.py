"""How the ranks of a model meet, and find out that they belong together before they compute together: rank 0 waits for
all of them and compares what they bring, and all get the same verdict, with the reason.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import msgspec
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistError

from moiety_engine.distribution.lifeline import Failed, Hello, Lifeline, Line, Welcome, Word
from moiety_engine.errors import RanksError

if TYPE_CHECKING:
    from collections.abc import Callable

    from moiety_engine.distribution.meeting import Meeting

_VERDICT_GRACE_S = 5.0
_HELLO_S = 5.0  # for which one that has come is waited for to say who it is
_ADDRESS = "lifeline"  # the key in the store under which rank 0 says where it waits
LONGEST_WAIT = timedelta(days=365)  # of collectives: who waits for a lost rank is ended by its lifeline


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
    check: Callable[[], None] = lambda: None,
) -> Lifeline:
    """Wait for the others; returns when all are there and have the same settings and checkpoint. `check` may raise
    meanwhile. Raises RanksError, on each rank for the same reason."""
    store = PrefixStore(f"moiety/{meeting.attempt}", store)
    if meeting.rank:
        return Lifeline(meeting.rank, {0: _arrive(meeting, store, settings, checkpoint, timeout_s)})
    with _listener(meeting.host) as listener:
        secret = secrets.token_hex()
        where = [meeting.host, listener.getsockname()[1], secret]
        store.set(_ADDRESS, msgspec.json.encode(where).decode())
        own = Hello(0, secret, settings, checkpoint)
        lines: dict[int, Line] = {}
        try:
            _receive_all(listener, own, lines, meeting.num_ranks, time.monotonic() + timeout_s, check)
        except RanksError as exc:
            for line in lines.values():
                with contextlib.suppress(OSError):
                    line.send(Failed(str(exc)))
            raise
    for line in lines.values():
        line.send(Welcome())
    return Lifeline(0, lines)


def _listener(host: str) -> socket.socket:
    try:
        return socket.create_server((host, 0), family=socket.getaddrinfo(host, 0)[0][0])
    except OSError:  # an address of a translator before this host
        return socket.create_server(("", 0))


def _arrive(meeting: Meeting, store: Store, settings: dict[str, str], checkpoint: str, timeout_s: float) -> Line:
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
        raise RanksError(f"{unreached}, or went away: see what it says") from exc
    for word in words:
        if isinstance(word, Failed):
            raise RanksError(word.reason)
    return line


def _receive_all(
    listener: socket.socket,
    own: Hello,
    lines: dict[int, Line],
    num_ranks: int,
    until_s: float,
    check: Callable[[], None],
) -> None:
    listener.settimeout(0.2)
    while len(lines) < num_ranks - 1:
        check()
        if time.monotonic() > until_s:
            missing = ", ".join(str(rank) for rank in range(1, num_ranks) if rank not in lines)
            raise RanksError(
                f"of {num_ranks} ranks these did not come in time: {missing}. See that they were started, and that "
                "they reach this host; --join-timeout-s sets how long they are waited for"
            )
        try:
            line = Line(listener.accept()[0])
        except OSError:
            continue
        hello = _hello(line)
        if not isinstance(hello, Hello) or not secrets.compare_digest(hello.secret.encode(), own.secret.encode()):
            line.close()
            continue
        known = hello.rank in lines or not 0 < hello.rank < num_ranks
        lines[hello.rank] = line
        if known:
            raise RanksError(f"a rank {hello.rank} of {num_ranks} came twice, or cannot be: see what started it")
        _compare(own, hello)


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
