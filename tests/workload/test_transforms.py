"""One workload from another: lengths of time, load and lengths of requests, with the tenants kept."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moiety_workload.errors import BadSpec
from moiety_workload.generators import draw_poisson
from moiety_workload.request import TraceRequest, Workload
from moiety_workload.transforms import at_rate, cut, last_for, multiply, scale_lengths, shorten


def workload(count: int = 100, *, tenants: int = 4) -> Workload:
    rng = Random(5)
    requests = tuple(
        TraceRequest(index * 0.5, f"t{index % tenants}", rng.randint(1, 500), rng.randint(1, 100), prefix_ids=(index,))
        for index in range(count)
    )
    return Workload("made up", requests, count * 0.5, prefix_block_tokens=512)


def work(request: TraceRequest) -> float:
    return request.input_tokens + 3 * request.output_tokens


def demand(requests: tuple[TraceRequest, ...]) -> float:
    return sum(work(request) for request in requests)


def test_a_rate_stretches_time_and_keeps_the_bursts() -> None:
    requests = [TraceRequest(time_s, "a", 1, 1) for time_s in (0.0, 0.1, 0.2, 3.0, 4.0)]
    stretched = at_rate(requests, rate_per_s=0.5)
    assert [request.arrival_s for request in stretched] == pytest.approx([0.0, 0.2, 0.4, 6.0, 8.0])


def test_a_trace_is_shortened_by_number_and_by_time() -> None:
    requests = [TraceRequest(float(time_s), "a", 1, 1) for time_s in range(10)]
    assert len(shorten(requests, 3, None)) == 3
    assert [request.arrival_s for request in shorten(requests, None, 2.5)] == [0.0, 1.0, 2.0]


def test_poisson_arrivals_have_the_rate_that_was_asked_for() -> None:
    requests = draw_poisson(Random(1), rate_per_s=20, num_requests=4000, input_tokens=3, output_tokens=4)
    assert requests[-1].arrival_s == pytest.approx(200, rel=0.05)
    assert requests == sorted(requests, key=lambda request: request.arrival_s)


@given(st.floats(0.05, 6.0), st.integers(0, 5))
def test_a_multiplied_workload_has_so_much_more_work_in_the_same_time_from_the_same_tenants(
    factor: float, seed: int
) -> None:
    base = workload()
    more = multiply(base, factor, work, seed)
    largest = max(work(request) for request in base.requests)
    assert demand(more.requests) == pytest.approx(factor * demand(base.requests), abs=largest)
    assert more.duration_s == base.duration_s
    assert {request.tenant for request in more.requests} <= set(base.tenants)
    times = [request.arrival_s for request in more.requests]
    assert times == sorted(times) and times[0] >= 0 and times[-1] < base.duration_s
    assert more == multiply(base, factor, work, seed)


def test_copies_laid_over_each_other_share_no_prefix() -> None:
    blocks = Counter(block for request in multiply(workload(), 3, work, 0).requests for block in request.prefix_ids)
    assert len(blocks) == 300 and set(blocks.values()) == {1}


def test_a_whole_multiple_keeps_the_first_copy_where_it_was() -> None:
    base = workload()
    assert set(base.requests) < set(multiply(base, 2, work, 1).requests)
    assert multiply(base, 1, work, 1).requests == base.requests


def test_a_factor_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(BadSpec, match="has no request"):
        multiply(workload(2), 0.001, work, 0)


def test_a_workload_is_repeated_to_a_duration_and_cut_to_one() -> None:
    longer = last_for(workload(), 120.0)
    assert len(longer.requests) == 240 and longer.duration_s == 120.0
    assert longer.requests[100].arrival_s == 50.0 and longer.requests[100].prefix_ids != longer.requests[0].prefix_ids
    assert len(last_for(workload(), 10.0).requests) == 20
    window = cut(workload(), 10.0, 5.0)
    assert [request.arrival_s for request in window.requests] == [index * 0.5 for index in range(10)]
    with pytest.raises(BadSpec, match="no request from"):
        cut(workload(), 60.0, 5.0)


def test_scaled_lengths_are_at_least_one_token_and_know_no_blocks() -> None:
    scaled = scale_lengths([TraceRequest(0.0, "a", 100, 3, prefix_ids=(7,))], 0.1)
    assert (scaled[0].input_tokens, scaled[0].output_tokens, scaled[0].prefix_ids) == (10, 1, ())
