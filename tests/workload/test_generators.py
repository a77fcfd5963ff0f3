"""Drawn arrivals have the rate, the bursts and the pauses that were asked for."""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean, pstdev

import pytest

from moiety_workload.errors import BadSpec
from moiety_workload.generators import generate


def gaps(spec: str, duration_s: float = 2000.0) -> list[float]:
    times = [request.arrival_s for request in generate(spec, duration_s, 1).requests]
    return [later - earlier for earlier, later in pairwise(times)]


@pytest.mark.parametrize(
    ("spec", "rate", "variation"),
    [("poisson:rate=5", 5, 1.0), ("constant:rate=5", 5, 0.0), ("gamma:rate=5,cv=3", 5, 3.0)],
)
def test_a_process_has_its_rate_and_its_variation(spec: str, rate: float, variation: float) -> None:
    found = gaps(spec)
    assert fmean(found) == pytest.approx(1 / rate, rel=0.1)
    assert pstdev(found) / fmean(found) == pytest.approx(variation, rel=0.1, abs=1e-6)


def test_on_and_off_times_alternate() -> None:
    requests = generate("onoff:rate=4,on=60,off=30", 900.0, 0).requests
    assert all(request.arrival_s % 90 < 60 for request in requests)
    assert len(requests) == pytest.approx(4 * 600, rel=0.1)


def test_a_ramp_ends_at_its_rate() -> None:
    times = [request.arrival_s for request in generate("ramp:from=0,to=10,even=1", 1000.0, 0).requests]
    assert len(times) == pytest.approx(5000, abs=2)
    assert sum(time_s < 500 for time_s in times) == pytest.approx(1250, abs=2)


def test_a_swing_has_two_rates() -> None:
    times = [request.arrival_s for request in generate("swing:low=2,high=5,period=200,even=1", 1000.0, 0).requests]
    assert sum(time_s % 200 < 100 for time_s in times) == pytest.approx(1000, abs=6)
    assert sum(time_s % 200 >= 100 for time_s in times) == pytest.approx(2500, abs=6)


def test_streams_are_merged_in_order_with_their_tenants_classes_weights_and_lengths() -> None:
    spec = "constant:rate=1.5,tenant=a,weight=2;poisson:rate=3,tenant=b,class=flex,input=16..64,output=1"
    drawn = generate(spec, 100.0, 0)
    assert drawn.tenants == ["a", "b"] and drawn.weights == {"a": 2.0}
    assert [r.arrival_s for r in drawn.requests] == sorted(r.arrival_s for r in drawn.requests)
    second = [request for request in drawn.requests if request.tenant == "b"]
    assert {r.service_class for r in second} == {"flex"} and {r.output_tokens for r in second} == {1}
    assert min(r.input_tokens for r in second) >= 16 and max(r.input_tokens for r in second) <= 64
    assert {r.input_tokens for r in drawn.requests if r.tenant == "a"} == {256}
    assert drawn == generate(spec, 100.0, 0)
    assert drawn != generate(spec, 100.0, 1)


def test_tenants_share_a_rate_out_evenly() -> None:
    drawn = generate("poisson:rate=8,tenants=4", 500.0, 0)
    assert len(drawn.requests) == pytest.approx(4000, rel=0.1)
    counts = [sum(request.tenant == tenant for request in drawn.requests) for tenant in drawn.tenants]
    assert len(counts) == 4 and min(counts) > 0.8 * max(counts)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("uniform:rate=1", "not an arrival process; known are poisson"),
        ("poisson", "lacks rate"),
        ("poisson:rate=x", "rate must be a number"),
        ("poisson:rate=0", "rate must be above 0"),
        ("poisson:rate=1,cv=2", "not KEY=VALUE with a key of rate"),
        ("poisson:rate=1,input=9..3", "LOW at most HIGH"),
        ("poisson:rate=nan", "finite"),
        ("ramp:from=0,to=0", "creates no request"),
        ("poisson:rate=0.000001", "creates no request in"),
    ],
)
def test_a_description_that_means_nothing_is_refused_with_what_would(spec: str, message: str) -> None:
    with pytest.raises(BadSpec, match=message):
        generate(spec, 10.0, 0)
