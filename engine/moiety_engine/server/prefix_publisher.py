"""Publication of the prefix cache's blocks to the gateways that subscribed.

A subscriber gets a snapshot in parts, one each SNAPSHOT_INTERVAL_S, and meanwhile every change. A part contains only
blocks that are still cached when it is sent, so parts and changes can be applied in the order in which they arrive. A
gateway that does not read gets no events; once it reads again, it gets a new snapshot. A snapshot for a gateway begins
at the earliest RESTART_INTERVAL_S after the one before, however often it asks.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from moiety_engine.messages import PrefixChanges
from moiety_engine.server.sessions import GatewaySession, Sessions
from moiety_wire.prefix_events import MAX_BLOCKS_PER_MESSAGE, PrefixEvents, pack_names, unpack_names

MAX_BLOCKS = 1_000_000  # published blocks of a replica; further ones are not published
SNAPSHOT_INTERVAL_S = 0.02
RESTART_INTERVAL_S = 1.0


@dataclass(slots=True)
class _Subscription:
    session: GatewaySession
    seq: int = 0
    has_started: bool = False
    restart_s: float = 0.0  # earliest time of the next snapshot, by the event loop's clock
    unsent: list[int] = field(default_factory=list)  # of the snapshot, the next last


class PrefixPublisher:
    """Owns the set of cached blocks and the subscriptions. Used by the event loop's thread."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._names: dict[int, None] = {}
        self._subscriptions: dict[bytes, _Subscription] = {}  # by the gateway's identity
        self._timer: asyncio.TimerHandle | None = None

    def subscribe(self, session: GatewaySession) -> None:
        """Begin a snapshot for a gateway; one that was being sent starts again."""
        subscription = self._subscriptions.get(session.identity)
        if subscription is None or subscription.session is not session:
            subscription = self._subscriptions[session.identity] = _Subscription(session)
        subscription.has_started = False
        self._continue_soon()

    def take(self, changes: PrefixChanges) -> None:
        """Record the core's changes and send them to the subscribers."""
        names, stored = self._names, []
        for name in (evicted := unpack_names(changes.evicted)):
            names.pop(name, None)
        for name in unpack_names(changes.stored):
            if len(names) < MAX_BLOCKS:
                names[name] = None
                stored.append(name)
        packed = pack_names(stored), pack_names(evicted)
        for subscription in self._open_subscriptions():
            if subscription.session.outbox:
                subscription.has_started = False
                self._continue_soon()
            elif subscription.has_started:
                self._post(subscription, PrefixEvents(subscription.seq, *packed))

    def close(self) -> None:
        """Send no more snapshots."""
        if self._timer is not None:
            self._timer.cancel()
        self._subscriptions.clear()

    def _continue_soon(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SNAPSHOT_INTERVAL_S, self._continue)

    def _continue(self) -> None:
        """Send the next part of each snapshot."""
        self._timer = None
        now_s = asyncio.get_running_loop().time()
        for subscription in self._open_subscriptions():
            if not subscription.session.outbox:
                self._send_part(subscription, now_s)
            if subscription.unsent or not subscription.has_started:
                self._continue_soon()
        self._sessions.flush()

    def _send_part(self, subscription: _Subscription, now_s: float) -> None:
        is_start = not subscription.has_started
        if is_start:
            if now_s < subscription.restart_s:
                return
            subscription.has_started, subscription.restart_s = True, now_s + RESTART_INTERVAL_S
            subscription.unsent = list(reversed(self._names))
        elif not subscription.unsent:
            return
        part = subscription.unsent[-MAX_BLOCKS_PER_MESSAGE:]
        del subscription.unsent[-MAX_BLOCKS_PER_MESSAGE:]
        stored = pack_names(name for name in reversed(part) if name in self._names)
        self._post(subscription, PrefixEvents(subscription.seq, stored, is_start=is_start))

    def _post(self, subscription: _Subscription, events: PrefixEvents) -> None:
        subscription.seq += 1
        self._sessions.post(subscription.session, events)

    def _open_subscriptions(self) -> list[_Subscription]:
        gone = [identity for identity, one in self._subscriptions.items() if one.session.is_gone]
        for identity in gone:
            del self._subscriptions[identity]
        return list(self._subscriptions.values())
