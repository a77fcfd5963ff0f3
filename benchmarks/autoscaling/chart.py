"""Chart of a report: pool sizes, SLO attainment and arrivals over time. Needs altair and vl-convert (extra `plot`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import altair as alt

WIDTH, HEIGHT = 460, 130


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Draw one column for each scenario."""
    columns = [_column(name, one) for name, one in report["scenarios"].items()]
    alt.hconcat(*columns).configure_view(stroke="#ddd").save(str(path), format="png", ppi=90)


def _column(name: str, scenario: Mapping[str, Any]) -> Any:
    sizes = [
        {"minute": time_s / 60, "devices": wanted, "variant": variant}
        for variant, one in scenario["variants"].items()
        for time_s, wanted, _ in one["sizes"]
    ]
    kept = [
        {"minute": time_s / 60, "kept": 100 * share, "variant": variant}
        for variant, one in scenario["variants"].items()
        for time_s, share in one["kept"]
    ]
    arrivals = [{"minute": at, "arrivals": count} for at, count in enumerate(scenario["arrivals_per_minute"])]
    minute = alt.X("minute:Q", title=None)
    colour = alt.Color("variant:N", title=None, sort=list(scenario["variants"]))
    steps = _of(sizes).mark_line(interpolate="step-after").encode(minute, alt.Y("devices:Q"), colour)
    attainment = _of(kept).mark_line().encode(minute, alt.Y("kept:Q", title="SLO attainment, %"), colour)
    load = (
        _of(arrivals)
        .mark_area(color="#bab0ac")
        .encode(alt.X("minute:Q"), alt.Y("arrivals:Q", title="arrivals a minute"))
    )
    return alt.vconcat(*(one.properties(width=WIDTH, height=HEIGHT) for one in (steps, attainment, load))).properties(
        title=f"{name}: {scenario['trace'].rpartition('/')[2]}"
    )


def _of(rows: list[dict[str, Any]]) -> Any:
    return alt.Chart(alt.InlineData(values=rows))
