"""Charts of the report, as PNG beside it, drawn from its JSON alone. Needs altair and vl-convert (the extra `plot`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import altair as alt

from scenarios.claims import OURS

Chart = Any  # of altair's, which are many classes
_GREY = ["#4c78a8", "#72b7b2", "#54a24b", "#b279a2", "#9d755d", "#bab0ac", "#eeca3b", "#ff9da6"]
_OURS_COLOUR = "#e45756"


def draw_charts(report: dict[str, Any], folder: Path) -> dict[str, str]:
    """Draw every chart whose scenario is in the report, and return scenario → file name."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {}
    for name, draw in _CHARTS.items():
        series = report["scenarios"].get(name, {}).get("series")
        if series:
            drawn[name] = f"scheduling-{name}.png"
            chart = draw(series).configure_view(stroke="#ddd").configure_title(anchor="start", fontSize=12)
            chart.save(str(folder / drawn[name]), format="png", ppi=90)
    return drawn


def _violations(series: dict[str, Any]) -> Chart:
    """Draw S3: violations over load."""
    rows = [
        {"policy": policy, "load": float(load), "violations_percent": 100 * value}
        for policy, curve in series["violations"].items()
        for load, value in curve.items()
    ]
    base = alt.Chart(alt.InlineData(values=rows)).encode(
        x=alt.X("load:Q", title="load, multiples of EDF's capacity", scale=alt.Scale(domain=[0.4, 2.3])),
        y=alt.Y("violations_percent:Q", title="deadlines missed, %", scale=alt.Scale(domain=[0, 100])),
        color=_colour({row["policy"] for row in rows}),
    )
    return alt.layer(base.mark_line(), base.mark_point(filled=True, size=50)).properties(
        width=520, height=280, title="Azure code lengths, QoServe's three classes, an hour"
    )


def _synthetic_service(series: dict[str, Any]) -> Chart:
    """Draw S1: service over time, two settings above each other."""
    return alt.vconcat(
        _service(series["two"], "Two tenants at 1.5 and 3 requests/s"),
        _service(series["weights"], "Weights 1:2:3:4 (service ÷ weight)"),
    ).resolve_scale(color="independent")


def _real_service(series: dict[str, Any]) -> Chart:
    """Draw S2: service over time of the tenants with the most requests."""
    return _service(series["real"], "vtc_lmsys_real: the twelve tenants with the most requests")


def _service(by_policy: dict[str, Any], title: str) -> Chart:
    rows = [
        {"policy": policy, "tenant": tenant, "at_s": at_s, "service": value / 1000}
        for policy, over_time in by_policy.items()
        for tenant, values in over_time["service"].items()
        for at_s, value in zip(over_time["at_s"], values, strict=True)
    ]
    order = [OURS, *(policy for policy in by_policy if policy != OURS)]
    crowded = len({row["tenant"] for row in rows}) > 10
    lines = (
        alt.Chart(alt.InlineData(values=rows))
        .mark_line(strokeWidth=1.5)
        .encode(
            x=alt.X("at_s:Q", title="time, s"),
            y=alt.Y("service:Q", title="service, thousand tokens"),
            color=alt.Color(
                "tenant:N", title="tenant", scale=alt.Scale(scheme="tableau20" if crowded else "tableau10")
            ),
        )
        .properties(width=220, height=200)
    )
    return lines.facet(column=alt.Column("policy:N", sort=order, title=None)).properties(title=title)


def _attainment(series: dict[str, Any]) -> Chart:
    """Draw S5: SLO attainment by class and policy, for the first seed."""
    rows = [
        {"policy": policy, "class": name, "attained_percent": 100 * row["attainment"]}
        for policy, classes in series.items()
        for name, row in classes.items()
    ]
    order = [OURS, *(policy for policy in series if policy != OURS)]
    base = alt.Chart(alt.InlineData(values=rows)).encode(
        x=alt.X("policy:N", sort=order, title=None, axis=alt.Axis(labelAngle=-35)),
        y=alt.Y("attained_percent:Q", title="SLO attainment, %", scale=alt.Scale(domain=[0, 100])),
    )
    bars = base.mark_bar().encode(color=_colour(set(order), legend=None))
    labels = base.mark_text(dy=-6, fontSize=9).encode(text=alt.Text("attained_percent:Q", format=".0f"))
    return (
        alt.layer(bars, labels)
        .properties(width=230, height=220)
        .facet(column=alt.Column("class:N", sort=["priority", "standard", "batch"], title=None))
        .properties(title="Twice the capacity: attainment, the rejected in the denominator")
    )


def _colour(policies: set[str], **settings: Any) -> alt.Color:
    """Return the colours: ours in red, the others muted."""
    order = [OURS, *sorted(policies - {OURS})]
    colours = [_OURS_COLOUR, *_GREY][: len(order)]
    return alt.Color("policy:N", sort=order, scale=alt.Scale(domain=order, range=colours), **settings)


_CHARTS: dict[str, Callable[[dict[str, Any]], Chart]] = {
    "S1": _synthetic_service,
    "S2": _real_service,
    "S3": _violations,
    "S5": _attainment,
}
