"""Where the ranks of a model meet, and how they find out that they belong together before they compute together.

A launcher, torchrun or DeepSpeed's, starts all ranks and says so in the environment; else rank 0 has started the others
itself. Rank 0 waits for all of them and compares what they bring: all get the same verdict, with the reason.
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

from moiety_engine.distribution.lifeline import Failed, Hello, Lifeline, Line, Welcome
from moiety_engine.errors import InvalidConfig, RanksError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from moiety_engine.distribution.layout import Layout

_ADDRESS = "lifeline"  # the key in the store under which rank 0 says where it waits
LONGEST_WAIT = timedelta(days=365)  # of collectives: who waits for a lost rank is ended by its lifeline


@dataclass(frozen=True, slots=True)
class Meeting:
    """One rank's view of where all meet. `store_runs`: the launcher has it, so that rank 0 does not start it."""

    rank: int
    num_ranks: int
    local_rank: int = 0
    local_num_ranks: int = 1  # on this host
    host: str = "127.0.0.1"
    port: int = 0
    store_runs: bool = False
    attempt: int = 0  # of a launcher that starts the ranks again


def meeting_from(environ: Mapping[str, str]) -> Meeting | None:
    """What a launcher says; None where there is none, or it started one process only. Raises InvalidConfig."""
    if int(environ.get("WORLD_SIZE", "1")) <= 1:
        return None
    try:
        return Meeting(
            rank=int(environ["RANK"]),
            num_ranks=int(environ["WORLD_SIZE"]),
            local_rank=int(environ.get("LOCAL_RANK", "0")),
            local_num_ranks=int(environ.get("LOCAL_WORLD_SIZE") or environ.get("LOCAL_SIZE") or "1"),
            host=environ["MASTER_ADDR"],
            port=int(environ["MASTER_PORT"]),
            store_runs=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            attempt=int(environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        )
    except (KeyError, ValueError) as exc:
        raise InvalidConfig(
            f"WORLD_SIZE says that a launcher started {environ['WORLD_SIZE']} ranks, but RANK, MASTER_ADDR and "
            f"MASTER_PORT are not all there ({exc}): start with torchrun or deepspeed, or unset WORLD_SIZE"
        ) from exc


def require_ranks(layout: Layout, meeting: Meeting) -> None:
    """Raises InvalidConfig where a launcher started another number of ranks than the layout has."""
    if layout.num_ranks != meeting.num_ranks:
        raise InvalidConfig(
            f"--pp {layout.pp} × --dp-attention {layout.dp} × --tp {layout.tp} make {layout.num_ranks} ranks, and "
            f"{meeting.num_ranks} were started: change the options or the launcher's number of processes"
        )


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
        words = line.receive()
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
            line.socket.settimeout(5)
            hello = next(iter(line.receive()), None)
        except (OSError, EOFError, msgspec.DecodeError):
            continue
        if not isinstance(hello, Hello) or not secrets.compare_digest(hello.secret, own.secret):
            line.close()
            continue
        known = hello.rank in lines or not 0 < hello.rank < num_ranks
        lines[hello.rank] = line
        if known:
            raise RanksError(f"a rank {hello.rank} of {num_ranks} came twice, or cannot be: see what started it")
        _compare(own, hello)


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
