"""Virtual time over the real scheduler: nothing is lost, and the same arrivals give the same run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from moiety_engine.scheduling.policies.registry import POLICIES
from moiety_engine.simulator.devices import SimulatedDevice
from moiety_engine.simulator.driver import START_NS, Driver
from moiety_engine.simulator.records import Run
from moiety_wire.classes import BATCH, SHIPPED, STANDARD
from moiety_workload.generators import generate
from moiety_workload.request import TraceRequest, Workload

CLASSES = {service.name: service for service in SHIPPED}
MIXED = (
    "poisson:rate=1.5,tenant=a,class=priority,input=8..200,output=2..60;"
    "poisson:rate=3,tenant=b,input=8..300,output=2..80;"
    "poisson:rate=2,tenant=c,class=batch,input=100..700,output=10..90"
)


def one(input_tokens: int, output_tokens: int, **more: object) -> Workload:
    return Workload("one", (TraceRequest(1.0, "a", input_tokens, output_tokens, **more),), 5.0)


def run(workload: Workload, device: SimulatedDevice, policy: str = "fcfs", **more: object) -> Run:
    return Driver(workload, device, policy, CLASSES, **more).run()


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_arrival_ends_completed_or_turned_away_whatever_the_policy(policy: str, small: SimulatedDevice) -> None:
    workload = generate(MIXED, 30.0, 0)
    done = run(workload, small, policy)
    assert len(done.records) == len(workload.requests)
    for record in done.records:
        assert record.end_ns > 0
        if record.completed:
            assert record.num_output == record.request.output_tokens
            assert record.arrival_ns <= record.scheduled_ns < record.first_ns <= record.last_ns == record.end_ns
            assert record.computed_prompt_tokens + record.cached_tokens == record.request.input_tokens
        assert record.prefill_tokens >= record.computed_prompt_tokens
    assert all(tenant.num_open == 0 for tenant in done.tenants)
    assert all(account.num_waiting == 0 for account in done.accounts)
    served = sum(account.service for account in done.accounts)
    assert served == sum(record.computed_prompt_tokens + 2 * record.num_output for record in done.records)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_the_same_arrivals_give_the_same_run(policy: str, small: SimulatedDevice) -> None:
    ends = [[record.end_ns for record in run(generate(MIXED, 15.0, seed), small, policy).records] for seed in (4, 4, 5)]
    assert ends[0] == ends[1] != ends[2]


def test_a_lone_request_takes_the_time_of_its_steps(small: SimulatedDevice) -> None:
    record = run(one(200, 3), small).records[0]  # chunks of 128 and 72 prompt tokens, then two decodes
    first_s = small.step_s(128, 1, 0, 128 * 129 // 2) + small.step_s(72, 1, 0, 72 * 128 + 72 * 73 // 2)
    last_s = first_s + small.step_s(1, 1, 201, 0) + small.step_s(1, 1, 202, 0)
    assert (record.first_ns - START_NS) / 1e9 == pytest.approx(1.0 + first_s, abs=1e-6)
    assert (record.last_ns - START_NS) / 1e9 == pytest.approx(1.0 + last_s, abs=1e-6)


def test_an_answer_is_cut_at_the_bound_that_all_requests_carry(small: SimulatedDevice) -> None:
    assert run(one(20, 30), small, max_tokens=12).records[0].num_output == 12


def test_a_prompt_that_fits_no_pool_is_turned_away(small: SimulatedDevice) -> None:
    record = run(one(2048, 3), small).records[0]
    assert record.failure == "context_length_exceeded" and not record.attained


def test_without_a_drain_the_run_ends_with_the_arrivals(small: SimulatedDevice) -> None:
    done = run(generate("poisson:rate=40", 10.0, 0), small, drain=False)
    assert done.end_s == pytest.approx(10.0)
    assert any(record.end_ns == 0 for record in done.records)


def test_work_is_observed_as_far_as_it_was_done_in_the_window(small: SimulatedDevice) -> None:
    late = Workload("late", (TraceRequest(0.0, "a", 100, 50), TraceRequest(0.99, "a", 100, 50)), 1.0)
    early, cut_off = run(late, small).records
    assert early.window_progress == (100, 50)
    assert cut_off.completed and cut_off.window_progress[1] < 5


def test_requests_that_share_blocks_hit_them_and_other_tenants_do_not(small: SimulatedDevice) -> None:
    device = msgspec.structs.replace(small, kv_tokens=8192)
    ids = (1, 2, 3)
    requests = tuple(
        TraceRequest(float(at), tenant, 1200, 2, prefix_ids=ids) for at, tenant in ((0, "a"), (2, "a"), (4, "b"))
    )
    first, second, other = run(Workload("shared", requests, 6.0, prefix_block_tokens=512), device).records
    assert (first.cached_tokens, second.cached_tokens, other.cached_tokens) == (0, 1024, 0)


def test_memory_that_runs_out_leads_to_preemptions_that_are_counted(small: SimulatedDevice) -> None:
    tight = msgspec.structs.replace(small, kv_tokens=512, host_tokens=0)
    done = run(generate("constant:rate=8,input=100,output=100", 5.0, 0), tight)
    assert sum(record.num_preemptions for record in done.records) > 0
    assert sum(record.recomputed_tokens for record in done.records) > 0
    assert all(record.completed for record in done.records)
    assert sum(record.forbidden_preemptions for record in done.records) == 0


def test_a_tenants_longest_wait_for_service_is_measured(small: SimulatedDevice) -> None:
    requests = (TraceRequest(0.0, "a", 1500, 100), TraceRequest(0.1, "b", 1500, 2))
    done = run(Workload("two", requests, 10.0), msgspec.structs.replace(small, kv_tokens=1664))
    gaps = {tenant.name: tenant.longest_gap_ns for tenant in done.tenants}
    second = done.records[1]
    assert gaps["b"] == second.scheduled_ns - second.arrival_ns > 1e9
    assert gaps["a"] == 0


def test_a_request_attains_only_if_every_token_came_in_time(small: SimulatedDevice) -> None:
    record = run(one(100, 10), small).records[0]
    assert record.attained
    ttft_s = (record.first_ns - record.arrival_ns) / 1e9
    slow_start = replace_class(record, ttft_s=ttft_s * 0.9)
    assert not slow_start.attained
    assert replace_class(record, ttft_s=ttft_s * 0.9, ttft_per_1k_s=ttft_s * 1.1).attained  # 100 tokens: a tenth of it
    step_s = (record.last_ns - record.first_ns) / 9e9
    kept, missed = step_s * 1.01, step_s * 0.9
    for pace, attained in ((kept, True), (missed, False)):
        record.latest_ns = max(
            round(record.first_ns + number * (step_s - pace) * 1e9) for number in range(record.num_output)
        )
        assert replace_class(record, ttft_s=ttft_s * 1.0001, tpot_s=pace).attained is attained


def test_work_with_an_end_attains_by_its_last_token(small: SimulatedDevice) -> None:
    record = run(one(100, 10, service_class="batch"), small).records[0]
    assert record.attained
    record.service_class = msgspec.structs.replace(
        BATCH, completion_s=(record.last_ns - record.arrival_ns) / 1e9 - 0.001
    )
    assert not record.attained


def replace_class(record: Any, **targets: float) -> Any:
    record.service_class = msgspec.structs.replace(STANDARD, **{"ttft_per_1k_s": 0.0, "tpot_s": None, **targets})
    return record


def test_weights_reach_the_accounts(small: SimulatedDevice) -> None:
    done = run(replace(one(10, 2), weights={"a": 3.0}), small)
    assert done.tenants[0].weight == 3.0
