"""Interface between the gateway and all kinds of engines."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import msgspec

from moiety_platform.engine_client.prefix_blocks import PrefixBlocks
from moiety_platform.engine_client.stream import EngineStream, Inbox
from moiety_platform.errors import Conflict
from moiety_wire.engine_load import ClassLoad, Load, SleepState
from moiety_wire.experts import ExpertBalance, ExpertLoad
from moiety_wire.fleet_service import FleetService
from moiety_wire.messages import ModelCard, Submit

Connection = tuple[str, int]  # engine address and connection number

LOAD_FRESH_S = 2.0  # four heartbeats; older loads are stale

NO_EXPERT_RANKS = (
    "the engine at {address} cannot have expert ranks, which alone can be added and removed while it serves: start it "
    "with --ffn-ranks"
)


def require_expert_ranks(load: Load | None, address: str) -> None:
    """Raise Conflict if the engine with this load neither has expert ranks nor can have any."""
    if load is None or not (load.expert_ranks or load.can_change_expert_ranks):
        raise Conflict(NO_EXPERT_RANKS.format(address=address))


class EngineState(msgspec.Struct, frozen=True):
    """State of one engine at one moment.

    `card` is the last known model card and outlives the connection. `reason` says why the engine is unhealthy, and is
    empty if it is healthy. `num_inflight` counts this gateway's own requests there. `load_age_s` is None where unknown.
    `num_connections` counts the connections to the address so far, including this one.
    """

    address: str
    healthy: bool
    reason: str
    card: ModelCard | None
    load: Load | None
    num_inflight: int
    load_age_s: float | None = None
    num_connections: int = 0
    connected_for_s: float = 0.0  # uninterrupted connection of this gateway process
    balance: ExpertBalance | None = None  # last reported expert balance
    prefix_blocks: PrefixBlocks | None = None  # None: the engine publishes none
    num_unreported: int = 0  # of the requests in flight, those that `load` does not contain yet

    @property
    def connection(self) -> Connection:
        """Identity of the connection. An engine that restarted or was lost for a while has another."""
        return self.address, self.num_connections

    @property
    def can_take(self) -> bool:
        """True if the engine accepts new requests."""
        load = self.load
        return self.healthy and (load is None or (not load.draining and load.sleep is SleepState.AWAKE))

    @property
    def sleep(self) -> SleepState:
        return SleepState.AWAKE if self.load is None else self.load.sleep

    @property
    def draining(self) -> bool:
        return self.load is not None and self.load.draining

    def class_load(self, name: str) -> ClassLoad | None:
        """Return the engine's load of a service class, or None if it reports none or the report is stale."""
        if self.load is None or not self.load_is_fresh:
            return None
        for load in self.load.classes:
            if load.name == name:
                return load
        return None

    def has_settled_for(self, replica_id: str, seconds: float) -> bool:
        """Return whether the engine provably holds no usage of a gateway process that has been silent for `seconds`.

        This means no open request and no unacknowledged usage, and no restart since then that could have lost any.
        """
        if not self.healthy or self.load is None or not self.load_is_fresh:
            return False
        if max(self.connected_for_s, self.load.running_for_s) < seconds:
            return False  # an earlier engine process may have had some
        if self.card is None or not self.card.extensible:
            return False
        return replica_id not in self.load.unacknowledged_replicas

    @property
    def load_is_fresh(self) -> bool:
        return self.load is not None and self.load_age_s is not None and self.load_age_s <= LOAD_FRESH_S


class EngineClient(Protocol):
    """A connection to one engine, maintained from `start` to `close`."""

    @property
    def address(self) -> str: ...

    @property
    def state(self) -> EngineState: ...

    def on_state_change(self, on_change: Callable[[], None]) -> None:
        """Call `on_change` whenever the engine connects or disconnects."""
        ...

    def acknowledge_usage(self, request_id: str) -> None:
        """Acknowledge that the usage of a request, by its submitted id, is stored, so that the engine can forget it.

        Sent soon, never raises.
        """
        ...

    def set_asleep(self, *, asleep: bool) -> None:
        """Put the engine to sleep once its open requests have ended, or wake it.

        Its loads report the progress. Raises Unavailable when it is not connected, Conflict where this kind of engine
        has no sleep mode.
        """
        ...

    def scale_expert_ranks(self, num_ranks: int) -> None:
        """Let the engine change the number of ranks that hold experts only.

        Its loads report the number, and the reason if it cannot. Raises Unavailable when it is not connected, Conflict
        where the engine has no expert ranks.
        """
        ...

    def forget_tenants(self, tenant_ids: Collection[str]) -> None:
        """Send the ids of all deleted tenants to the engine, now or once it is connected.

        Tenants already sent over this connection are skipped. Never raises. An engine that does not support the message
        gets none.
        """
        ...

    def send_fleet_service(self, message: FleetService) -> None:
        """Send the service of tenants on other replicas of the engine's model.

        Never raises. An engine that is not connected, or does not exchange service, gets nothing.
        """
        ...

    async def expert_load(self, minutes: int, tenant_id: str | None) -> ExpertLoad | None:
        """Return the load of the engine's experts in the last `minutes`, for one tenant or for all.

        0 minutes means since the engine's start. Returns None where this kind of engine reports none. Raises
        Unavailable when it is not connected or does not answer.
        """
        ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def open(
        self, submit: Submit, inbox: Inbox[EngineStream] | None = None
    ) -> AbstractAsyncContextManager[EngineStream]:
        """Submit a request and hold its stream.

        Leaving the context before the end aborts the request and waits for the engine's exact count, for a bounded time
        and even if cancelled. Raises Unavailable when the engine is not connected. If the engine fails later, the
        stream fails with EngineFailed. Fails closed: no request is answered without its engine.
        """
        ...
