"""Experts' load as frames and a map, from answers written by hand."""

from __future__ import annotations

from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import streamlit as st

from moiety_dashboard import charts, session
from moiety_dashboard.formatting import NO_VALUE, in_bytes
from moiety_dashboard.frames import experts
from moiety_dashboard.views import experts as view


def model_load(picks: list[list[int]], **changed: Any) -> dict[str, Any]:
    usual = {
        "model": "m", "layers": [1, 3], "num_experts": 4, "experts_per_token": 2, "picks": picks, "tokens": 20,
        "balancedness_by_layer": [1.0, 0.25], "active_experts_by_layer": [2.5, 1.0], "minutes": [], "tenants": [],
    }  # fmt: skip
    return usual | changed


def test_an_even_layer_is_one_colour_whatever_its_load_and_an_uneven_one_is_not() -> None:
    even = experts.cells(model_load([[10, 10, 10, 10], [3000, 3000, 3000, 3000]]))
    assert set(even["times_mean"]) == {1.0}
    cells = experts.cells(model_load([[10, 10, 10, 10], [40, 0, 0, 0]]))
    assert cells[cells["layer"] == 3]["times_mean"].tolist() == [4, 0, 0, 0]
    assert experts.hottest(cells) == {"layer": 3, "expert": 0, "tokens": 40, "times_mean": 4}
    encoded = charts.load_map(cells, 2).to_dict()["encoding"]["color"]["scale"]
    assert encoded["domain"] == [-2, 0, 2]  # a quarter of the mean, the mean, four times the mean: never the data's own
    nothing = experts.cells(model_load([[0] * 4, [0] * 4]))
    assert nothing["times_mean"].isna().all()
    assert experts.hottest(nothing) is None


def test_layers_minutes_and_tenants_of_a_model_are_told_as_they_are() -> None:
    minute = {"at": "2026-01-01T12:00:00Z", "balancedness": 0.4, "balancedness_by_layer": [0.9, None, 0.2]}
    model = model_load(
        [[10, 10, 10, 10], [40, 0, 0, 0]],
        minutes=[minute, minute | {"balancedness_by_layer": [None, None]}],
        tenants=[
            {"tenant_id": "a", "tenant_name": "acme", "tokens": 15},
            {"tenant_id": None, "tenant_name": None, "tokens": 5},
        ],
    )
    layers = experts.layers_frame(model)
    assert layers["unused"].tolist() == [0, 3]
    assert layers["times_mean"].tolist() == [1, 4]
    assert experts.tenants_frame(model).to_dict("list") == {
        "tenant": ["acme", "all others"], "tokens": [15, 5], "share": [0.75, 0.25],
    }  # fmt: skip
    told = experts.evenness_frame(model)
    assert dict(zip(told["series"], told["balancedness"], strict=True)) == {
        experts.ALL: 0.4, experts.MOST: 0.9, experts.LEAST: 0.2,
    }  # fmt: skip
    assert experts.is_thin(model)
    assert not experts.is_thin(model | {"tokens": 200})


def test_a_plan_names_the_experts_that_are_in_several_places_the_most_first() -> None:
    plan = {"layers": [3], "by_layer_before": [0.5], "by_layer_after": [1.0], "replicas": [[1, 2, 3, 1]]}
    assert experts.plan_frame(plan).iloc[0].to_dict() == {
        "layer": 3, "before": 0.5, "after": 1.0, "replicated": 2, "replicas": "2 ×3, 1 ×2",
    }  # fmt: skip


def test_expert_bytes_of_tenants_are_ranked_and_a_tenant_without_any_is_left_out() -> None:
    def group(name: str, read: int, moved: int, tokens: int) -> dict[str, Any]:
        totals = {"expert_read_bytes": read, "expert_moved_bytes": moved, "prompt_tokens": 9, "cached_tokens": 9}
        return {"group": {"tenant_id": name, "tenant_name": name}, "totals": totals | {"output_tokens": tokens}}

    frame = experts.bytes_frame([group("a", 10**19, 5, 0), group("none", 0, 0, 4), group("b", 3 * 10**19, 0, 100)])
    assert frame["tenant"].tolist() == ["b", "a"]
    assert frame["share"].tolist() == [0.75, 0.25]
    assert frame["per_token"].isna().tolist() == [False, True]
    assert frame["per_token"][0] == 3 * 10**17
    assert frame["moved"].tolist() == [0, 5]
    assert experts.bytes_frame([]).empty


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (None, NO_VALUE), (0, "0 B"), (999.4, "999 B"), (999.6, "1.0 kB"), (999_950, "1.0 MB"), (4.5e12, "4.5 TB"),
        (3.3e18, "3.3 EB"), (5e21, "5,000.0 EB"),
    ],
)  # fmt: skip
def test_bytes_are_written_with_units_up_to_exabytes(count: float | None, shown: str) -> None:
    assert in_bytes(count) == shown


class RecordingClient:
    """Admin API without usage, which records the parameters of its requests."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, Any]]] = []

    def get(self, path: str, **parameters: Any) -> Any:
        self.requests.append((path, parameters))
        return SimpleNamespace(data={"data": []})


def test_expert_bytes_are_queried_by_whole_hours() -> None:
    client: Any = RecordingClient()
    view.draw_bytes(client)
    ((path, parameters),) = client.requests
    since, until = (datetime.fromisoformat(parameters[name]) for name in ("since", "until"))
    assert (path, until - since) == ("/usage", timedelta(hours=24))
    for moment in (since, until):
        assert (moment.minute, moment.second, moment.microsecond) == (0, 0, 0)


@pytest.mark.parametrize(("tenant_id", "num_parts"), [(None, 2), ("ten_1", 1)])
def test_expert_bytes_refresh_once_a_minute_and_only_for_administrators_of_all_tenants(
    monkeypatch: pytest.MonkeyPatch, tenant_id: str | None, num_parts: int
) -> None:
    monkeypatch.setattr(st, "session_state", {session.CALLER: {"tenant_id": tenant_id, "may": []}})
    parts: dict[Any, float] = {}
    page: Any = SimpleNamespace(
        settings=SimpleNamespace(refresh_s=3.0), live=lambda draw, *, slower: parts.update({draw: slower * 3.0})
    )
    view.draw(page)
    assert len(parts) == num_parts
    assert parts.get(view.draw_bytes) == (60.0 if tenant_id is None else None)
    assert parts[view.draw_live] == 6.0
