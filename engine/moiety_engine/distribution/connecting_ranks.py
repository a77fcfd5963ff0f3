"""Connections of ranks to rank 0 before the group exists.

Connections are accepted and read concurrently: a silent connection delays no other, and a connection whose rank has
gone is dropped. This module knows which ranks may connect, and not how long rank 0 waits for them.
"""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from moiety_engine.distribution.rank_heartbeat import RankConnection, RankFailed, RankHello
from moiety_engine.errors import RanksError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

_POLL_S = 0.2
_HELLO_S = 5.0  # longest wait for a hello, and for sending the reply


@dataclass(slots=True, eq=False)
class _Peer:
    """A connection. Its rank is unknown until its hello arrives."""

    line: RankConnection
    until_s: float
    hello: RankHello | None = None
    held_back: bool = False


class ConnectingRanks:
    """Connections of ranks, owned until `take`. Used by one thread."""

    def __init__(
        self, listener: socket.socket, own: RankHello, expected: range, note: Callable[[int], None] | None
    ) -> None:
        """Listen for the expected ranks. `note` is called with each rank that connected and disconnected again."""
        self._listener, self._own, self._expected, self._note = listener, own, expected, note
        self._peers: list[_Peer] = []
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    @property
    def missing(self) -> list[int]:
        """Ranks that are not connected, or held back."""
        there = {peer.hello.rank for peer in self._peers if peer.hello and not peer.held_back}
        return [rank for rank in self._expected if rank not in there]

    @property
    def held_back(self) -> set[int]:
        return {peer.hello.rank for peer in self._peers if peer.hello and peer.held_back}

    def poll(self, hold_back: Collection[int]) -> bool:
        """Process connections and disconnections for a moment. Return whether there were any.

        Ranks in `hold_back` are not admitted. Raises RanksError for a rank with an invalid number, with other settings
        or with another checkpoint.
        """
        found = {key.fileobj for key, _ in self._selector.select(_POLL_S)}
        for peer in sorted(self._peers, key=lambda one: one.hello is None):  # disconnections first, then hellos
            if peer.line.socket in found:
                self._receive_hello(peer, hold_back)
            elif peer.hello is None and time.monotonic() > peer.until_s:
                self._drop(peer)
        if self._listener in found:
            self._accept()
        return bool(found)

    def admit_held_back(self) -> None:
        """Admit the ranks that were held back."""
        for peer in self._peers:
            peer.held_back = False

    def drop_ended(self, ranks: Collection[int]) -> None:
        """Drop ranks that are known to have ended."""
        for peer in [one for one in self._peers if one.hello and one.hello.rank in ranks]:
            self._drop(peer)

    def reject(self, reasons: Mapping[int, str]) -> None:
        """Send the connected ones of these ranks the reason for which they do not take part, and drop them."""
        for peer in [one for one in self._peers if one.hello and one.hello.rank in reasons]:
            assert peer.hello is not None
            with contextlib.suppress(OSError):
                peer.line.send(RankFailed(reasons[peer.hello.rank]))
            self._remove(peer)

    def reject_all(self, reason: str) -> None:
        self.reject({peer.hello.rank: reason for peer in self._peers if peer.hello})

    def take(self) -> dict[int, RankConnection]:
        """Return the connections of the admitted ranks; the caller owns them from now on."""
        taken = {peer.hello.rank: peer.line for peer in self._peers if peer.hello and not peer.held_back}
        self._peers = [peer for peer in self._peers if peer.line not in taken.values()]
        return taken

    def close(self) -> None:
        for peer in self._peers:
            peer.line.close()
        self._selector.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the peer has disconnected
            line = RankConnection(self._listener.accept()[0])
            line.socket.settimeout(_HELLO_S)
            self._peers.append(_Peer(line, time.monotonic() + _HELLO_S))
            self._selector.register(line.socket, selectors.EVENT_READ)

    def _receive_hello(self, peer: _Peer, hold_back: Collection[int]) -> None:
        try:
            words = peer.line.receive()
        except (OSError, EOFError, msgspec.DecodeError):
            self._drop(peer)
            return
        if peer.hello is not None or not words:
            return
        hello = words[0]
        if not isinstance(hello, RankHello) or not secrets.compare_digest(
            hello.secret.encode(), self._own.secret.encode()
        ):
            self._drop(peer)
            return
        known = any(other.hello and other.hello.rank == hello.rank for other in self._peers)
        peer.hello, peer.held_back = hello, hello.rank in hold_back
        if known or hello.rank not in self._expected:
            raise RanksError(
                f"a rank {hello.rank} of {self._expected.stop} connected twice or has an invalid number: check "
                "the launcher that started it"
            )
        _compare(self._own, hello)

    def _drop(self, peer: _Peer) -> None:
        """Drop a connection that has ended or is invalid. Its rank may connect again."""
        self._remove(peer)
        if self._note is not None and peer.hello is not None and not peer.held_back:
            self._note(peer.hello.rank)

    def _remove(self, peer: _Peer) -> None:
        self._peers.remove(peer)
        self._selector.unregister(peer.line.socket)
        peer.line.close()


def _compare(own: RankHello, other: RankHello) -> None:
    if own.settings != other.settings:
        names = own.settings.keys() | other.settings.keys()
        differing = "; ".join(
            f"{name} is {other.settings.get(name)} there and {own.settings.get(name)} on rank 0"
            for name in sorted(names)
            if own.settings.get(name) != other.settings.get(name)
        )
        raise RanksError(
            f"the settings of rank {other.rank} differ from those of rank 0: {differing}; "
            "give all ranks the same settings"
        )
    if own.checkpoint != other.checkpoint:
        raise RanksError(
            f"the checkpoint of rank {other.rank} differs from that of rank 0: config.json or the safetensors files "
            "differ; give all ranks copies of the same checkpoint"
        )
