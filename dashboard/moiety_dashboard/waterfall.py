"""The spans of a trace as bars over time, and below them an engine's steps on the same clock. Pure; knows no page."""

from __future__ import annotations

import altair as alt
import pandas as pd

from moiety_dashboard import colours
from moiety_dashboard.frames.traces import ENGINE, FAILED, GATEWAY, OTHER

ROW_HEIGHT = 24  # pixels
AROUND = 110  # pixels of axis and legend, which a chart's height includes
STEPS_HEIGHT = 240
LABEL_WIDTH = 190
NARROW_LABEL_WIDTH = 130
WHO = {GATEWAY: "#14a098", ENGINE: "#4c78a8", OTHER: colours.NEUTRAL, FAILED: colours.BAD}
EVENTS = {"preempted": "#d64545", "resumed": "#4f9d69", "demoted": "#e0a526", "failed over": "#b279a2"}
MORE_EVENTS = "other events"
PARTS = {"decodes": colours.DECODE, "prompt tokens": colours.PREFILL}
MIN_WIDTH_SHARE = 0.003  # of the whole width, so that short spans are visible


def waterfall(
    bars: pd.DataFrame, events: pd.DataFrame, of: str = "request", *, is_narrow: bool = False
) -> alt.LayerChart:
    """Return the spans of a request, or a run, as bars with their durations, and their events as points.

    A narrow chart has half the width of a page.
    """
    label_width, text_share = (NARROW_LABEL_WIDTH, 0.28) if is_narrow else (LABEL_WIDTH, 0.16)
    until = max(bars["end_ms"].max(), 0.001)
    shown = bars.assign(
        line=[f"{row:04d} {label}" for row, label in zip(bars["row"], bars["label"], strict=True)],
        drawn_ms=_drawn(bars, until * MIN_WIDTH_SHARE),
        text=[duration(ms) for ms in bars["duration_ms"]],
    )
    lines = list(shown["line"])
    axis = alt.Axis(
        title=None, labelExpr="slice(datum.label, 5)", labelAlign="left", labelPadding=label_width, ticks=False,
        labelLimit=label_width, minExtent=label_width, maxExtent=label_width, domain=False, labelOverlap=False,
        labelFontSize=12,
    )  # fmt: skip
    y = alt.Y("line:N", sort=lines, scale=alt.Scale(domain=lines), axis=axis)
    at = alt.Axis(
        title=f"ms since the start of the {of}", orient="top", tickCount=4 if is_narrow else 8, grid=True, domain=False
    )
    scale = alt.Scale(domain=[0, until * (1 + text_share)], nice=False)  # space for the text of the last span
    inks = {who: ink for who, ink in WHO.items() if who in set(bars["who"])}
    who = alt.Color(
        "who:N", scale=alt.Scale(domain=list(inks), range=list(inks.values())),
        legend=alt.Legend(title=None, orient="bottom"),
    )  # fmt: skip
    tooltip = [
        alt.Tooltip("label:N", title="span"), alt.Tooltip("duration_ms:Q", title="duration, ms", format=",.3f"),
        alt.Tooltip("start_ms:Q", title="start, ms", format=",.3f"), alt.Tooltip("attributes:N", title="attributes"),
    ]  # fmt: skip
    drawn = alt.Chart(shown).encode(y=y)
    bar = drawn.mark_bar(height=13, cornerRadius=2).encode(
        x=alt.X("start_ms:Q", scale=scale, axis=at), x2="drawn_ms:Q", color=who, tooltip=tooltip
    )
    text = drawn.mark_text(align="left", dx=5, fontSize=11, color=colours.NEUTRAL).encode(x="drawn_ms:Q", text="text:N")
    layers: list[alt.Chart] = [bar, text]
    if not events.empty:
        layers.append(_points(events, y))
    chart: alt.LayerChart = (
        alt.layer(*layers)
        .resolve_scale(color="independent")
        .properties(height=ROW_HEIGHT * len(bars) + AROUND, padding={"left": 0, "right": 4, "top": 0, "bottom": 0})
        .configure_view(stroke=None)
    )
    return chart


