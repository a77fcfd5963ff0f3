"""Classes are shared out over tenants by the work that they demand."""

from __future__ import annotations

from random import Random

import pytest

from moiety_workload.errors import BadSpec
from moiety_workload.request import TraceRequest
from moiety_workload.tenants import assign_classes, parse_shares

SHARES = {"priority": 0.2, "standard": 0.5, "batch": 0.3}


def work(request: TraceRequest) -> float:
    return float(request.input_tokens)


def shares_of(requests: list[TraceRequest]) -> dict[str, float]:
    total = sum(work(request) for request in requests)
    return {
        name: sum(work(request) for request in requests if request.service_class == name) / total for name in SHARES
    }


def test_tenants_get_classes_so_that_the_shares_are_met() -> None:
    rng = Random(2)
    sizes = [rng.randint(1, 40) for _ in range(18)]
    requests = [TraceRequest(0.0, f"t{tenant}", 100, 1) for tenant, size in enumerate(sizes) for _ in range(size)]
    assigned = assign_classes(requests, SHARES, work, seed=0)
    assert shares_of(assigned) == pytest.approx(SHARES, abs=0.01)
    for tenant in {request.tenant for request in assigned}:
        assert len({request.service_class for request in assigned if request.tenant == tenant}) == 1


def test_a_greedy_choice_that_was_bad_is_mended_by_swaps() -> None:
    sizes = {"a": 5, "b": 4, "c": 3, "d": 3, "e": 3}  # greedy: 5 + 3 against 4 + 3 + 3; best: 5 + 4 against 3 + 3 + 3
    requests = [TraceRequest(0.0, tenant, size, 1) for tenant, size in sizes.items()]
    assigned = assign_classes(requests, {"priority": 0.5, "standard": 0.5}, work, seed=0)
    totals = shares_of(assigned)
    assert totals["priority"] == pytest.approx(0.5) and totals["standard"] == pytest.approx(0.5)


def test_a_single_tenant_gets_its_classes_request_by_request() -> None:
    requests = [TraceRequest(0.0, "a", 100, 1) for _ in range(4000)]
    assigned = assign_classes(requests, SHARES, work, seed=0)
    assert shares_of(assigned) == pytest.approx(SHARES, abs=0.03)
    assert assigned == assign_classes(requests, SHARES, work, seed=0)
    assert assigned != assign_classes(requests, SHARES, work, seed=1)


@pytest.mark.parametrize("text", ["priority", "priority=x", "priority=0.5", "=1", "priority=-0.5,batch=1.5"])
def test_shares_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(BadSpec):
        parse_shares(text)


def test_shares_are_read() -> None:
    assert parse_shares("priority=0.2, standard=0.5,batch=0.3") == SHARES
