"""How much each tenant has in flight at this gateway, and the bound on it."""

from __future__ import annotations

from dataclasses import dataclass

from moiety_platform.clock import Clock
from moiety_platform.errors import Overloaded
from moiety_wire.notes import Reason

MIN_RETRY_S = 1.0
MAX_RETRY_S = 60.0
MEMORY = 0.9  # how much of the mean time between ends stays at each end


@dataclass(slots=True)
class _Tenant:
    num_inflight: int = 0
    last_end_s: float | None = None
    gap_s: float | None = None  # mean time between the ends of two of its sequences


class AdmissionGate:
    """Counts sequences (prompts × n), since each is a request to an engine. One event loop."""

    def __init__(self, max_inflight_per_tenant: int, clock: Clock) -> None:
        self.limit = max_inflight_per_tenant  # may be set to another, for those that enter from then on
        self._clock = clock
        self._tenants: dict[str, _Tenant] = {}

    def enter(self, tenant_id: str, num_sequences: int) -> GatePlace:
        """Count a request as in flight, from now until its place is left. Raises Overloaded where that is more than the
        tenant may have; one that is larger than the bound by itself gets in when nothing else is there."""
        tenant = self._tenants.setdefault(tenant_id, _Tenant())
        if tenant.num_inflight and tenant.num_inflight + num_sequences > self.limit:
            raise Overloaded(
                f"{tenant.num_inflight} sequences of this tenant are in flight, and {self.limit} are allowed; wait "
                "for some to end, then try again",
                Reason.TENANT_QUEUE_FULL,
                retry_after_s=_retry_after_s(tenant, tenant.num_inflight + num_sequences - self.limit),
            )
        tenant.num_inflight += num_sequences
        return GatePlace(self, tenant_id, tenant, num_sequences)

    def drop(self, tenant_id: str, tenant: _Tenant, num_sequences: int) -> None:
        """A place was left."""
        tenant.num_inflight -= num_sequences
        if not tenant.num_inflight:
            del self._tenants[tenant_id]
            return
        now_s = self._clock.monotonic()
        if tenant.last_end_s is not None:
            gap_s = (now_s - tenant.last_end_s) / num_sequences
            tenant.gap_s = gap_s if tenant.gap_s is None else MEMORY * tenant.gap_s + (1 - MEMORY) * gap_s
        tenant.last_end_s = now_s


class GatePlace:
    """What one request takes up. Left once, by whoever entered."""

    __slots__ = ("_gate", "_num_sequences", "_tenant", "_tenant_id")

    def __init__(self, gate: AdmissionGate, tenant_id: str, tenant: _Tenant, num_sequences: int) -> None:
        self._gate, self._tenant_id, self._tenant, self._num_sequences = gate, tenant_id, tenant, num_sequences

    def leave(self) -> None:
        """The request is over."""
        self._gate.drop(self._tenant_id, self._tenant, self._num_sequences)


def _retry_after_s(tenant: _Tenant, num_too_many: int) -> float:
    """When so many of the tenant's sequences will have ended, if they go on to end as they did."""
    wait_s = MIN_RETRY_S if tenant.gap_s is None else num_too_many * tenant.gap_s
    return min(max(wait_s, MIN_RETRY_S), MAX_RETRY_S)
