"""From data frames to charts, all in one style. Pure; knows no page."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import altair as alt
import pandas as pd

HEIGHT = 220
BARS_WIDTH = 380  # pixels that the bars take, of the 470 or so that there are
INK = "#5b6461"
GRID = "#e6e2d8"
OUTCOME_COLOURS = {
    "served": "#0f766e",
    "disconnected": "#b8b2a3",
    "rejected": "#d9a13b",
    "failed": "#b4412f",
}
TENANT_COLOURS = ["#0f766e", "#c2703d", "#4f6d9a", "#9a7fb0", "#8a9a3b", "#5ba3a0", "#b0596b", "#7c746a"]


def bars_over_time(
    frame: pd.DataFrame, field: str, title: str, span: tuple[datetime, datetime], step: timedelta
) -> alt.Chart:
    """Stacked bars of `amount` by `slot`, coloured by `field`; `span` is the whole time shown, busy or not."""
    known = field == "outcome"
    scale = (
        alt.Scale(domain=list(OUTCOME_COLOURS), range=list(OUTCOME_COLOURS.values()))
        if known
        else alt.Scale(range=TENANT_COLOURS)
    )
    num_slots = max(1, round((span[1] - span[0]) / step))
    domain = [utc_moment(moment) for moment in span]
    chart = (
        alt.Chart(frame.assign(middle=middle_ms(frame["slot"], step)))
        .mark_bar(cornerRadius=1, size=max(2, round(BARS_WIDTH / num_slots)))
        .encode(
            x=alt.X("middle:T", title=None, scale=alt.Scale(domain=domain), axis=alt.Axis(format="%H:%M", tickCount=6)),
            y=alt.Y("sum(amount):Q", title=None, axis=alt.Axis(tickCount=4, format=",d")),
            color=alt.Color(f"{field}:N", scale=scale, legend=alt.Legend(title=None, orient="top")),
            tooltip=[
                alt.Tooltip("middle:T", title="around", format="%H:%M:%S"),
                f"{field}:N",
                alt.Tooltip("sum(amount):Q", title=title),
            ],
        )
        .properties(height=HEIGHT, background="transparent", padding={"left": 0, "right": 12, "top": 0, "bottom": 0})
    )
    return _styled(chart)


def middle_ms(slots: pd.Series[pd.Timestamp], step: timedelta) -> pd.Series[float]:
    """The middles of the slots as the browser counts time. (Its reader of frames takes no microseconds.)"""
    return (slots + pd.Timedelta(step) / 2).map(lambda moment: moment.timestamp() * 1000)


def utc_moment(moment: datetime) -> alt.DateTime:
    """A moment in the charts' own terms, whichever time zone the browser is in."""
    at = moment.astimezone(UTC)
    return alt.DateTime(
        utc=True, year=at.year, month=at.month, date=at.day, hours=at.hour, minutes=at.minute, seconds=at.second
    )


def _styled(chart: alt.Chart) -> alt.Chart:
    styled: alt.Chart = (
        chart.configure_view(stroke=None)
        .configure_axis(labelColor=INK, domain=False, ticks=False, gridColor=GRID, labelFontSize=12, labelPadding=6)
        .configure_axisX(grid=False)
        .configure_legend(labelColor=INK, labelFontSize=12, symbolType="circle", symbolSize=80, padding=0)
    )
    return styled
