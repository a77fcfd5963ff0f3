"""The ratio of the work that SLOs demand to the work that a replica can do."""

from __future__ import annotations

import pytest

from moiety_engine.scheduling.policies.moiety.demand import DeadlineDemand
from moiety_wire.classes import ServiceClass

SOON = ServiceClass("soon", 0, completion_s=100.0)
LATER = ServiceClass("later", 0, completion_s=1000.0)
WORSE = ServiceClass("worse", 1, completion_s=100.0)


def test_waiting_work_is_due_by_its_deadline_and_partly_before() -> None:
    demand = DeadlineDemand()
    demand.add_tokens(SOON, 6_000, 0.0)
    demand.add_tokens(LATER, 20_000, 0.0)
    forgotten_s = 10_000.0  # so late that the rates have decayed to zero
    assert demand.overload(0, 100.0, forgotten_s) == pytest.approx((6_000 + 2_000) / 10_000)
    demand.remove_tokens(SOON, 6_000)
    assert demand.overload(0, 100.0, forgotten_s) == pytest.approx(20_000 / 100_000)
    demand.remove_tokens(LATER, 20_000)
    assert demand.overload(0, 100.0, forgotten_s) == pytest.approx(0.0)


def test_steady_arrivals_are_due_one_deadline_after_they_arrive() -> None:
    demand = DeadlineDemand()
    for second in range(600):
        demand.add_tokens(SOON, 150, float(second))
        demand.remove_tokens(SOON, 150)
    assert demand.overload(0, 100.0, 600.0) == pytest.approx(1.5 * 300 / 400, rel=0.02), "in four times the promise"


def test_worse_ranks_do_not_count() -> None:
    demand = DeadlineDemand()
    demand.add_tokens(WORSE, 6_000, 0.0)
    assert demand.overload(0, 100.0, 10_000.0) == 0.0
    demand.add_tokens(SOON, 1_000, 10_000.0)
    assert demand.overload(1, 100.0, 20_000.0) == pytest.approx(7_000 / 10_000)
