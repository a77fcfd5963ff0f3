"""What the benchmarks of telemetry make of what they have measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NOTHING = dict.fromkeys(("requests", "sent", "queue_full", "not_taken", "exports_taken", "exports_not_taken"), 0.0)


@pytest.fixture
def outage(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import telemetry_outage

    return telemetry_outage


@pytest.fixture
def cost(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import telemetry_cost

    return telemetry_cost


def judge(outage: Any, *, outage_ms: float = 5, status: int = 200, cpu_s: float = 0.1, **told: float) -> dict[str, Any]:
    """A run of 100 requests a phase of 5 ms each, but for the outage."""

    def sent(latency_ms: float, status: int = 200) -> list[Any]:
        return [outage.Sent(0, 0.0, 0.0, latency_ms / 1000, status)] * 100

    phases = {"before": sent(5), "outage": sent(outage_ms, status), "after": sent(5)}
    first = NOTHING | {"requests": 10, "sent": 90}
    last = NOTHING | {"requests": 310, "exports_taken": 5, "exports_not_taken": 1} | told
    found: dict[str, Any] = outage.judged(phases, {"before": 0.1, "outage": cpu_s, "after": 0.1}, first, last)
    return found["verdict"]


def test_an_outage_that_nobody_noticed_and_whose_spans_are_all_counted_is_well(outage: Any) -> None:
    assert all(judge(outage, sent=90 + 1700, queue_full=900, not_taken=100).values())


def test_cost_report_names_lost_slower_costlier_and_uncounted_requests(outage: Any) -> None:
    spans = {"sent": 90 + 1700.0, "queue_full": 900.0, "not_taken": 100.0}
    for wrong, verdict in (
        ({"status": 503}, "none_lost"),
        ({"outage_ms": 9.0}, "none_slower"),
        ({"cpu_s": 0.12}, "none_dearer"),
        ({"queue_full": 0.0, "not_taken": 0.0, "sent": 90 + 2700.0}, "spans_were_dropped"),
        ({"queue_full": 900.0 - outage.BATCH}, "all_spans_counted"),
        ({"exports_not_taken": 0.0}, "metrics_went_on"),
    ):
        found = judge(outage, **{**spans, **wrong})
        assert [name for name, holds in found.items() if not holds] == [verdict]


def test_starts_are_compared_by_the_medians_of_their_pairs(cost: Any) -> None:
    def start(*ratios: float) -> list[dict[str, dict[str, float]]]:
        return [
            {"on": {"cpu": 100.0 * ratio * busy}, "off": {"cpu": 100.0 * busy}} for busy, ratio in enumerate(ratios, 1)
        ]

    found = cost.compared([start(1.1, 1.1, 1.1), start(1.1, 1.1, 1.1)], lambda run: run["cpu"])
    assert (round(found["on"]), found["off"], found["more"], found["interval"]) == (220, 200, 0.1, [0.1, 0.1])
    noisy = cost.compared([start(1.1, 3.0, 1.0), start(1.1, 1.1, 0.2)], lambda run: run["cpu"])
    assert (noisy["more"], noisy["interval"]) == (0.1, [0.1, 0.1]), "an outlier of a start changes nothing"
    wide = cost.compared([start(1.1), start(1.3)], lambda run: run["cpu"])
    assert wide["interval"][0] < wide["more"] < wide["interval"][1]


def test_figures_of_a_run_are_one_line_of_the_report(cost: Any) -> None:
    report = {"starts": [{"export_ms": 1.5, "pairs": [{"on": {"cpu": 1.0, "p50": 2.0}, "off": {"cpu": 1.0}}]}]}
    text = cost.rows_in_lines(json.dumps(report, indent=2))
    assert json.loads(text) == report
    assert '"on": {"cpu": 1.0, "p50": 2.0}' in text


def test_parts_are_compared_by_their_least_disturbed_blocks(cost: Any) -> None:
    def start(slower: float) -> dict[str, Any]:
        off = [500.0, 500.0, 500.0, 500.0 * slower]
        return {"parts": {"off": off, "recorded": [one + 5 for one in off], "kept": [one + 105 for one in off]}}

    expected = {"off_us": 500.0, "recorded_us": 5.0, "kept_us": 100.0, "share_at_default_rate": 0.014}
    assert cost.cost_of_parts([start(1), start(9), start(2)]) == expected
