"""Scheduling policies, by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from moiety_engine.scheduling.policies.baseline_policies import OrderedPolicy, arrival_order, deadline_s, rank_order
from moiety_engine.scheduling.policies.dlpm import Dlpm
from moiety_engine.scheduling.policies.moiety.moiety import Moiety
from moiety_engine.scheduling.policies.policy_interface import Policy, PolicyContext
from moiety_engine.scheduling.policies.qoserve import Qoserve, QoserveChunking, QoserveDemotion
from moiety_engine.scheduling.policies.vtc import Vtc

POLICIES: dict[str, Callable[[PolicyContext], Policy]] = {
    "moiety": Moiety,
    "fcfs": partial(OrderedPolicy, order=arrival_order),
    "strict-priority": partial(OrderedPolicy, order=rank_order),
    "edf": partial(OrderedPolicy, order=deadline_s),
    "vtc": Vtc,
    "dlpm": Dlpm,
    "qoserve-chunking": QoserveChunking,
    "qoserve-demotion": QoserveDemotion,
    "qoserve": Qoserve,
}


def counts_tenant_service(name: str) -> bool:
    """Return whether the policy of this name has counters of tenants. Raises KeyError if there is none."""
    policy = POLICIES[name]
    return policy.counts_tenant_service if isinstance(policy, type) and issubclass(policy, Policy) else False


def make_policy(name: str, context: PolicyContext) -> Policy:
    """Return a new policy of this name. Raises KeyError if there is none; check against POLICIES first."""
    return POLICIES[name](context)
