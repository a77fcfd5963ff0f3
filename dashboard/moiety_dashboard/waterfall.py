"""The spans of a trace as bars over time, and the steps of an engine beneath each other's clock. Pure; knows no
page."""

from __future__ import annotations

import altair as alt
import pandas as pd

from moiety_dashboard import colours
from moiety_dashboard.frames.traces import ENGINE, FAILED, GATEWAY, OTHER

ROW_HEIGHT = 25  # pixels
STEPS_HEIGHT = 150
LABEL_WIDTH = 190
WHO = {GATEWAY: "#14a098", ENGINE: "#4c78a8", OTHER: colours.CALM, FAILED: colours.BAD}
EVENTS = {"preempted": "#d64545", "resumed": "#4f9d69", "relegated": "#e0a526", "failed over": "#b279a2"}
MORE_EVENTS = "other events"
PARTS = {"decodes": "#4c78a8", "prompt tokens": "#e1812c"}
LEAST = 0.002  # of the whole width, so that what is short can be seen


def waterfall(bars: pd.DataFrame, events: pd.DataFrame) -> alt.LayerChart:
    """Spans as bars with their durations beside them, and what happened in them as points."""
    until = max(bars["end_ms"].max(), 0.001)
    shown = bars.assign(
        line=[f"{row:04d} {label}" for row, label in zip(bars["row"], bars["label"], strict=True)],
        drawn_ms=bars[["end_ms"]].join(bars["start_ms"] + until * LEAST, rsuffix="_").max(axis=1),
        text=[duration(ms) for ms in bars["duration_ms"]],
    )
    lines = list(shown["line"])
    axis = alt.Axis(
        title=None, labelExpr="slice(datum.label, 5)", labelAlign="left", labelPadding=LABEL_WIDTH, ticks=False,
        labelLimit=LABEL_WIDTH, minExtent=LABEL_WIDTH, maxExtent=LABEL_WIDTH, domain=False, labelOverlap=False,
        labelFontSize=12,
    )  # fmt: skip
    y = alt.Y("line:N", sort=lines, scale=alt.Scale(domain=lines), axis=axis)
    at = alt.Axis(title="ms since the request began", orient="top", tickCount=8, grid=True, domain=False)
    scale = alt.Scale(domain=[0, until * 1.09], nice=False)  # room for the text of what ends last
    inks = {who: ink for who, ink in WHO.items() if who in set(bars["who"])}
    who = alt.Color(
        "who:N", scale=alt.Scale(domain=list(inks), range=list(inks.values())),
        legend=alt.Legend(title=None, orient="bottom"),
    )  # fmt: skip
    told = [
        alt.Tooltip("label:N", title="span"), alt.Tooltip("duration_ms:Q", title="ms", format=",.3f"),
        alt.Tooltip("start_ms:Q", title="from, ms", format=",.3f"), alt.Tooltip("told:N", title="says"),
    ]  # fmt: skip
    drawn = alt.Chart(shown).encode(y=y)
    bar = drawn.mark_bar(height=13, cornerRadius=2).encode(
        x=alt.X("start_ms:Q", scale=scale, axis=at), x2="drawn_ms:Q", color=who, tooltip=told
    )
    text = drawn.mark_text(align="left", dx=5, fontSize=11, color=colours.CALM).encode(x="drawn_ms:Q", text="text:N")
    layers: list[alt.Chart] = [bar, text]
    if not events.empty:
        layers.append(_points(events, y))
    chart: alt.LayerChart = (
        alt.layer(*layers)
        .resolve_scale(color="independent")
        .properties(height=ROW_HEIGHT * len(bars), padding={"left": 0, "right": 4, "top": 0, "bottom": 0})
        .configure_view(stroke=None)
    )
    return chart


def _points(events: pd.DataFrame, y: alt.Y) -> alt.Chart:
    shown = events.assign(
        line=[f"{row:04d} {label}" for row, label in zip(events["row"], events["label"], strict=True)],
        kind=[name if name in EVENTS else MORE_EVENTS for name in events["event"]],
    )
    inks = {**EVENTS, MORE_EVENTS: colours.CALM}
    kinds = [kind for kind in inks if kind in set(shown["kind"])]
    drawn: alt.Chart = (
        alt.Chart(shown)
        .mark_point(shape="diamond", filled=True, size=90, opacity=1, stroke="white", strokeWidth=1)
        .encode(
            x="at_ms:Q",
            y=y,
            color=alt.Color(
                "kind:N", scale=alt.Scale(domain=kinds, range=[inks[kind] for kind in kinds]),
                legend=alt.Legend(title=None, orient="bottom"),
            ),
            tooltip=[
                alt.Tooltip("event:N", title="event"), alt.Tooltip("at_ms:Q", title="at, ms", format=",.3f"),
                alt.Tooltip("told:N", title="says"),
            ],
        )
    )  # fmt: skip
    return drawn


def steps(frame: pd.DataFrame, until_ms: float) -> alt.Chart:
    """What the batch was made of in each step that was looked at, over the request's time."""
    long = frame.assign(**{"prompt tokens": frame["prefill_tokens"]}).melt(
        ["number", "start_ms", "end_ms", "took_ms", "preempted"], list(PARTS), var_name="part", value_name="tokens"
    )
    long = long.assign(drawn_ms=long[["end_ms"]].join(long["start_ms"] + until_ms * 0.006, rsuffix="_").max(axis=1))
    axis = alt.Axis(title="ms since the request began", tickCount=8, grid=False)
    scale = alt.Scale(domain=[0, max(until_ms, 0.001)], nice=False, clamp=True)
    drawn = (
        alt.Chart(long)
        .mark_bar()
        .encode(
            x=alt.X("start_ms:Q", axis=axis, scale=scale),
            x2="drawn_ms:Q",
            y=alt.Y("tokens:Q", title="tokens in the step", stack="zero", axis=alt.Axis(tickCount=4, format="~s")),
            color=alt.Color(
                "part:N", scale=alt.Scale(domain=list(PARTS), range=list(PARTS.values())),
                legend=alt.Legend(title=None, orient="top", symbolType="circle"),
            ),
            tooltip=[
                alt.Tooltip("number:Q", title="step", format=","), alt.Tooltip("part:N", title="of"),
                alt.Tooltip("tokens:Q", title="tokens", format=","),
                alt.Tooltip("took_ms:Q", title="took, ms", format=",.2f"),
                alt.Tooltip("preempted:Q", title="preempted"),
            ],
        )
        .properties(height=STEPS_HEIGHT, padding={"left": 0, "right": 8, "top": 0, "bottom": 0})
    )  # fmt: skip
    configured: alt.Chart = drawn.configure_view(stroke=None)
    return configured


def duration(ms: float) -> str:
    """To three figures: 0.042 ms, 3.14 ms, 1.2 s."""
    return f"{ms / 1000:.3g} s" if ms >= 1000 else f"{ms:.3g} ms"
