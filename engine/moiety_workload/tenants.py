"""Assignment of conversations to tenants, and of classes to tenants by their demanded work."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from random import Random

from moiety_workload.errors import BadSpec
from moiety_workload.request import TraceRequest

Work = Callable[[TraceRequest], float]


def spread_over_tenants(requests: Sequence[TraceRequest], num_tenants: int, seed: int) -> list[TraceRequest]:
    """Assign each conversation to a random tenant; a request without one is its own conversation."""
    if num_tenants < 1:
        raise BadSpec(f"there must be at least 1 tenant, not {num_tenants}")
    rng = Random(f"tenants {seed}")
    tenant_of: dict[str, str] = {}
    spread = []
    for number, request in enumerate(requests):
        conversation = request.conversation or f"alone {number}"
        if conversation not in tenant_of:
            tenant_of[conversation] = f"tenant-{rng.randrange(num_tenants):03d}"
        spread.append(replace(request, tenant=tenant_of[conversation]))
    return spread


def parse_shares(text: str) -> dict[str, float]:
    """Parse `priority=0.2,standard=0.5,batch=0.3` to a mapping whose values sum to 1. Raises BadSpec."""
    shares: dict[str, float] = {}
    for part in text.split(","):
        name, separator, value = part.partition("=")
        try:
            shares[name.strip()] = float(value)
        except ValueError:
            separator = ""
        if not separator or not name.strip() or shares[name.strip()] < 0:
            raise BadSpec(f"{part!r} is not CLASS=SHARE; write for example priority=0.2,standard=0.5,batch=0.3")
    total = sum(shares.values())
    if abs(total - 1) > 0.001:
        raise BadSpec(f"the shares {text} sum to {total:g}; they must sum to 1")
    return shares


def assign_classes(
    requests: Sequence[TraceRequest], shares: Mapping[str, float], work: Work, seed: int
) -> list[TraceRequest]:
    """Assign classes so that their shares of the demanded work approximate `shares`.

    Every tenant gets one class, as near as the tenants' sizes allow; where there is one tenant, every request gets a
    random class.
    """
    demand: dict[str, float] = defaultdict(float)
    for request in requests:
        demand[request.tenant] += work(request)
    if len(demand) == 1:
        rng = Random(f"classes {seed}")
        names = rng.choices(list(shares), weights=list(shares.values()), k=len(requests))
        return [replace(request, service_class=name) for request, name in zip(requests, names, strict=True)]
    class_of = _divide(demand, shares)
    return [replace(request, service_class=class_of[request.tenant]) for request in requests]


def _divide(demand: Mapping[str, float], shares: Mapping[str, float]) -> dict[str, str]:
    """Assign the largest tenant first, each to the class that lacks most; then move and swap while that helps."""
    total = sum(demand.values())
    lacking = {name: share * total for name, share in shares.items() if share > 0}
    class_of: dict[str, str] = {}
    for tenant in sorted(demand, key=lambda name: (-demand[name], name)):
        chosen = max(lacking, key=lambda name: lacking[name])
        class_of[tenant] = chosen
        lacking[chosen] -= demand[tenant]
    tenants = sorted(demand)
    while _improve(tenants, demand, class_of, lacking):
        pass
    return class_of


def _improve(
    tenants: list[str], demand: Mapping[str, float], class_of: dict[str, str], lacking: dict[str, float]
) -> bool:
    """Sweep once over single moves and pairwise swaps; return whether any brought the shares nearer."""
    improved = False

    def shift(source: str, target: str, amount: float) -> bool:
        """Move `amount` of demand from one class to another if that helps; return whether it did."""
        before = lacking[source] ** 2 + lacking[target] ** 2
        after = (lacking[source] + amount) ** 2 + (lacking[target] - amount) ** 2
        if after >= before * (1 - 1e-9):
            return False
        lacking[source] += amount
        lacking[target] -= amount
        return True

    for number, tenant in enumerate(tenants):
        for target in lacking:
            if target != class_of[tenant] and shift(class_of[tenant], target, demand[tenant]):
                class_of[tenant] = target
                improved = True
        for other in tenants[number + 1 :] if len(tenants) <= 300 else ():
            mine, theirs = class_of[tenant], class_of[other]
            if mine != theirs and shift(mine, theirs, demand[tenant] - demand[other]):
                class_of[tenant], class_of[other] = theirs, mine
                improved = True
    return improved
