"""Picture of a fleet's stages. Needs altair and vl-convert (extra `plot`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import altair as alt

WIDTH, HEIGHT = 330, 230
CORES = {
    "gateways": "gateways",
    "database": "PostgreSQL",
    "load": "load generator",
    "engines": "engines",
    "other": "others on the machine",
}


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Draw answers, latency, cores and statements over the offered rate; of a repeated stage, the last try."""
    stages = list({one["offered_per_s"]: one for one in report["stages"]}.values())
    answered = [{"offered": one["offered_per_s"], "answered": one["answered_per_s"]} for one in stages]
    latency = [
        {"offered": one["offered_per_s"], "ms": one["latency_ms"][name], "percentile": name}
        for one in stages
        for name in one["latency_ms"]
    ]
    cores = [
        {"offered": one["offered_per_s"], "cores": used, "part": CORES[name]}
        for one in stages
        for name, used in _parts(one).items()
    ]
    statements = [
        {"offered": one["offered_per_s"], "per second": one[name], "kind": name.removesuffix("_per_s")}
        for one in stages
        for name in ("statements_per_s", "commits_per_s")
    ]
    offered = alt.X("offered:Q", title="offered requests per second")
    charts = [
        _of(answered).mark_line(point=True).encode(offered, alt.Y("answered:Q", title="answered per second")),
        _of(latency)
        .mark_line(point=True)
        .encode(
            offered,
            alt.Y("ms:Q", title="latency, ms", scale=alt.Scale(type="log")),
            alt.Color("percentile:N", title=None),
        ),
        _of(cores)
        .mark_area()
        .encode(
            offered, alt.Y("cores:Q", title="cores in use"), alt.Color("part:N", title=None, sort=[*CORES.values()])
        ),
        _of(statements)
        .mark_line(point=True)
        .encode(offered, alt.Y("per second:Q", title="SQL per second"), alt.Color("kind:N", title=None)),
    ]
    sized = [chart.properties(width=WIDTH, height=HEIGHT) for chart in charts]
    halves = [alt.hconcat(*two).resolve_scale(color="independent") for two in (sized[:2], sized[2:])]
    rows = alt.vconcat(*halves).resolve_scale(color="independent")
    settings = report["settings"]
    title = f"{settings['gateways']} gateways, {settings['engines']} engines, {settings['tenants']} tenants"
    rows.properties(title=title).configure_view(stroke="#ddd").save(str(path), format="png", ppi=90)


def _parts(stage: Mapping[str, Any]) -> dict[str, float]:
    return {**stage["cores"], "other": stage["other_cores"]}


def _of(rows: list[dict[str, Any]]) -> Any:
    return alt.Chart(alt.InlineData(values=rows))
