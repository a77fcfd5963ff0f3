"""The figures of a load run, against answers made up by hand."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moiety_platform.bench.load import BenchAnswer, BenchTarget
from moiety_platform.bench.report import (
    SLO_TARGETS,
    percentile,
    slo_targets_of,
    spread_ms,
    summarise,
    time_per_token_s,
)
from moiety_platform.cli.bench import print_figures
from moiety_wire.class_targets import BadClassTargets, read_classes
from moiety_wire.classes import CPU_SLOS
from moiety_workload.request import TraceRequest


def answer(
    first_s: float | None = 0.1, last_s: float = 1.1, tokens: int = 11, name: str = "standard", error: str | None = None
) -> BenchAnswer:
    request = TraceRequest(0.0, "a", 1000, tokens, name)
    return BenchAnswer(request, 0.0, first_s, last_s, last_s, 0 if error else tokens, 1000, error)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 100))
def test_a_percentile_lies_between_the_least_and_the_greatest(values: list[float], percent: float) -> None:
    assert min(values) <= percentile(values, percent) <= max(values)


def test_percentiles_are_interpolated() -> None:
    assert percentile([1, 2, 3, 4], 50) == 2.5
    assert percentile([10, 0], 90) == pytest.approx(9)


def test_nothing_measured_is_null_and_not_zero() -> None:
    assert spread_ms([None, None]) == {"p50": None, "p90": None, "p99": None}


def test_time_per_token_leaves_the_first_out() -> None:
    assert time_per_token_s(answer(0.1, 1.1, 11)) == pytest.approx(0.1)
    assert time_per_token_s(answer(tokens=1)) is None


@pytest.mark.parametrize(
    ("made", "kept"),
    [
        (answer(2.1, 3.0), True),
        (answer(2.3, 3.0), False),  # 2 s + 0.2 s for 1,000 prompt tokens
        (answer(0.1, 1.2), False),  # 110 ms a token
        (answer(0.1, 1.1, error="overloaded"), False),
        (answer(None), False),
        (answer(0.1, 599, 2, "flex"), True),
        (answer(0.1, 601, 2, "flex"), False),
        (answer(0.55, 0.6, name="priority"), True),
        (answer(0.65, 0.7, name="priority"), False),
    ],
)
def test_a_promise_is_kept_or_not(made: BenchAnswer, kept: bool) -> None:
    assert SLO_TARGETS[made.request.service_class].is_attained(made) is kept


def test_the_first_message_of_each_error_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    failed = [answer(error="overloaded"), answer(error="overloaded"), answer(error="client_timeout")]
    for one, message in zip(failed, ("too many requests", "later", ""), strict=True):
        one.message = message
    figures = summarise([answer(0.1, 1.0), *failed])
    assert figures["error_messages"] == {"overloaded": "too many requests", "client_timeout": ""}
    print_figures(figures)
    shown = capsys.readouterr().out
    assert "2 × overloaded: too many requests" in shown and "1 × client_timeout\n" in shown


def test_goodput_counts_only_what_came_in_time_and_errors_are_counted_by_code() -> None:
    figures = summarise(
        [answer(0.1, 1.0), answer(5.0, 10.0), answer(error="overloaded"), answer(0.1, 1.0, name="flex")]
    )
    assert (figures["requests"], figures["completed"], figures["errors"]) == (4, 3, 1)
    assert figures["errors_by_code"] == {"overloaded": 1}
    assert figures["output_tokens_per_s"] == pytest.approx(3.3)
    assert figures["goodput_tokens_per_s"] == pytest.approx(2.2)
    assert figures["classes"]["standard"]["attainment"] == pytest.approx(1 / 3, abs=1e-6)
    assert figures["classes"]["flex"]["attainment"] == 1


def test_answers_are_judged_by_the_classes_of_a_gateway(tmp_path: Path) -> None:
    path = tmp_path / "classes.json"
    rows = [{"name": one.name, "price_factor": 1.0, **msgspec.to_builtins(one)} for one in CPU_SLOS]
    for content in ({"data": rows}, rows):
        path.write_text(json.dumps(content))
        targets = slo_targets_of(read_classes(path))
        slow = answer(3.0, 4.5)  # 150 ms a token
        assert summarise([slow], targets)["classes"]["standard"]["attainment"] == 1
        assert summarise([slow])["classes"]["standard"]["attainment"] == 0
        assert targets["flex"] == SLO_TARGETS["flex"]
    for wrong, message in (
        ("3", "neither an object nor a list"),
        ('{"data": [3]}', "a class with a name"),
        ("[{}]", "a name"),
    ):
        path.write_text(wrong)
        with pytest.raises(BadClassTargets, match=message):
            read_classes(path)


def requests_of(*tenants: str) -> list[TraceRequest]:
    return [TraceRequest(float(index), tenant, 1, 1, "standard") for index, tenant in enumerate(tenants)]


@pytest.mark.parametrize(
    ("named", "shared", "tenants", "used"),
    [
        ({}, "abc", ["one"] * 4, "abca"),  # no trace: one tenant, whose requests use all keys in turn
        ({}, "abc", ["one", "two", "one", "one", "two"], "abcab"),
        ({}, "a", ["one", "two"], "aa"),
        ({}, "ab", ["one", "two", "three", "one"], "abaa"),
        ({"one": "x"}, "ab", ["one", "two", "two", "one"], "xabx"),
        ({"one": "x", "two": "y"}, "xy", ["two", "one"], "yx"),
    ],
)
def test_every_key_is_used_and_a_tenant_of_the_trace_keeps_its_own(
    named: dict[str, str], shared: str, tenants: list[str], used: str
) -> None:
    target = BenchTarget("http://gateway", named, list(shared), "model", (1,), 1.0)
    assert "".join(target.assign_keys(requests_of(*tenants))) == used
