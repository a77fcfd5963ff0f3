"""What the gateway asks of an engine, whichever kind stands behind it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import msgspec

from moiety_platform.engine_client.inbox import Inbox
from moiety_platform.engine_client.stream import EngineStream
from moiety_wire.experts import ExpertBalance, ExpertLoad
from moiety_wire.figures import ClassLoad, Load, SleepState
from moiety_wire.messages import ModelCard, Submit

Connection = tuple[str, int]  # an engine's address, and the number of the connection to it

LOAD_FRESH_S = 2.0  # four heartbeats; what is older says nothing of now


class EngineState(msgspec.Struct, frozen=True):
    """One engine at one moment. `card` is the last known and outlives the connection; `reason` says why it is not
    healthy, and is empty when it is. `num_inflight` counts this gateway's own requests there. `load_age_s` is None
    where it is not known. `num_connections` counts the connections to the address, this one included."""

    address: str
    healthy: bool
    reason: str
    card: ModelCard | None
    load: Load | None
    num_inflight: int
    load_age_s: float | None = None
    num_connections: int = 0
    connected_for_s: float = 0.0  # to this very process, without a break
    balance: ExpertBalance | None = None  # of its experts, as last told

    @property
    def connection(self) -> Connection:
        """Which engine this is: one that was restarted, or lost for a while, has another."""
        return self.address, self.num_connections

    @property
    def can_take(self) -> bool:
        """Whether it takes new requests."""
        load = self.load
        return self.healthy and (load is None or (not load.draining and load.sleep is SleepState.AWAKE))

    @property
    def sleep(self) -> SleepState:
        return SleepState.AWAKE if self.load is None else self.load.sleep

    @property
    def draining(self) -> bool:
        return self.load is not None and self.load.draining

    def class_load(self, name: str) -> ClassLoad | None:
        """What the engine says of a class; None where it says nothing, or said it too long ago."""
        if self.load is None or not self.load_is_fresh:
            return None
        for load in self.load.classes:
            if load.name == name:
                return load
        return None

    def has_settled_for(self, replica_id: str, seconds: float) -> bool:
        """Whether it is proven that the engine holds nothing of that gateway process, which nobody has heard of for so
        long: no open request and none that is not settled, nor has it lost any since by a restart."""
        if not self.healthy or self.load is None or not self.load_is_fresh:
            return False
        if max(self.connected_for_s, self.load.running_for_s) < seconds:
            return False  # an engine that ran before it may have had something
        if self.card is None or not self.card.extensible:
            return False
        return replica_id not in self.load.unacknowledged_replicas

    @property
    def load_is_fresh(self) -> bool:
        return self.load is not None and self.load_age_s is not None and self.load_age_s <= LOAD_FRESH_S


class EngineClient(Protocol):
    """A connection to one engine, kept up for ever between `start` and `close`."""

    @property
    def address(self) -> str: ...

    @property
    def state(self) -> EngineState: ...

    def watch(self, on_change: Callable[[], None]) -> None:
        """Call that whenever the engine has come or gone."""
        ...

    def settled(self, request_id: str) -> None:
        """What that request used, under the id that it was submitted by, is stored: the engine need not remember it.
        Told before long, and never raises."""
        ...

    def rest(self, *, asleep: bool) -> None:
        """Tell the engine to sleep once its open requests have ended, or to wake. How far it is its loads will say.
        Raises Unavailable when it is not there, Conflict where this kind of engine cannot sleep."""
        ...

    def forget(self, tenant_ids: Collection[str]) -> None:
        """These tenants are erased, all that ever were: tell the engine, now or whenever it is there, unless it has
        been told since it was connected. Never raises; an engine that takes no such message is not told."""
        ...

    async def expert_load(self, minutes: int, tenant_id: str | None) -> ExpertLoad | None:
        """What its experts had to do in the last minutes, 0 for since its start, for that tenant or for all; None where
        this kind of engine does not tell. Raises Unavailable when it is not there or does not answer."""
        ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def open(
        self, submit: Submit, inbox: Inbox[EngineStream] | None = None
    ) -> AbstractAsyncContextManager[EngineStream]:
        """Submit a request and hold its stream. Leaving before the end aborts it and waits, bounded and through
        cancellation, for the engine's exact count. Raises Unavailable when the engine is not there; an engine that dies
        later fails the stream with EngineFailed. Fails closed: no request is ever answered without its engine."""
        ...
