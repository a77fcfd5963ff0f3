"""`moiety bench scheduler` measures the state that was requested, and its report says so."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from moiety_engine.bench.cli import bench_scheduler
from moiety_engine.bench.scheduler import BenchLoad, SteadyState, measure_memory


@pytest.mark.parametrize(
    ("policy", "everything"), [("moiety", False), ("fcfs", False), ("moiety", True), ("fcfs", True)]
)
def test_the_load_stays_what_it_was_while_requests_end_and_join(policy: str, everything: bool) -> None:
    load = BenchLoad(policy, running=32, waiting=200, tenants=20, everything=everything)
    state = SteadyState(load, seed=1)
    state.warm_up()
    for _ in range(100):
        state.step()
    times = state.times
    assert min(times.running) >= 0.9 * load.running
    assert load.waiting <= min(times.waiting) <= max(times.waiting) <= load.waiting + 0.1 * load.running
    assert times.num_ended > 0
    assert sum(times.prefill_rows) > 0
    assert len(times.decision_us) == len(times.decision_cpu_us) == len(times.commit_us) == 100
    assert len(times.after_launch_us) == len(times.total_cpu_us) == 100
    assert all(total > alone for total, alone in zip(times.total_cpu_us, times.decision_cpu_us, strict=True))
    exchange = state.scheduler.service_exchange
    assert (exchange is not None) == (everything and policy == "moiety")
    assert exchange is None or exchange.received_total > 0
    assert (state.scheduler.kv.host is not None) == everything


def test_a_waiting_request_takes_at_most_2600_bytes_besides_its_tokens() -> None:
    assert measure_memory(BenchLoad(running=8, waiting=1000, tenants=100), seed=0) <= 2600


def test_the_report_is_one_json_object_with_the_decision_and_its_growth() -> None:
    app = typer.Typer()
    app.command()(bench_scheduler)
    options = ["--running", "16", "--waiting", "300", "--tenants", "30", "--steps", "20", "--json"]
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["running"], report["tenants"]) == (16, 30)
    assert report["waiting"] >= 300
    for name in ("decision_us", "decision_cpu_us", "after_launch_us", "total_us", "total_cpu_us"):
        assert set(report[name]) == {"p50", "p90", "p99"}
    assert report["total_us"]["p50"] > report["decision_us"]["p50"]
    assert report["settings"]["everything"] is False
    assert set(report["growth"]) == {"100", "300"}
    assert report["environment"]["python"]


def test_an_unknown_policy_is_refused_with_those_that_there_are() -> None:
    app = typer.Typer()
    app.command()(bench_scheduler)
    result = CliRunner().invoke(app, ["--policy", "luck", "--waiting", "1"])
    assert result.exit_code == 2
    assert "fcfs" in result.output
