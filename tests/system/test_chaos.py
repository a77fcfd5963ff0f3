"""The judge of `make chaos` detects faults; on request, a short run of all faults."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TENANT_LIMITS = {
    ("tenant", "tokens_per_minute"): 60,
    ("project", "requests_per_minute"): 4,
    ("key", "concurrent_requests"): 2,
}


@pytest.fixture
def chaos(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The judge, and what makes a request that a client has sent."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from chaos import judge
    from chaos.load import Asked, Outcome, Tenant

    class Chaos:
        of = judge
        tenant = Tenant("t", "key", {"tenant": "ten_1"}, "priority")
        tight = Tenant("tight", "key", {"tenant": "ten_2"}, "standard", TENANT_LIMITS)

        @staticmethod
        def asked(
            number: int = 0,
            outcome: str = "whole",
            tenant: Any = tenant,
            sent_s: float = 0.0,
            end_s: float = 1.0,
            **more: Any,
        ) -> Any:
            given = {"status": 200, "answer_id": f"row-{number}", "output_tokens": 5, "first_s": sent_s + 0.1} | more
            made = Asked(f"c-{number}", tenant, "scripted", True, sent_s, sent_s=sent_s, end_s=end_s)
            made.outcome = Outcome(outcome)
            for name, value in given.items():
                setattr(made, name, value)
            return made

    return Chaos


def row(number: int = 0, tokens: int = 5, outcome: str = "length") -> dict[str, Any]:
    return {
        f"row-{number}": {
            "outcome": outcome, "output_tokens": tokens, "prompt_tokens": 5, "error_code": None, "http_status": 200
        }
    }  # fmt: skip


def test_a_request_that_was_answered_and_booked_once_is_right(chaos: Any) -> None:
    assert chaos.of.one_outcome_each([chaos.asked()], row(), {"c-0": ["row-0"]}, []) == []


@pytest.mark.parametrize(
    ("rows", "joins", "complaint"),
    [
        ({}, {}, "is not booked"),
        (row() | row(1), {"c-0": ["row-0", "row-1"]}, "more than once"),
        (row(tokens=4), {}, "has 5 tokens; booked: length, 4"),
        (row(outcome="failed"), {}, "booked: failed"),
        (row() | row(7), {}, "of requests that no client has sent"),
    ],
)
def test_billing_that_differs_from_answers_is_detected(
    chaos: Any, rows: Any, joins: dict[str, Any], complaint: str
) -> None:
    (found,) = chaos.of.one_outcome_each([chaos.asked()], rows, joins, [])
    assert complaint in found


def test_a_token_that_came_twice_or_a_line_of_a_batch_that_is_not_booked_is_found(chaos: Any) -> None:
    found = chaos.of.one_outcome_each([chaos.asked(wrong_text=True)], row(), {}, ["row-9"])
    assert [complaint.split(" ", 1)[0] for complaint in found] == ["row-9", "c-0"] and "token twice" in found[1]


def test_a_client_that_left_may_have_a_row_that_it_does_not_know(chaos: Any) -> None:
    left = chaos.asked(outcome="left", answer_id="", status=0)
    assert chaos.of.one_outcome_each([left], row(3), {}, []) == []
    (found,) = chaos.of.one_outcome_each([left], row(2) | row(3), {"c-0": ["row-2"]}, [])
    assert "of requests that no client has sent" in found


def test_limits_are_held_to_what_was_used_within_spans_of_time(chaos: Any) -> None:
    def overspent(num: Any, apart_s: Any, quotas: Sequence[Any] = ()) -> Any:
        asked = [chaos.asked(n, tenant=chaos.tight, sent_s=n * apart_s, end_s=n * apart_s + 1) for n in range(num)]
        rows = {name: one for n in range(num) for name, one in row(n).items()}
        return chaos.of.overspent(quotas, asked, rows, [chaos.tight])

    assert overspent(12, 15.0) == []
    assert overspent(8, 1.1)[0].startswith("requests_per_minute of tight: 1 more than 4")
    assert any(one.startswith("tokens_per_minute") for one in overspent(20, 1.1))
    assert any(one.startswith("concurrent_requests of tight: 3 of 2") for one in overspent(3, 0.2))
    (found,) = overspent(0, 1, [{"kind": "tokens_per_day", "scope_id": "s", "used": 11, "cap": 10}])
    assert found == "tokens_per_day of s: 11 of 10"


def test_promises_count_outside_of_faults_and_what_follows_them(chaos: Any) -> None:
    windows = [chaos.of.Window("x", begin_s=100.0, end_s=110.0)]
    kept, late = chaos.asked(sent_s=10, end_s=10.5, first_s=10.2), chaos.asked(sent_s=50, end_s=90, first_s=80)
    broken = chaos.asked(sent_s=105, end_s=119, outcome="cut")
    assert chaos.of.attainment([kept, broken], windows) == (1.0, 1)
    assert chaos.of.attainment([kept, late, broken], windows) == (0.5, 2)


def test_a_fault_is_recovered_from_once_nobody_suffers_and_all_is_whole(chaos: Any) -> None:
    asked = [chaos.asked(sent_s=second, end_s=second + 1) for second in (101, 112, 130)]
    asked.append(chaos.asked(sent_s=114, end_s=115, outcome="no_answer", status=0))
    window = chaos.of.Window("x", begin_s=100.0, end_s=110.0, next_s=140.0, whole_after_s=5.0)
    found = chaos.of.row_of(window, asked)
    assert found["recovered"] and found["last_failure_after_s"] == 4.0 and found["after"]["requests"] == 3
    late = chaos.asked(sent_s=121, end_s=122, outcome="refused", status=503)
    assert not chaos.of.row_of(window, [*asked, late])["recovered"]


@pytest.mark.chaos
def test_three_faults_leave_nothing_behind(tmp_path: Path) -> None:
    output = tmp_path / "chaos.json"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "benchmarks"), *sys.path])}
    command = [sys.executable, "-m", "chaos", "--short", "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert output.exists(), done.stderr
    report = json.loads(output.read_text())
    unhurried = {name: held for name, held in report["verdict"].items() if name not in BUSY}
    assert unhurried == dict.fromkeys(unhurried, True), report


BUSY = ("priority_slo_attained", "recovered_in_10_s")  # depend on the load of the machine
