"""Service classes: what a request is promised, and what may happen to it at overload.

A class travels by value with each request, so that an engine holds no copy that could be stale: an operator's change
holds from the next request on. Times are seconds. A class promises either the pace of a stream (`ttft_s`, `tpot_s`) or
an end (`completion_s`).
"""

from __future__ import annotations

import math
from enum import StrEnum

import msgspec

SPECULATIVE_PREFILL = (
    "speculative_prefill"  # what no class may be called: what is computed before anybody asks for it is counted so
)


class OverloadAction(StrEnum):
    """What happens to a request whose promise is predicted to be missed."""

    REJECT = "reject"  # 429 at once, with the time after which it is worth coming back
    QUEUE = "queue"  # it waits, whatever the prediction
    DOWNGRADE = "downgrade"  # it is served in its fallback class, and the answer says so


class ServiceClass(msgspec.Struct, frozen=True, omit_defaults=True):
    """A promise. Lower `rank` goes first; classes of one rank share one queue."""

    name: str
    rank: int
    weight: float = 1.0  # multiplies the tenant's own within a rank
    ttft_s: float | None = None  # arrival to first token
    ttft_per_1k_s: float = 0.0  # allowance for each 1,000 prompt tokens that no cache held
    tpot_s: float | None = None  # between tokens
    completion_s: float | None = None  # arrival to the last token
    max_queue_s: float = 600.0  # longest wait before it is boosted over other classes
    preemptible: bool = True  # whether its blocks may be taken once it runs
    on_overload: OverloadAction = OverloadAction.REJECT

    def complaint(self) -> str:
        """Why this is no valid class; "" if it is one."""
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
            return "a class needs ttft_s (the pace of a stream) or completion_s (an end)"
        if self.tpot_s is not None and self.ttft_s is None:
            return "tpot_s needs ttft_s beside it: the pace counts from the first token's deadline"
        return ""


PRIORITY = ServiceClass(
    name="priority",
    rank=0,
    ttft_s=0.5,
    ttft_per_1k_s=0.1,
    tpot_s=0.033,
    max_queue_s=5.0,
    preemptible=False,
    on_overload=OverloadAction.REJECT,
)
STANDARD = ServiceClass(name="standard", rank=1, ttft_s=2.0, ttft_per_1k_s=0.2, tpot_s=0.1, max_queue_s=30.0)
FLEX = ServiceClass(name="flex", rank=2, completion_s=600.0, max_queue_s=300.0, on_overload=OverloadAction.QUEUE)
BATCH = ServiceClass(name="batch", rank=3, completion_s=86400.0, max_queue_s=3600.0, on_overload=OverloadAction.QUEUE)
SHIPPED = (PRIORITY, STANDARD, FLEX, BATCH)
