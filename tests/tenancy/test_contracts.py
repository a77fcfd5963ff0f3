"""Contract checks: a new tenant at its limits beside recent traffic, and what would have to be added."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moiety_platform.contracts.arrivals import (
    CONTRACT,
    OUTPUT_WEIGHT,
    Arrival,
    ContractTerms,
    burst_of,
    busiest_window,
    contract_arrivals,
)
from moiety_platform.contracts.check import Attainments, ContractCheck, ContractReport, ContractRun, Simulate, Verdict
from moiety_platform.contracts.errors import ContractProblem
from moiety_platform.contracts.simulator import ContractSimulator
from moiety_wire.classes import FLEX, PRIORITY, STANDARD, ServiceClass

CLASSES = {service.name: service for service in (PRIORITY, STANDARD, FLEX)}
TERMS = ContractTerms("standard", 600, input_tokens=100, output_tokens=20)


def arrival(at_s: float, tokens: int = 10, name: str = "standard") -> Arrival:
    return Arrival(at_s, "ten_a", tokens, 1, name)


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 500)), min_size=1, max_size=40), st.integers(1, 300))
def test_no_other_window_has_more_work(found: list[tuple[int, int]], window_s: int) -> None:
    arrivals = [arrival(at_s, tokens) for at_s, tokens in found]
    first_s, window = busiest_window(arrivals, window_s)
    assert (
        first_s in {one.at_s for one in arrivals}
        and window[0].at_s == 0
        and all(0 <= one.at_s < window_s for one in window)
    )

    def work(some: Sequence[Arrival]) -> int:
        return sum(one.input_tokens + OUTPUT_WEIGHT * one.output_tokens for one in some)

    for first in arrivals:
        assert work(window) >= work([one for one in arrivals if 0 <= one.at_s - first.at_s < window_s])


def test_the_tenant_arrives_at_its_tightest_limit_with_the_lengths_of_the_traffic() -> None:
    recent = [arrival(0, 90), arrival(1, 110)]
    own = contract_arrivals(ContractTerms("standard", 600), recent, 600, 0)
    assert 5700 < len(own) < 6300 and {one.input_tokens for one in own} == {90, 110}
    assert {(one.tenant, one.service_class) for one in own} == {(CONTRACT, CONTRACT)}
    fewer = contract_arrivals(ContractTerms("standard", 600, tokens_per_minute=6060), recent, 600, 0)
    assert 500 < len(fewer) < 700  # 60 a minute
    with pytest.raises(ContractProblem, match="give the input tokens"):
        contract_arrivals(ContractTerms("standard", 600), [], 600, 0)
    with pytest.raises(ContractProblem, match="longer window"):
        contract_arrivals(ContractTerms("standard", 1e-6), recent, 60, 0)
    with pytest.raises(ContractProblem, match="more than 200,000 requests"):
        contract_arrivals(ContractTerms("standard", 1e9), recent, 60, 0)


class Fleet:
    """A simulator by a rule: a class attains its SLO up to a number of requests at each replica."""

    def __init__(self, most: Mapping[str, int], others: float = 1.0) -> None:
        self.most, self.others = most, others
        self.asked: list[int] = []

    async def __call__(
        self, arrivals: Sequence[Arrival], classes: Mapping[str, ServiceClass], replicas: int
    ) -> Attainments:
        self.asked.append(replicas)
        names = {one.service_class for one in arrivals}
        found = dict.fromkeys(names, self.others)
        if CONTRACT in names:
            rank = classes[CONTRACT].rank
            name = next(name for name, one in classes.items() if one.rank == rank and name != CONTRACT)
            found[CONTRACT] = 1.0 if len(arrivals) <= self.most[name] * replicas else 0.5
        return found


async def checked(fleet: Fleet, replicas: int = 1, most: int = 16) -> ContractReport:
    own = [Arrival(0.0, CONTRACT, 1, 1, CONTRACT)] * 99
    return await ContractCheck(TERMS, [arrival(0)], own, CLASSES, fleet, required=0.99).run(replicas, most)


async def test_a_tenant_that_fits_is_accepted_after_two_runs() -> None:
    fleet = Fleet({"standard": 100, "flex": 100})
    report = await checked(fleet)
    assert (report.verdict, report.replicas_needed, fleet.asked) == (Verdict.ACCEPTED, 1, [1, 1])


@pytest.mark.parametrize(("most_each", "needed"), [(51, 2), (34, 3), (20, 5), (13, 8), (7, 15)])
async def test_the_smallest_number_of_replicas_is_found(most_each: int, needed: int) -> None:
    report = await checked(Fleet({"standard": most_each, "flex": 10}))
    assert (report.verdict, report.replicas_needed, report.classes) == (Verdict.NEEDS_MORE, needed, [])


async def test_a_lower_class_is_offered_and_a_better_one_is_not_tried() -> None:
    report = await checked(Fleet({"priority": 1000, "standard": 1, "flex": 100}))
    assert (report.verdict, report.replicas_needed, report.classes) == (Verdict.NEEDS_MORE, None, ["flex"])
    assert "priority" not in {run.service_class for run in report.runs}


async def test_a_tenant_that_nothing_carries_is_refused() -> None:
    report = await checked(Fleet({"standard": 1, "flex": 1}))
    assert (report.verdict, report.replicas_needed, report.classes) == (Verdict.REFUSED, None, [])
    assert report.runs[0].missed == [CONTRACT]


async def test_others_must_keep_what_they_attained_before_and_no_more() -> None:
    """A class that misses its SLO already does not keep a tenant out; one that the tenant breaks does."""

    async def poor(arrivals: Sequence[Arrival], classes: Mapping[str, ServiceClass], replicas: int) -> Attainments:
        return {name: 1.0 if name == CONTRACT else 0.7 for name in {one.service_class for one in arrivals}}

    async def broken(arrivals: Sequence[Arrival], classes: Mapping[str, ServiceClass], replicas: int) -> Attainments:
        names = {one.service_class for one in arrivals}
        return {name: 0.9 if CONTRACT in names and name == "standard" else 1.0 for name in names}

    own = [Arrival(0.0, CONTRACT, 1, 1, CONTRACT)]
    report = await ContractCheck(TERMS, [arrival(0)], own, CLASSES, poor, required=0.99).run(1, 2)
    assert report.verdict is Verdict.ACCEPTED
    report = await ContractCheck(TERMS, [arrival(0)], own, CLASSES, broken, required=0.99).run(1, 2)
    assert report.verdict is Verdict.REFUSED and report.runs[0].missed == ["standard"]


@given(st.lists(st.tuples(st.floats(0, 1800), st.integers(1, 9)), max_size=60), st.floats(1, 4), st.integers(0, 3))
def test_a_burst_has_more_requests_of_the_same_kind_within_the_window(
    found: list[tuple[float, int]], factor: float, seed: int
) -> None:
    recent = [arrival(at_s, tokens) for at_s, tokens in sorted(found)]
    burst = burst_of(recent, factor, 1800, seed)
    assert burst == sorted(burst, key=lambda one: one.at_s) == burst_of(recent, factor, 1800, seed)
    if factor == 1:
        assert burst == []
        return
    assert int(factor) * len(recent) <= len(burst) <= (int(factor) + 1) * len(recent)
    assert all(0 <= one.at_s <= 1800 for one in burst)
    for one in burst:
        assert any(abs(one.at_s - same.at_s) <= 60 and one[1:] == same[1:] for same in recent)


def test_a_burst_has_about_so_many_times_the_requests() -> None:
    assert 1400 < len(burst_of([arrival(n) for n in range(1000)], 1.5, 1800, 0)) < 1600


async def in_burst(simulate: Simulate, verdict: Verdict = Verdict.ACCEPTED) -> ContractRun | None:
    own, recent = [Arrival(0.0, CONTRACT, 1, 1, CONTRACT)], [arrival(0)] * 10
    threads: list[int] = []

    def make_burst() -> list[Arrival]:
        threads.append(threading.get_ident())
        return [arrival(0)] * 15

    checking = ContractCheck(TERMS, recent, own, CLASSES, simulate, required=0.99, make_burst=make_burst)
    report = await checking.run(1, 1)
    assert report.verdict is verdict
    assert len(threads) == (verdict is Verdict.ACCEPTED)
    assert threading.get_ident() not in threads, "the event loop, which serves requests, goes on"
    assert len(checking.runs) == 1 or verdict is not Verdict.ACCEPTED, "the burst is no run of the verdict"
    return report.burst


async def test_an_accepted_tenant_is_shown_what_a_burst_does() -> None:
    """A burst that breaks a class without the tenant does not count against it."""

    async def fragile(arrivals: Sequence[Arrival], classes: Mapping[str, ServiceClass], replicas: int) -> Attainments:
        return {one.service_class: 0.7 if len(arrivals) > 15 else 1.0 for one in arrivals}

    async def broken_alone(
        arrivals: Sequence[Arrival], classes: Mapping[str, ServiceClass], replicas: int
    ) -> Attainments:
        return {one.service_class: 0.7 if len(arrivals) > 14 else 1.0 for one in arrivals}

    burst = await in_burst(fragile)
    assert burst is not None
    assert (burst.tenant_attainment, burst.attainment, sorted(burst.missed)) == (
        0.7, {"standard": 0.7}, [CONTRACT, "standard"],
    )  # fmt: skip
    burst = await in_burst(broken_alone)
    assert burst is not None and burst.missed == [CONTRACT]
    assert await in_burst(Fleet({"standard": 1, "flex": 1}), Verdict.REFUSED) is None


def test_a_class_that_does_not_exist_is_named() -> None:
    with pytest.raises(ContractProblem, match="there are: priority, standard, flex"):
        ContractCheck(ContractTerms("gold", 1), [], [], CLASSES, Fleet({}), required=0.99)


@pytest.mark.timeout(600)  # several processes, which share the processor with other tests
@pytest.mark.parametrize(("requests_per_minute", "verdict"), [(6, Verdict.ACCEPTED), (900, Verdict.REFUSED)])
async def test_the_real_scheduler_carries_a_small_tenant_and_not_a_large_one(
    tmp_path: Path, requests_per_minute: float, verdict: Verdict
) -> None:
    """On one simulated A10G, whose capacity is a few of these requests per second."""
    recent = [arrival(2.0 * n, 200) for n in range(30)]
    classes = {STANDARD.name: STANDARD}
    terms = ContractTerms("standard", requests_per_minute, input_tokens=512, output_tokens=128)
    own = contract_arrivals(terms, recent, 60, 0)
    simulator = ContractSimulator(tmp_path, "a10g-llama2-7b", 2.0)
    report = await ContractCheck(terms, recent, own, classes, simulator, required=0.99).run(1, 1)
    assert (report.verdict, len(report.runs)) == (verdict, 1)
    assert report.before["standard"] >= 0.99
    assert (CONTRACT in report.runs[0].missed) is (verdict is Verdict.REFUSED)
