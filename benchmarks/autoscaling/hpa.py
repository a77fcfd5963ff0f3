"""A HorizontalPodAutoscaler's arithmetic, from the ScaledObject of KEDA that makes one.

As in Kubernetes' pkg/controller/podautoscaler (1.34): every 15 s each metric proposes a number of replicas, the largest
counts, the windows of stabilization and the policies of `behavior` bound it. KEDA hands an external metric for each
trigger to such an autoscaler, and answers 0 for a query that finds nothing (`ignoreNullValues`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SYNC_S = 15.0
TOLERANCE = 0.1


@dataclass(frozen=True, slots=True)
class Metric:
    """Metric of an autoscaler; `query` is PromQL. An average is divided among the replicas; a value is not."""

    name: str
    query: str
    target: float
    is_average: bool


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules of one direction of `behavior`. `policies` are (type, value, period)."""

    window_s: float
    policies: Sequence[tuple[str, int, float]]


@dataclass(frozen=True, slots=True)
class Terms:
    """Settings of the autoscaler object."""

    min_replicas: int
    max_replicas: int
    metrics: Sequence[Metric]
    up: Rules
    down: Rules

    @classmethod
    def of_scaled_object(cls, document: Mapping[str, Any]) -> Terms:
        """Return the settings of a KEDA ScaledObject. Raises KeyError for an unknown setting."""
        spec = document["spec"]
        metrics = [
            Metric(
                one["name"],
                one["metadata"]["query"],
                float(one["metadata"]["threshold"]),
                {"Value": False, "AverageValue": True}[one["metricType"]],
            )
            for one in spec["triggers"]
            if one["type"] == "prometheus" and one["metadata"]["ignoreNullValues"] == "true"
        ]
        behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        up, down = (
            Rules(
                behavior[side]["stabilizationWindowSeconds"],
                [(one["type"], one["value"], one["periodSeconds"]) for one in behavior[side]["policies"]],
            )
            for side in ("scaleUp", "scaleDown")
        )
        return cls(spec["minReplicaCount"], spec["maxReplicaCount"], metrics, up, down)


@dataclass
class Autoscaler:
    """Autoscaler with a memory of its recommendations and changes. `read` answers a query with a number."""

    terms: Terms
    read: Callable[[str], float]
    _recommended: list[tuple[float, int]] = field(default_factory=list)
    _changes: list[tuple[float, int]] = field(default_factory=list)

    def decide(self, now_s: float, current: int, ready: int) -> int:
        """Return the number of replicas, from the requested and the ready number."""
        proposed = max(propose(one, self.read(one.query), current, ready) for one in self.terms.metrics)
        steady = self._stabilise(now_s, current, proposed)
        wanted = self._pace(now_s, current, steady)
        if wanted != current:
            self._changes.append((now_s, wanted - current))
        return wanted

    def _stabilise(self, now_s: float, current: int, proposed: int) -> int:
        """Return the number within the stabilization windows.

        It is at most the least proposal within one window and at least the largest within the other. The initial number
        counts as proposed.
        """
        if not self._recommended:
            self._recommended.append((now_s, current))
        least = min([proposed, *self._within(now_s, self.terms.up.window_s)])
        most = max([proposed, *self._within(now_s, self.terms.down.window_s)])
        self._recommended.append((now_s, proposed))
        return min(max(current, least), most)

    def _within(self, now_s: float, window_s: float) -> list[int]:
        return [count for at_s, count in self._recommended if at_s > now_s - window_s]

    def _pace(self, now_s: float, current: int, wanted: int) -> int:
        """Return the number that the fastest policy allows, within the object's bounds."""
        if wanted > current:
            most = max(self._limit(now_s, current, *policy) for policy in self.terms.up.policies)
            wanted = min(wanted, max(most, current))
        elif wanted < current:
            least = min(self._limit(now_s, current, *policy, sign=-1) for policy in self.terms.down.policies)
            wanted = max(wanted, min(least, current))
        return min(max(wanted, self.terms.min_replicas), self.terms.max_replicas)

    def _limit(self, now_s: float, current: int, kind: str, value: int, period_s: float, sign: int = 1) -> int:
        began = current - sum(change for at_s, change in self._changes if at_s > now_s - period_s)
        if kind == "Pods":
            return began + sign * value
        share = began * (1 + sign * value / 100)
        return math.ceil(share) if sign > 0 else int(share)


def propose(metric: Metric, value: float, current: int, ready: int) -> int:
    """Return the proposal of one metric. A deviation of a tenth from the target is tolerated."""
    if metric.is_average:
        ratio = value / (metric.target * current)
        return current if abs(1 - ratio) <= TOLERANCE else math.ceil(round(value / metric.target, 9))
    ratio = value / metric.target
    return current if abs(1 - ratio) <= TOLERANCE else math.ceil(round(ratio * ready, 9))
