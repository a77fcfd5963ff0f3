"""Scheduling policies, by name."""

from __future__ import annotations

from moiety_engine.scheduling.policies.dlpm import Dlpm
from moiety_engine.scheduling.policies.edf import Edf
from moiety_engine.scheduling.policies.fcfs import Fcfs
from moiety_engine.scheduling.policies.moiety.moiety import Moiety
from moiety_engine.scheduling.policies.policy import Policy, PolicyContext
from moiety_engine.scheduling.policies.qoserve import Qoserve, QoserveChunking, QoserveDemotion
from moiety_engine.scheduling.policies.strict_priority import StrictPriority
from moiety_engine.scheduling.policies.vtc import Vtc

_ALL: tuple[type[Policy], ...] = (
    Moiety,
    Fcfs,
    StrictPriority,
    Edf,
    Vtc,
    Dlpm,
    QoserveChunking,
    QoserveDemotion,
    Qoserve,
)
POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in _ALL}


def make_policy(name: str, context: PolicyContext) -> Policy:
    """Return a new policy of this name. Raises KeyError if there is none; check against POLICIES first."""
    return POLICIES[name](context)
