"""Frames and sentences of a contract check's result."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from moiety_dashboard import charts
from moiety_dashboard.frames import contracts


def run(service_class: str, replicas: int, tenant: float, missed: list[str], **attainment: float) -> dict[str, Any]:
    return {
        "service_class": service_class,
        "replicas": replicas,
        "attainment": attainment,
        "tenant_attainment": tenant,
        "missed": missed,
    }


RESULT: dict[str, Any] = {
    "verdict": "needs_more",
    "terms": {"service_class": "standard"},
    "replicas": 2,
    "replicas_needed": 3,
    "classes": ["flex"],
    "before": {"standard": 0.999, "flex": 1.0},
    "runs": [
        run("standard", 2, 0.6, ["standard", "contract"], standard=0.9, flex=1.0),
        run("standard", 3, 1.0, [], standard=0.998, flex=1.0),
    ],
}


def test_the_first_run_is_compared_with_the_traffic_before_it() -> None:
    frame = contracts.attainment_frame(RESULT)
    assert list(frame["class"]) == ["flex", "standard", contracts.NEW_TENANT]
    assert list(frame["with"]) == [1.0, 0.9, 0.6] and list(frame["state"]) == ["attained", "missed", "missed"]
    assert list(frame["before"])[:2] == [1.0, 0.999] and pd.isna(frame["before"][2])
    sides = contracts.sides_frame(RESULT)
    assert len(sides) == 5 and set(sides["side"]) == set(contracts.SIDES)
    inks = dict.fromkeys(frame["class"], "#000000")
    drawn = str(charts.sides(sides, charts.Figure("attainment", "share", ".1%"), inks, contracts.SIDES).to_dict())
    assert all(name in drawn for name in contracts.SIDES)


def test_every_run_has_a_row() -> None:
    frame = contracts.runs_frame(RESULT)
    assert list(frame["run"]) == ["standard, 2 replicas", "standard, 3 replicas"]
    assert frame["missed"][0] == "standard, new tenant" and pd.isna(frame["missed"][1])
    assert list(frame["of standard"]) == [0.9, 0.998]
    assert list(frame["state"]) == ["does not carry it", "carries the tenant"]


def test_without_recent_traffic_only_the_tenant_has_figures() -> None:
    alone = {**RESULT, "before": {}, "runs": [run("standard", 1, 1.0, [])]}
    assert list(contracts.attainment_frame(alone)["class"]) == [contracts.NEW_TENANT]
    assert list(contracts.sides_frame(alone)["side"]) == [contracts.SIDES[1]]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "2 replicas do not carry the tenant in standard; it needs 3 replicas or the class flex."),
        ({"replicas_needed": None}, "2 replicas do not carry the tenant in standard; it needs the class flex."),
        ({"verdict": "accepted", "replicas": 1}, "1 replica carries the tenant in standard."),
        ({"verdict": "refused"}, "neither 16 replicas nor a lower class than standard carry the tenant."),
    ],
)
def test_the_verdict_says_what_to_add(changes: dict[str, Any], words: str) -> None:
    assert contracts.verdict_in_words({**RESULT, **changes}, 16) == words


def test_an_accepted_tenant_that_misses_in_a_burst_gets_a_warning() -> None:
    burst = run("standard", 2, 0.75, ["contract", "standard"], standard=0.8, flex=1.0)
    accepted = {**RESULT, "verdict": "accepted", "burst_factor": 1.5, "burst": burst}
    warning = contracts.burst_warning(accepted)
    assert warning is not None
    assert warning.startswith("With 1.5 times the recent requests SLOs are missed: new tenant 75.0%, standard 80.0%.")
    for without in (None, run("standard", 2, 1.0, [], standard=1.0)):
        assert contracts.burst_warning({**accepted, "burst": without}) is None


def test_only_models_of_healthy_engines_are_offered() -> None:
    engines = [
        {"healthy": True, "card": {"model": "b"}},
        {"healthy": True, "card": {"model": "a"}},
        {"healthy": False, "card": {"model": "gone"}},
        {"healthy": True, "card": None},
    ]
    assert contracts.models_of(engines) == ["a", "b"]
