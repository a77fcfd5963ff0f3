"""Charts: legends that fit, and axes whose zero has no prefix."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pandas as pd
import pytest

from moiety_dashboard import charts, waterfall
from moiety_dashboard.frames.traces import GATEWAY

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
CLASSES = ["priority", "standard", "flex", "batch"]
USERS = [f"user-{number}@example.com" for number in range(5)]


@pytest.mark.parametrize(
    ("names", "width_px", "columns"),
    [
        (CLASSES, charts.HALF_PX, 4),
        (USERS, charts.HALF_PX, 2),
        (USERS, charts.WHOLE_PX, 3),
        (["x" * 200, "y" * 200], charts.HALF_PX, 1),
        ([], charts.HALF_PX, 1),
    ],
)
def test_a_legend_has_as_many_columns_as_fit(names: list[str], width_px: int, columns: int) -> None:
    assert charts.legend_of(names, width_px).to_dict()["columns"] == columns


def test_the_zero_of_an_axis_with_prefixes_has_none() -> None:
    frame = pd.DataFrame({"slot": [NOON], "class": ["flex"], "tokens": [4000.0]})
    span = charts.Span(NOON, NOON + timedelta(hours=1), timedelta(minutes=1))
    colours = {"flex": "#000000"}

    def axis_of(figure: charts.Figure) -> dict[str, object]:
        drawn = charts.stacked(frame, figure, "class", colours, span).to_dict()
        axis: dict[str, object] = drawn["encoding"]["y"]["axis"]
        return axis

    assert axis_of(charts.Figure("tokens", "tokens"))["labelExpr"] == "datum.value == 0 ? '0' : datum.label"
    ranked = charts.ranked(frame.assign(share=1.0), "class", "tokens", "share").to_dict()
    assert ranked["layer"][0]["encoding"]["x"]["axis"]["labelExpr"] == "datum.value == 0 ? '0' : datum.label"
    assert "labelExpr" not in axis_of(charts.Figure("tokens", "dollars", axis="$,.3~r"))
    assert "labelExpr" not in axis_of(charts.Figure("tokens", "share", ".1%"))


@pytest.mark.parametrize(("is_narrow", "share"), [(False, 0.15), (True, 0.2)])
def test_the_durations_of_the_last_spans_have_space_beside_them(is_narrow: bool, share: float) -> None:
    span = {"row": 0, "label": "chat", "who": GATEWAY, "start_ms": 0.0, "end_ms": 100.0, "duration_ms": 100.0}
    drawn = waterfall.waterfall(pd.DataFrame([span | {"attributes": ""}]), pd.DataFrame(), is_narrow=is_narrow)
    begin, end = drawn.to_dict()["layer"][0]["encoding"]["x"]["scale"]["domain"]
    assert begin == 0 and end >= 100 * (1 + share)


def test_an_axis_of_counts_has_no_parts_of_one_where_nothing_is_counted() -> None:
    figure = charts.Figure("running", "sequences")
    span = charts.Span(NOON, NOON + timedelta(minutes=5), timedelta(0))
    for values, ticks in (([0, 0], [0]), ([0, 3], None)):
        frame = pd.DataFrame({"slot": [NOON, NOON + timedelta(minutes=1)], "engine": "a", "running": values})
        drawn = str(charts.lines(frame, figure, "engine", {"a": "#000000"}, span).to_dict())
        assert ("'values': [0]" in drawn) is (ticks is not None)
