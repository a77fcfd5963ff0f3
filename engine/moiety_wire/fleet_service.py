"""Service that tenants receive on the replicas of a model, exchanged so that a tenant's share holds over the fleet.

Each replica reports cumulative sums, so a report that arrives late, twice or by several gateways has no effect beyond
the newest one. `engine_id` names one start of a replica: the sums of a restarted replica belong to another id. No time
of one machine is compared with that of another.
"""

from __future__ import annotations

import msgspec

MAX_REPORTED_TENANTS = 256  # in one report; the tenants with the most service that was not reported yet come first
MAX_SENT_TENANTS = 1024  # in one message to an engine, over all other replicas


class TenantService(msgspec.Struct, frozen=True, array_like=True):
    """Service of one tenant in one rank of classes on one replica, counted from the start of `account_id`.

    The replica assigns account ids in ascending order and never reuses one. It closes the account of a tenant that was
    not served for a while, and opens another one, which starts from 0, when the tenant returns.
    """

    account_id: int
    rank: int  # 0 for policies that ignore classes
    tenant_id: str
    service: float  # in the unit of the policy's counters; only grows, except for corrections of predicted lengths


class ServiceReport(msgspec.Struct, frozen=True, array_like=True):
    """Report of one replica. Replicas with another `policy` count in other units, and ignore it."""

    policy: str
    newest_account_id: int  # at the time of the report; 0 if there was none yet
    tenants: list[TenantService] = []


class ReplicaService(msgspec.Struct, frozen=True, array_like=True):
    """Report of the replica with this engine id."""

    engine_id: str
    report: ServiceReport


class FleetService(msgspec.Struct, frozen=True, tag="fleet_service"):
    """Reports of the other replicas of the engine's model, from a gateway to an engine.

    It is only sent to an engine whose card has `exchanges_service`. A report may leave out tenants whose service did
    not change since the gateway sent it on this connection; a report without tenants says that the replica is there.
    """

    replicas: list[ReplicaService]
