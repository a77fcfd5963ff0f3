"""Rendezvous of a model's ranks before they compute together.

Rank 0 waits for all ranks and compares their settings and checkpoints; all ranks get the same verdict, with the reason.
Ranks that do not join can be excluded if the others can take over their parts of the model.
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
from moiety_engine.distribution.rank_heartbeat import RankConnection, RankFailed, RankHeartbeat, RankHello, Welcome
from moiety_engine.errors import InvalidConfig, RanksError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from moiety_engine.distribution.layout import Layout
    from moiety_engine.distribution.rendezvous_address import Rendezvous

_VERDICT_GRACE_S = 5.0
_SHARES_HEADS = "rank {rank} is excluded because another rank that shares heads with it did not join"
_ADDRESS = "heartbeat"  # store key of rank 0's address
_EXCLUDED = "excluded"  # store key of the excluded ranks
LONGEST_WAIT = timedelta(days=365)  # of collectives: the heartbeat ends a process that waits for a lost rank


@dataclass(frozen=True, slots=True)
class RankExclusion:
    """Policy for the exclusion of ranks: rank 0 waits `after_s` seconds for ranks that can be excluded."""

    layout: Layout
    after_s: float

    def leaving(self, away: Collection[int]) -> tuple[tuple[int, ...], str]:
        """Return the ranks that must be excluded with those away; or none, with the reason why the others need them."""
        try:
            return leaving(self.layout, away), ""
        except InvalidConfig as exc:
            return (), f". The other ranks cannot start without them: {exc}"

    def can_without(self, away: Collection[int]) -> bool:
        """Return whether the group can start without these ranks."""
        return not away or bool(self.leaving(away)[0])


@dataclass(frozen=True, slots=True)
class ConnectedRanks:
    """A rank's connections to those that joined, and the excluded ranks by their original numbers."""

    heartbeat: RankHeartbeat
    excluded: tuple[int, ...] = ()


def open_store(rendezvous: Rendezvous, timeout_s: float) -> TCPStore:
    """Open the store in which ranks publish their addresses. Raises RanksError."""
    serves = rendezvous.rank == 0 and not rendezvous.store_runs
    timeout = timedelta(seconds=timeout_s)
    try:
        if not (serves and rendezvous.is_local):
            return TCPStore(rendezvous.store_host, rendezvous.port, None, serves, timeout, wait_for_workers=False)
        with _bound(rendezvous.own_host, rendezvous.port) as listener:  # TCPStore by itself listens on all addresses
            port = listener.getsockname()[1]
            own = listener.detach()
        return TCPStore(rendezvous.own_host, port, None, True, timeout, wait_for_workers=False, master_listen_fd=own)
    except (DistError, RuntimeError, OSError) as exc:
        what = "could not be opened by" if serves else "was not reached by"
        raise RanksError(
            f"the rendezvous at {rendezvous.store_host}:{rendezvous.port} {what} rank {rendezvous.rank} within "
            f"{timeout_s:g} s: check that rank 0 runs there and that the port is free and reachable"
        ) from exc


def connect_ranks(
    rendezvous: Rendezvous,
    store: Store,
    settings: dict[str, str],
    checkpoint: str,
    *,
    timeout_s: float,
    exclusion: RankExclusion | None = None,
    gone: Callable[[], Mapping[int, str]] = lambda: {},
    note: Callable[[int], None] | None = None,
) -> ConnectedRanks:
    """Wait for the other ranks; return when all have joined with the same settings and checkpoint.

    It also returns when only ranks that can be excluded are missing. `gone` returns the ranks that are known not to
    join, with the reasons. On rank 0, `note` is called with each lost rank, from now on until the heartbeat ends.
    Raises RanksError, on each rank for the same reason.
    """
    store = _keys(rendezvous, store)
    if rendezvous.rank:
        line, excluded = _join_rank_0(rendezvous, store, settings, checkpoint, timeout_s)
        return ConnectedRanks(RankHeartbeat(rendezvous.rank, {0: line}), excluded)
    with _listener(rendezvous) as listener:
        secret = secrets.token_hex()
        where = [rendezvous.own_host, listener.getsockname()[1], secret]
        store.set(_ADDRESS, msgspec.json.encode(where).decode())
        own = RankHello(0, secret, settings, checkpoint)
        with contextlib.closing(ConnectingRanks(listener, own, range(1, rendezvous.num_ranks), note)) as arrivals:
            try:
                excluded = _receive_all(arrivals, rendezvous.num_ranks, timeout_s, exclusion, gone)
            except RanksError as exc:
                arrivals.reject_all(str(exc))
                raise
            lines = arrivals.take()
        if excluded:
            store.set(_EXCLUDED, msgspec.json.encode(excluded).decode())
    for line in lines.values():
        with contextlib.suppress(OSError):  # the heartbeat reports the loss
            line.send(Welcome(excluded))
    return ConnectedRanks(RankHeartbeat(0, lines, note), excluded)


