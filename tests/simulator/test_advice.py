"""Advice: the saturation point, bounds, limits and replicas, against runs that try them; usage rows; the command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moiety_engine.errors import InvalidConfig
from moiety_engine.simulator.advice import KV_FULL, KV_LOW, SAFE_SHARE, Advice, Advisor
from moiety_engine.simulator.advise import explain
from moiety_engine.simulator.bounds import REQUIRED_ATTAINMENT, attainment
from moiety_engine.simulator.capacity import at_load, measure_capacity
from moiety_engine.simulator.devices import SimulatedDevice
from moiety_engine.simulator.simulate import simulate
from moiety_engine.simulator.usage_rows import read_usage
from moiety_wire.classes import BATCH, SHIPPED, STANDARD, ServiceClass
from moiety_workload.generators import generate
from moiety_workload.request import TraceRequest, Workload

from .conftest import run_command

WINDOW_S = 6.0
SPEC = "poisson:rate=8,tenants=4,input=16..200,output=4..60"
HEAVY_SPEC = "poisson:rate=60,tenants=4,input=16..200,output=4..60,class=batch"


@pytest.fixture(scope="module")
def workload() -> Workload:
    return generate(SPEC, WINDOW_S, 0)


@pytest.fixture(scope="module")
def advice(workload: Workload, small: SimulatedDevice) -> Advice:
    return Advisor(workload, small, SHIPPED, window_s=WINDOW_S).advise()


@pytest.fixture(scope="module")
def heavy(small: SimulatedDevice) -> Advice:
    return Advisor(generate(HEAVY_SPEC, WINDOW_S, 0), small, [BATCH], window_s=WINDOW_S).advise()


def run_at(
    load: float, workload: Workload, device: SimulatedDevice, classes: tuple[ServiceClass, ...] = SHIPPED
) -> Any:
    capacity = measure_capacity(workload, device)
    return simulate(at_load(workload, capacity, load, 0), device, "moiety", classes=classes, capacity=capacity)


def test_promises_hold_at_the_saturation_point_and_fail_well_beyond_it(
    advice: Advice, workload: Workload, small: SimulatedDevice
) -> None:
    assert 0.5 < advice.saturation < 1.2
    tuned = msgspec.structs.replace(small, max_batch_tokens=advice.limits.max_batch_tokens)
    assert min(attainment(run_at(advice.saturation, workload, tuned).run).values()) >= REQUIRED_ATTAINMENT
    assert min(attainment(run_at(2.0 * advice.saturation, workload, tuned).run).values()) < REQUIRED_ATTAINMENT


def test_the_advised_bounds_are_kept_with_the_advised_limits(
    advice: Advice, workload: Workload, small: SimulatedDevice
) -> None:
    (bounds,) = advice.classes
    assert advice.attained_at_safe_load and bounds.attainment >= REQUIRED_ATTAINMENT
    assert bounds.ttft_s is not None and bounds.ttft_s <= STANDARD.ttft_s
    assert bounds.tpot_s is not None and bounds.tpot_s <= STANDARD.tpot_s
    tuned = msgspec.structs.replace(
        small, max_batch_tokens=advice.limits.max_batch_tokens, max_running=advice.limits.max_running
    )
    promised = msgspec.structs.replace(STANDARD, ttft_s=bounds.ttft_s, tpot_s=bounds.tpot_s)
    outcome = run_at(advice.safe_load, workload, tuned, (promised,))
    assert attainment(outcome.run)["standard"] == bounds.attainment


def test_replicas_are_enough_for_the_busiest_part_and_not_one_too_many(advice: Advice, heavy: Advice) -> None:
    assert advice.safe_load == pytest.approx(SAFE_SHARE * advice.saturation)
    assert heavy.num_replicas > 1 == advice.num_replicas
    assert (heavy.num_replicas - 1) * heavy.safe_load < heavy.offered_peak <= heavy.num_replicas * heavy.safe_load


def test_a_promise_of_hours_does_not_hide_a_growing_backlog(heavy: Advice, small: SimulatedDevice) -> None:
    patient = generate(HEAVY_SPEC, WINDOW_S, 0)
    assert attainment(run_at(1.2, patient, small).run) == {"batch": 1.0}
    assert heavy.saturation < 1.15


def test_a_promise_that_an_idle_replica_breaks_is_named_with_one_that_it_keeps(
    workload: Workload, small: SimulatedDevice
) -> None:
    hasty = msgspec.structs.replace(
        STANDARD, ttft_s=0.1, ttft_per_1k_s=0.0, tpot_s=0.005
    )  # a step takes 14 ms at least
    advice = Advisor(workload, small, [hasty], window_s=WINDOW_S).advise()
    (bounds,) = advice.classes
    assert advice.never_attained == ("standard",)
    assert bounds.configured_tpot_s == 0.005 and bounds.tpot_s is not None and bounds.tpot_s > 0.014
    assert bounds.attainment >= REQUIRED_ATTAINMENT
    assert any("is missed even on a nearly idle replica" in sentence for sentence in explain(advice, small))


def test_sentences_have_the_figures_and_say_what_memory_means(advice: Advice, small: SimulatedDevice) -> None:
    def text(used: float) -> str:
        changed = {name: getattr(advice, name) for name in Advice.__slots__} | {"kv_used_fraction": used}
        return " ".join(explain(Advice(**changed), small))

    assert f"up to {advice.saturation:.2f} C" in text(0.8) and "run 1 replica." in text(0.8)
    assert f"--max-batch-tokens {advice.limits.max_batch_tokens}" in text(0.8) and "well used" in text(0.8)
    assert "are possible" in text(KV_LOW - 0.01)
    assert "memory limits the replica" in text(KV_FULL + 0.01)


def test_long_prompts_bound_by_prefill_and_those_beyond_the_memory_are_left_out(
    advice: Advice, small: SimulatedDevice
) -> None:
    assert advice.decode_share > 0.5
    assert any("decode-bound" in sentence for sentence in explain(advice, small))
    reading = generate("poisson:rate=4,input=800..1200,output=2..3;constant:rate=1,input=3000,output=4", WINDOW_S, 0)
    found = Advisor(reading, small, SHIPPED, window_s=WINDOW_S).advise()
    sentences = list(explain(found, small))
    assert found.decode_share < 0.5 and any("prefill-bound" in sentence for sentence in sentences)
    assert found.num_too_long == WINDOW_S and sentences[0].startswith(f"{WINDOW_S:.0f} requests are longer")


def test_a_trace_of_which_nothing_fits_is_refused(small: SimulatedDevice) -> None:
    with pytest.raises(InvalidConfig, match="use a larger device"):
        Advisor(generate("constant:rate=1,input=3000,output=4", WINDOW_S, 0), small, SHIPPED)


def test_a_tenant_whose_bursts_break_promises_is_named(small: SimulatedDevice) -> None:
    steady = generate("constant:rate=4,input=40,output=10,tenant=calm", WINDOW_S, 0)
    burst = tuple(TraceRequest(3.0, "bursty", 200, 10) for _ in range(200))
    mixed = replace(steady, requests=(*steady.requests[:12], *burst, *steady.requests[12:]))
    found = Advisor(mixed, small, SHIPPED, window_s=WINDOW_S).advise()
    assert found.saturation < 0.6
    assert found.breaker is not None and found.breaker.tenant == "bursty" and found.breaker.share > 0.5
    assert any("Tenant bursty has" in sentence for sentence in explain(found, small))


def write_usage(path: Path, num: int) -> None:
    rows = [
        {
            "request_id": str(index),
            "tenant_id": f"tenant-{index % 3}",
            "service_class": "standard",
            "started_at": f"2026-01-05T10:00:{59 - index % 60:02d}.{index:06d}Z",
            "outcome": "ok" if index else "rejected",
            "prompt_tokens": 40,
            "output_tokens": 20 if index else 0,
        }
        for index in range(num)
    ]
    path.write_text(json.dumps({"data": rows}))


def test_usage_rows_become_arrivals_in_order_without_those_never_served(tmp_path: Path) -> None:
    path = tmp_path / "usage.json"
    write_usage(path, 50)
    workload, num_unserved = read_usage(path)
    arrivals = [request.arrival_s for request in workload.requests]
    assert num_unserved == 1 and len(arrivals) == 49
    assert arrivals == sorted(arrivals) and arrivals[0] == 0 and arrivals[-1] < workload.duration_s
    assert workload.requests[0].service_class == "standard" and workload.requests[0].tenant == "tenant-1"


def test_the_command_advises_from_usage_in_sentences_and_json(
    tmp_path: Path, small: SimulatedDevice, capsys: pytest.CaptureFixture[str]
) -> None:
    device, usage = tmp_path / "device.json", tmp_path / "usage.json"
    device.write_bytes(msgspec.json.encode(small))
    write_usage(usage, 120)
    arguments = ["--usage", usage, "--device", device, "--duration-s", "10", "--policy", "fcfs"]
    assert run_command("advise", *arguments, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["num_unserved"] == 1 and report["settings"]["trace"] == "usage"
    assert report["advice"]["num_replicas"] == 1 and report["advice"]["classes"][0]["name"] == "standard"
    assert report["sentences"][0].startswith("1 usage rows were not served")


@pytest.mark.parametrize(
    ("text", "message"),
    [("{}", "moiety usage --requests 500 --json"), ('{"data": []}', "has 0 served requests")],
)
def test_usage_that_is_none_is_refused(
    tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "usage.json"
    path.write_text(text)
    assert run_command("advise", "--usage", path) == 1
    assert message in " ".join(capsys.readouterr().err.split())


def test_traffic_must_be_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run_command(
            "advise",
        )
        == 1
    )
    assert "either --trace or --usage" in capsys.readouterr().err
