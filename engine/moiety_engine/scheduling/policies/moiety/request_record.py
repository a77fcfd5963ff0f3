"""State that the `moiety` policy keeps for each request from its arrival to its end."""

from __future__ import annotations

from dataclasses import dataclass

from moiety_engine.scheduling.fairness.tenant_counters import TenantCounter
from moiety_engine.sequence import Sequence

# Urgency of a queued request. Plain integers, since the queue compares them at every step: it will miss its deadline
# unless it is served soon; it has time; its deadline cannot be met.
AT_RISK, SAFE, DEMOTED = range(3)


@dataclass(slots=True, eq=False)
class RequestRecord:
    """Policy state of one request. The policy creates it; its queue and its admission to the batch update it."""

    tenant: TenantCounter
    charged_tokens: float = 0.0  # output tokens charged to its tenant, in part ahead of service
    bucket: int = AT_RISK  # urgency in the queue
    demoted: bool = False
    boosted: bool = False  # served out of turn because it waited too long


RequestRecords = dict[Sequence, RequestRecord]