def _points(events: pd.DataFrame, y: alt.Y) -> alt.Chart:
    shown = events.assign(
        line=[f"{row:04d} {label}" for row, label in zip(events["row"], events["label"], strict=True)],
        kind=[name if name in EVENTS else MORE_EVENTS for name in events["event"]],
    )
    inks = {**EVENTS, MORE_EVENTS: colours.NEUTRAL}
    kinds = [kind for kind in inks if kind in set(shown["kind"])]
    drawn: alt.Chart = (
        alt.Chart(shown)
        .mark_point(shape="diamond", filled=True, size=110, opacity=1)
        .encode(
            x="at_ms:Q",
            y=y,
            color=alt.Color(
                "kind:N", scale=alt.Scale(domain=kinds, range=[inks[kind] for kind in kinds]),
                legend=alt.Legend(title=None, orient="bottom"),
            ),
            tooltip=[
                alt.Tooltip("event:N", title="event"), alt.Tooltip("at_ms:Q", title="time, ms", format=",.3f"),
                alt.Tooltip("attributes:N", title="attributes"),
            ],
        )
    )  # fmt: skip
    return drawn


def steps(frame: pd.DataFrame, until_ms: float) -> alt.Chart:
    """Return the batch composition of each sampled step, over the request's time."""
    until_ms = max(until_ms, 0.001)
    parts = [_part(frame, "decodes", 0), _part(frame, "prefill_tokens", frame["decodes"])]
    shown = pd.concat(parts).assign(drawn_ms=lambda all_: _drawn(all_, until_ms * MIN_WIDTH_SHARE))
    axis = alt.Axis(title="ms since the start of the request", tickCount=8, grid=False)
    legend = alt.Legend(title=None, orient="top", symbolType="circle")
    drawn = (
        alt.Chart(shown)
        .mark_rect()
        .encode(
            x=alt.X("start_ms:Q", axis=axis, scale=alt.Scale(domain=[0, until_ms], nice=False, clamp=True)),
            x2="drawn_ms:Q",
            y=alt.Y("from:Q", title="tokens in the step", axis=alt.Axis(tickCount=4, format="~s")),
            y2="to:Q",
            color=alt.Color(
                "part:N", scale=alt.Scale(domain=list(PARTS), range=list(PARTS.values())), legend=legend
            ),
            tooltip=[
                alt.Tooltip("number:Q", title="step", format=","), alt.Tooltip("part:N", title="part"),
                alt.Tooltip("tokens:Q", title="tokens", format=","),
                alt.Tooltip("took_ms:Q", title="duration, ms", format=",.2f"),
                alt.Tooltip("preempted:Q", title="preempted"),
            ],
        )
        .properties(height=STEPS_HEIGHT, padding={"left": 0, "right": 8, "top": 0, "bottom": 0})
    )  # fmt: skip
    configured: alt.Chart = drawn.configure_view(stroke=None)
    return configured


def _part(frame: pd.DataFrame, column: str, floor: int | pd.Series[int]) -> pd.DataFrame:
    """Return a part of each step's tokens, stacked on `floor` others."""
    shown = frame[["number", "start_ms", "end_ms", "took_ms", "preempted"]]
    name = {"decodes": "decodes", "prefill_tokens": "prompt tokens"}[column]
    return shown.assign(part=name, tokens=frame[column], **{"from": floor, "to": floor + frame[column]})


def _drawn(frame: pd.DataFrame, least_ms: float) -> pd.Series[float]:
    """Return the end of each bar, late enough that the bar is visible."""
    return pd.concat([frame["end_ms"], frame["start_ms"] + least_ms], axis=1).max(axis=1)


def duration(ms: float) -> str:
    """Format a time to three figures: 0.042 ms, 3.14 ms, 1.2 s."""
    return f"{ms / 1000:.3g} s" if ms >= 1000 else f"{ms:.3g} ms"
