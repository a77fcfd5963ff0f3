"""Charts of a comparison, as a PNG or an HTML page that needs no network. Altair and vl-convert are optional."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from moiety_engine.errors import InvalidConfig

FORMS = (".png", ".html")
_MAX_TENANTS = 12  # in the chart of service over time: those with the most requests
_WIDTH = 260


def check_plot(path: Path) -> None:
    """Check before a long run that the plot can be drawn. Raises InvalidConfig."""
    if path.suffix.lower() not in FORMS:
        raise InvalidConfig(f"--plot must name a {' or '.join(FORMS)} file, not {path.name}")
    if find_spec("altair") is None or find_spec("vl_convert") is None:
        raise InvalidConfig('plots need altair and vl-convert-python; run: pip install "moiety[plot]"')
    if not path.absolute().parent.is_dir():
        raise InvalidConfig(f"the folder {path.absolute().parent} for the plot does not exist")


def draw(policies: Mapping[str, Mapping[str, Any]], classes: list[str], title: str, path: Path) -> None:
    """Draw attainment and TTFT by class (in this order) and policy, and every tenant's service over time."""
    import altair  # noqa: PLC0415 - optional and heavy

    order = list(policies)
    attainment = _bars(altair, _attainment_rows(policies), order, classes)
    ttft = _percentiles(altair, _ttft_rows(policies), order, classes)
    service = _lines(altair, _service_rows(policies), order)
    chart = altair.vconcat(attainment, ttft, service, title=title).resolve_scale(
        color="independent", shape="independent"
    )
    chart = chart.configure_view(continuousWidth=_WIDTH).configure_title(anchor="start")
    if path.suffix.lower() == ".png":
        chart.save(str(path), format="png", ppi=144)
    else:
        chart.save(str(path), format="html", inline=True)


def _attainment_rows(policies: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"policy": policy, "class": name, "attainment_percent": 100 * row["attainment"]}
        for policy, figures in policies.items()
        for name, row in figures["classes"].items()
    ]


def _ttft_rows(policies: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"policy": policy, "class": name, "percentile": percentile, "ttft_s": max(1e-3, value)}
        for policy, figures in policies.items()
        for name, row in figures["classes"].items()
        for percentile, value in row["ttft_s"].items()
        if value is not None
    ]


def _service_rows(policies: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for policy, figures in policies.items():
        tenants = figures["tenants"]
        greatest = sorted(tenants, key=lambda name: -tenants[name]["num"])[:_MAX_TENANTS]
        for name in greatest:
            tenant = tenants[name]
            rows += [
                {"policy": policy, "tenant": name, "at_s": at_s, "service": service / tenant["weight"] / 1000}
                for at_s, service in zip(tenant["service_at_s"], tenant["service"], strict=True)
            ]
    return rows


def _bars(altair: Any, rows: list[dict[str, Any]], order: list[str], classes: list[str]) -> Any:
    base = altair.Chart(altair.Data(values=rows)).encode(
        x=altair.X("policy:N", sort=order, title=None, axis=altair.Axis(labelAngle=-30)),
        y=altair.Y("attainment_percent:Q", title="SLO attainment, %", scale=altair.Scale(domain=[0, 100])),
    )
    bars = base.mark_bar().encode(color=altair.Color("policy:N", sort=order, legend=None))
    labels = base.mark_text(dy=-6).encode(text=altair.Text("attainment_percent:Q", format=".1f"))
    return (
        altair.layer(bars, labels)
        .properties(width=_WIDTH, height=180)
        .facet(column=altair.Column("class:N", sort=classes, title=None))
    )


def _percentiles(altair: Any, rows: list[dict[str, Any]], order: list[str], classes: list[str]) -> Any:
    base = altair.Chart(altair.Data(values=rows)).encode(
        x=altair.X("policy:N", sort=order, title=None, axis=altair.Axis(labelAngle=-30)),
        y=altair.Y("ttft_s:Q", title="time to first token, s", scale=altair.Scale(type="log")),
    )
    line = base.mark_line(color="#bbb").encode(detail="policy:N")
    points = base.mark_point(filled=True, size=70).encode(
        color=altair.Color("percentile:N", title="TTFT percentile", sort=["p50", "p90", "p99"]),
        shape=altair.Shape("percentile:N", sort=["p50", "p90", "p99"], legend=None),
    )
    return (
        altair.layer(line, points)
        .properties(width=_WIDTH, height=180)
        .facet(column=altair.Column("class:N", sort=classes, title=None))
    )


def _lines(altair: Any, rows: list[dict[str, Any]], order: list[str]) -> Any:
    return (
        altair.Chart(altair.Data(values=rows))
        .mark_line(strokeWidth=1.5)
        .encode(
            x=altair.X("at_s:Q", title="time, s"),
            y=altair.Y("service:Q", title="service ÷ weight, thousand tokens"),
            color=altair.Color("tenant:N", title="tenant", scale=altair.Scale(scheme="tableau20")),
        )
        .properties(width=_WIDTH, height=220)
        .facet(column=altair.Column("policy:N", sort=order, title=None))
    )
