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

from moiety_engine.distribution.connecting_ranks import ConnectingRanks
from moiety_engine.distribution.layout import leaving
from moiety_engine.distribution.rank_heartbeat import Line, RankFailed, RankHeartbeat, RankHello, Welcome
from moiety_engine.errors import InvalidConfig, RanksError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from moiety_engine.distribution.layout import Layout
    from moiety_engine.distribution.rendezvous_address import Rendezvous

_VERDICT_GRACE_S = 5.0
_SHARES_HEADS = "rank {rank} is done without, as another rank that it shares heads with did not come"
_ADDRESS = "lifeline"  # the key in the store under which rank 0 says where it waits
_MASKED = "masked"  # and the one under which it says whom it does not wait for any more
LONGEST_WAIT = timedelta(days=365)  # of collectives: who waits for a lost rank is ended by its lifeline


@dataclass(frozen=True, slots=True)
class RankExclusion:
    """For how long rank 0 waits for ranks that can be done without."""

    layout: Layout
    after_s: float

    def leaving(self, away: Collection[int]) -> tuple[tuple[int, ...], str]:
        """Who leaves with them; or nobody, and why the others cannot do without."""
        try:
            return leaving(self.layout, away), ""
        except InvalidConfig as exc:
            return (), f". The others cannot start without: {exc}"

    def can_without(self, away: Collection[int]) -> bool:
        return not away or bool(self.leaving(away)[0])


@dataclass(frozen=True, slots=True)
class ConnectedRanks:
    """A rank's lines to those that came, and who did not, by their numbers before."""

    lifeline: RankHeartbeat
    masked: tuple[int, ...] = ()


def open_store(meeting: Rendezvous, timeout_s: float) -> TCPStore:
    """The place where ranks leave each other their addresses. Raises RanksError."""
    serves = meeting.rank == 0 and not meeting.store_runs
    timeout = timedelta(seconds=timeout_s)
    try:
        if not (serves and meeting.is_local):
            return TCPStore(meeting.store_host, meeting.port, None, serves, timeout, wait_for_workers=False)
        with _bound(meeting.own_host, meeting.port) as listener:  # by itself it listens on all addresses
            port = listener.getsockname()[1]
            own = listener.detach()
        return TCPStore(meeting.own_host, port, None, True, timeout, wait_for_workers=False, master_listen_fd=own)
    except (DistError, RuntimeError, OSError) as exc:
        what = "could not be opened by" if serves else "was not reached by"
        raise RanksError(
            f"the meeting place {meeting.store_host}:{meeting.port} {what} rank {meeting.rank} within {timeout_s:g} s: "
            "see that rank 0 runs there, and that the port is free and open"
        ) from exc


def meet(
    meeting: Rendezvous,
    store: Store,
    settings: dict[str, str],
    checkpoint: str,
    *,
    timeout_s: float,
    sparing: RankExclusion | None = None,
    gone: Callable[[], Mapping[int, str]] = lambda: {},
    note: Callable[[int], None] | None = None,
) -> ConnectedRanks:
    """Wait for the others; returns when all are there and have the same settings and checkpoint, or all but some that
    can be done without. `gone`: the ranks that are known not to come, and why. `note` is told on rank 0 which ones are
    lost, from now on until the lifeline ends. Raises RanksError, on each rank for the same reason."""
    store = PrefixStore(f"moiety/{meeting.attempt}", store)
    if meeting.rank:
        line, masked = _arrive(meeting, store, settings, checkpoint, timeout_s)
        return ConnectedRanks(RankHeartbeat(meeting.rank, {0: line}), masked)
    with _listener(meeting) as listener:
        secret = secrets.token_hex()
        where = [meeting.own_host, listener.getsockname()[1], secret]
        store.set(_ADDRESS, msgspec.json.encode(where).decode())
        own = RankHello(0, secret, settings, checkpoint)
        with contextlib.closing(ConnectingRanks(listener, own, meeting.num_ranks, note)) as arrivals:
            try:
                masked = _receive_all(arrivals, meeting.num_ranks, timeout_s, sparing, gone)
            except RanksError as exc:
                arrivals.dismiss_all(str(exc))
                raise
            lines = arrivals.take()
        if masked:
            store.set(_MASKED, msgspec.json.encode(masked).decode())
    for line in lines.values():
        with contextlib.suppress(OSError):  # the lifeline says that it is lost
            line.send(Welcome(masked))
    return ConnectedRanks(RankHeartbeat(0, lines, note), masked)


def _listener(meeting: Rendezvous) -> socket.socket:
    try:
        return _bound(meeting.own_host, 0)
    except OSError:
        if meeting.is_local:
            raise
        return socket.create_server(("", 0))  # the host is an address of a translator before this one


def _bound(host: str, port: int) -> socket.socket:
    return socket.create_server((host, port), family=socket.getaddrinfo(host, port)[0][0])


def _arrive(
    meeting: Rendezvous, store: Store, settings: dict[str, str], checkpoint: str, timeout_s: float
) -> tuple[Line, tuple[int, ...]]:
    """The line to rank 0, and who is done without."""
    line: Line | None = None
    unreached = f"rank 0 at {meeting.host} was not reached by rank {meeting.rank} within {timeout_s:g} s"
    try:
        store.set_timeout(timedelta(seconds=timeout_s))
        host, port, secret = msgspec.json.decode(store.get(_ADDRESS), type=tuple[str, int, str])
        line = Line(socket.create_connection((host, port), timeout=timeout_s))
        line.send(RankHello(meeting.rank, secret, settings, checkpoint))
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
        if isinstance(word, RankFailed):
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
    arrivals: ConnectingRanks,
    num_ranks: int,
    timeout_s: float,
    sparing: RankExclusion | None,
    gone: Callable[[], Mapping[int, str]],
) -> tuple[int, ...]:
    """Those that are done without. Nobody is as long as there is somebody to hear who may be one of them."""
    begin_s, rather = time.monotonic(), set[int]()
    while True:
        left = {rank: why for rank, why in gone().items() if rank not in rather}
        busy = arrivals.turn(left)
        arrivals.lose(left.keys() - arrivals.held_back)
        missing, waited_s = arrivals.missing, time.monotonic() - begin_s
        if not missing:
            return ()
        if sparing is None and left:
            raise RanksError(next(iter(left.values())))
        if busy and waited_s < timeout_s + _VERDICT_GRACE_S / 2:
            continue  # there may be more to hear
        why_not, none_will_come = "", left.keys() >= set(missing)
        if sparing is not None and (none_will_come or waited_s > sparing.after_s):
            masked, why_not = sparing.leaving(missing)
            if masked:
                together = set(masked) - set(missing)
                arrivals.dismiss(left | {rank: _SHARES_HEADS.format(rank=rank) for rank in together})
                return masked
            if (held_back := arrivals.held_back) and sparing.can_without(set(missing) - held_back):
                rather |= held_back  # the group starts with those, or not at all
                arrivals.let_in()
                continue
        if none_will_come:
            raise RanksError("; ".join(left.values()) + why_not)
        if waited_s > timeout_s:
            unseen = ", ".join(str(rank) for rank in missing if rank not in left)
            known = "".join(f". And {left[rank]}" for rank in missing if rank in left)
            raise RanksError(
                f"of {num_ranks} ranks these did not come in time: {unseen}. See that they were started, and that they "
                f"reach this host; --join-timeout-s sets how long they are waited for{known}{why_not}"
            )
