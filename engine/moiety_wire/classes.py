"""Service classes: the SLO of a request, and its treatment at overload.

Each request carries its class by value, so that an engine holds no copy that could be stale: an operator's change
applies from the next request on. Times are seconds. The SLO of a class is either the pace of a stream (`ttft_s`,
`tpot_s`) or a completion time (`completion_s`).
"""

from __future__ import annotations

import math
from enum import StrEnum

import msgspec

SPECULATIVE_PREFILL = (
    "speculative_prefill"  # reserved: no class may have this name, under which speculative prefill is counted
)


class OverloadAction(StrEnum):
    """Treatment of a request that is predicted to miss its SLO."""

    REJECT = "reject"  # 429 at once, with a retry-after time
    QUEUE = "queue"  # queue it, regardless of the prediction
    DOWNGRADE = "downgrade"  # serve it in its fallback class, which the response names


class ServiceClass(msgspec.Struct, frozen=True, omit_defaults=True):
    """SLO and priority of a class. Lower `rank` is served first; classes of one rank share one queue."""

    name: str
    rank: int
    weight: float = 1.0  # multiplies the tenant's weight within a rank
    ttft_s: float | None = None  # arrival to first token
    ttft_per_1k_s: float = 0.0  # allowance per 1,000 prompt tokens that were not cached
    tpot_s: float | None = None  # between tokens
    completion_s: float | None = None  # arrival to the last token
    max_queue_s: float = 600.0  # longest wait before it is boosted over other classes
    preemptible: bool = True  # whether a running request may be preempted
    on_overload: OverloadAction = OverloadAction.REJECT
    spot: bool = False  # served with idle capacity only: gives way at once to requests of every other class

    def complaint(self) -> str:
        """Return why this class is invalid; "" if it is valid."""
        positive = {
            "weight": self.weight,
            "ttft_s": self.ttft_s,
            "tpot_s": self.tpot_s,
            "completion_s": self.completion_s,
            "max_queue_s": self.max_queue_s,
        }
        for name, value in positive.items():
            if value is not None and not (math.isfinite(value) and value > 0):
                return f"{name} must be above 0, not {value}"
        if not (math.isfinite(self.ttft_per_1k_s) and self.ttft_per_1k_s >= 0):
            return f"ttft_per_1k_s must be 0 or more, not {self.ttft_per_1k_s}"
        if self.completion_s is None and self.ttft_s is None:
            return "a class needs ttft_s (TTFT SLO) or completion_s (completion time SLO)"
        if self.tpot_s is not None and self.ttft_s is None:
            return "tpot_s requires ttft_s: token deadlines count from the deadline of the first token"
        if self.spot and (self.ttft_s is not None or not self.preemptible):
            return "a spot class needs completion_s without ttft_s, and must be preemptible"
        return ""


PRIORITY = ServiceClass(
    name="priority", rank=0, ttft_s=0.5, ttft_per_1k_s=0.1, tpot_s=0.033, max_queue_s=5.0, preemptible=False
)
STANDARD = ServiceClass(name="standard", rank=1, ttft_s=2.0, ttft_per_1k_s=0.2, tpot_s=0.1, max_queue_s=30.0)
FLEX = ServiceClass(name="flex", rank=2, completion_s=600.0, max_queue_s=300.0, on_overload=OverloadAction.QUEUE)
BATCH = ServiceClass(name="batch", rank=3, completion_s=86400.0, max_queue_s=3600.0, on_overload=OverloadAction.QUEUE)
SHIPPED = (PRIORITY, STANDARD, FLEX, BATCH)
CPU_SLOS = (  # of engines on CPUs, which compute 1,000 prompt tokens of a small model in a second or two
    msgspec.structs.replace(PRIORITY, ttft_s=1.0, ttft_per_1k_s=1.0, tpot_s=0.1),
    msgspec.structs.replace(STANDARD, ttft_s=4.0, ttft_per_1k_s=1.0, tpot_s=0.2),
)
