"""Forwards the service that tenants received on each engine to the other engines of the same model.

Engines report it with their loads, as cumulative sums. Several gateways may forward the same report: engines count its
largest sum once. A gateway keeps nothing but what it sent on each connection, so it can start and end at any time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from heapq import nlargest

from moiety_platform.engine_client.base import Connection, EngineClient, EngineState
from moiety_platform.periodic_task import PeriodicTask
from moiety_wire.fleet_service import MAX_SENT_TENANTS, FleetService, ReplicaService, TenantService
from moiety_wire.messages import HEARTBEAT_INTERVAL_S

_Key = tuple[str, int]  # engine id and account id


class ServiceExchange:
    """Periodic sender. Owned by the entry point; for one event loop. `engines` returns the current engines."""

    def __init__(self, engines: Callable[[], Sequence[EngineClient]], *, max_tenants: int = MAX_SENT_TENANTS) -> None:
        self._engines = engines
        self._max_tenants = max_tenants
        self._sent: dict[Connection, dict[_Key, float]] = {}  # sums that were sent, of accounts still reported
        self._rounds = PeriodicTask("tenant-service", self.round, HEARTBEAT_INTERVAL_S)

    def start(self) -> None:
        self._rounds.start()

    async def stop(self) -> None:
        await self._rounds.cancel()

    async def round(self) -> None:
        """Send each engine what the other engines of its model reported since the last round."""
        by_model: dict[str, list[tuple[EngineClient, EngineState]]] = defaultdict(list)
        for client in self._engines():
            state = client.state
            if state.healthy and state.card is not None and state.card.exchanges_service:
                by_model[state.card.model].append((client, state))
        sent: dict[Connection, dict[_Key, float]] = {}
        for replicas in by_model.values():
            reports = {
                state.load.engine_id: ReplicaService(state.load.engine_id, state.load.tenant_service)
                for _, state in replicas
                if state.load is not None and state.load.tenant_service is not None and state.load_is_fresh
            }
            for client, state in replicas:
                assert state.card is not None, "engines without a card are left out"
                others = [one for one in reports.values() if one.engine_id != state.card.engine_id]
                if others:
                    sums = self._sent.get(state.connection, {})
                    client.send_fleet_service(FleetService(_changed(others, sums, self._max_tenants)))
                    sent[state.connection] = _still_reported(others, sums)
        self._sent = sent


def _changed(reports: Sequence[ReplicaService], sent: dict[_Key, float], max_tenants: int) -> list[ReplicaService]:
    """Return the reports without the tenants whose sum was sent, and record the sums in `sent`.

    Of more than `max_tenants`, those whose sums grew most are returned. The others grow on until it is their turn.
    """
    grown: list[tuple[float, str, TenantService]] = []
    for report in reports:
        for tenant in report.report.tenants:
            before = sent.get((report.engine_id, tenant.account_id))
            if before is None or tenant.service > before:
                grown.append((tenant.service - (before or 0.0), report.engine_id, tenant))
    if len(grown) > max_tenants:
        grown = nlargest(max_tenants, grown, key=lambda one: one[0])
    chosen: dict[str, list[TenantService]] = {report.engine_id: [] for report in reports}
    for _, engine_id, tenant in grown:
        chosen[engine_id].append(tenant)
        sent[engine_id, tenant.account_id] = tenant.service
    return [
        ReplicaService(one.engine_id, type(one.report)(one.report.policy, one.report.newest_account_id, tenants))
        for one, tenants in ((report, chosen[report.engine_id]) for report in reports)
    ]


def _still_reported(reports: Sequence[ReplicaService], sent: dict[_Key, float]) -> dict[_Key, float]:
    keys = {(report.engine_id, tenant.account_id) for report in reports for tenant in report.report.tenants}
    return {key: service for key, service in sent.items() if key in keys}