def admit_ranks(
    rendezvous: Rendezvous,
    store: Store,
    ranks: range,
    settings: dict[str, str],
    checkpoint: str,
    *,
    timeout_s: float,
    gone: Callable[[], Mapping[int, str]],
) -> dict[int, RankConnection]:
    """Wait on rank 0 for ranks that join the running group, and return their connections.

    `rendezvous` is that of the new ranks, but for the rank; see `connect_ranks` for the other arguments. Raises
    RanksError.
    """
    store = _keys(rendezvous, store)
    with _listener(rendezvous) as listener:
        secret = secrets.token_hex()
        store.set(_ADDRESS, msgspec.json.encode([rendezvous.own_host, listener.getsockname()[1], secret]).decode())
        own = RankHello(0, secret, settings, checkpoint)
        with contextlib.closing(ConnectingRanks(listener, own, ranks, None)) as arrivals:
            until_s = time.monotonic() + timeout_s
            while arrivals.missing:
                arrivals.poll(())
                ended = [why for rank, why in gone().items() if rank in arrivals.missing]
                if ended or time.monotonic() > until_s:
                    late = ", ".join(map(str, arrivals.missing))
                    reason = f"these new ranks did not join within {timeout_s:g} s (--join-timeout-s): {late}"
                    reason = ended[0] if ended else reason
                    arrivals.reject_all(reason)
                    raise RanksError(reason)
            lines = arrivals.take()
    for line in lines.values():
        with contextlib.suppress(OSError):  # the heartbeat reports the loss
            line.send(Welcome())
    return lines


def _keys(rendezvous: Rendezvous, store: Store) -> PrefixStore:
    """Return the part of the store for one rendezvous."""
    further = f"/{rendezvous.generation}" if rendezvous.generation else ""
    return PrefixStore(f"moiety/{rendezvous.attempt}{further}", store)


def _listener(rendezvous: Rendezvous) -> socket.socket:
    try:
        return _bound(rendezvous.own_host, 0)
    except OSError:
        if rendezvous.is_local:
            raise
        return socket.create_server(("", 0))  # the host is the address of a NAT in front of this host


def _bound(host: str, port: int) -> socket.socket:
    return socket.create_server((host, port), family=socket.getaddrinfo(host, port)[0][0])


def _join_rank_0(
    rendezvous: Rendezvous, store: Store, settings: dict[str, str], checkpoint: str, timeout_s: float
) -> tuple[RankConnection, tuple[int, ...]]:
    """Connect to rank 0 and return the connection with the excluded ranks."""
    line: RankConnection | None = None
    unreached = f"rank 0 at {rendezvous.host} was not reached by rank {rendezvous.rank} within {timeout_s:g} s"
    try:
        store.set_timeout(timedelta(seconds=timeout_s))
        host, port, secret = msgspec.json.decode(store.get(_ADDRESS), type=tuple[str, int, str])
        line = RankConnection(socket.create_connection((host, port), timeout=timeout_s))
        line.send(RankHello(rendezvous.rank, secret, settings, checkpoint))
        line.socket.settimeout(timeout_s + _VERDICT_GRACE_S)  # rank 0 waits as long, and then names the missing ranks
        while not (words := line.receive()):
            pass  # the message is still incomplete
    except (DistError, RuntimeError, OSError, EOFError, msgspec.DecodeError) as exc:
        if line is not None:
            line.close()
        if rendezvous.rank in _excluded_ranks(store):
            raise RanksError(
                f"rank {rendezvous.rank} joined after the others had started without it and taken over its "
                "part of the model: it is included at the group's next start"
            ) from exc
        raise RanksError(f"{unreached}, or it closed the connection: see the log of rank 0") from exc
    excluded: tuple[int, ...] = ()
    for word in words:
        if isinstance(word, RankFailed):
            line.close()
            raise RanksError(word.reason)
        if isinstance(word, Welcome):
            excluded = word.excluded
    return line, excluded


def _excluded_ranks(store: Store) -> tuple[int, ...]:
    with contextlib.suppress(DistError, RuntimeError):  # the store may have ended with rank 0
        if store.check([_EXCLUDED]):
            return msgspec.json.decode(store.get(_EXCLUDED), type=tuple[int, ...])
    return ()


def _receive_all(
    arrivals: ConnectingRanks,
    num_ranks: int,
    timeout_s: float,
    exclusion: RankExclusion | None,
    gone: Callable[[], Mapping[int, str]],
) -> tuple[int, ...]:
    """Wait for all ranks and return those that are excluded.

    No rank is excluded while there are unprocessed connections, which may be from that rank.
    """
    begin_s, rather = time.monotonic(), set[int]()
    while True:
        left = {rank: why for rank, why in gone().items() if rank not in rather}
        busy = arrivals.poll(left)
        arrivals.drop_ended(left.keys() - arrivals.held_back)
        missing, waited_s = arrivals.missing, time.monotonic() - begin_s
        if not missing:
            return ()
        if exclusion is None and left:
            raise RanksError(next(iter(left.values())))
        if busy and waited_s < timeout_s + _VERDICT_GRACE_S / 2:
            continue  # more messages may be waiting
        why_not, none_will_come = "", left.keys() >= set(missing)
        if exclusion is not None and (none_will_come or waited_s > exclusion.after_s):
            excluded, why_not = exclusion.leaving(missing)
            if excluded:
                together = set(excluded) - set(missing)
                arrivals.reject(left | {rank: _SHARES_HEADS.format(rank=rank) for rank in together})
                return excluded
            if (held_back := arrivals.held_back) and exclusion.can_without(set(missing) - held_back):
                rather |= held_back  # the group needs these to start
                arrivals.admit_held_back()
                continue
        if none_will_come:
            raise RanksError("; ".join(left.values()) + why_not)
        if waited_s > timeout_s:
            unseen = ", ".join(str(rank) for rank in missing if rank not in left)
            known = "".join(f". And {left[rank]}" for rank in missing if rank in left)
            raise RanksError(
                f"these of {num_ranks} ranks did not join within {timeout_s:g} s (--join-timeout-s): "
                f"{unseen}; check that they were started and that they can reach this host{known}{why_not}"
            )
