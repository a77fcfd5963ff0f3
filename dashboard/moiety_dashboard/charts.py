"""Charts of data frames in one style, whose background and text colours come from the theme. Pure; knows no page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from moiety_dashboard import colours

HEIGHT = 190
PREFIXED = "~s"  # format of numbers with k, M and G, which writes zero as 0k beside 1k
GREY = "#8a8f98"  # readable on light and dark backgrounds
PLOT_WIDTH = 430  # approximate pixels of a chart's bars
HALF_PX, WHOLE_PX = 320, 560  # least pixels of the plot of a chart beside another one, and of one alone
LABEL_PX, SYMBOL_PX, CHARACTER_PX = 260, 27, 6.4  # of a legend's label at most, of its symbol, and of a character


@dataclass(frozen=True, slots=True)
class Span:
    """The whole time shown, busy or not, in slots of `step`."""

    since: datetime
    until: datetime
    step: timedelta

    @property
    def num_slots(self) -> int:
        return max(1, round((self.until - self.since) / self.step))


@dataclass(frozen=True, slots=True)
class Figure:
    """A drawn column, its unit, and its number formats, in tooltips and at a linear axis."""

    column: str
    unit: str
    number: str = ",.4~r"
    is_log: bool = False
    axis: str = PREFIXED


def stacked(
    frame: pd.DataFrame,
    figure: Figure,
    field: str,
    colours: Mapping[str, str],
    span: Span,
    *,
    width_px: int = HALF_PX,
) -> alt.Chart:
    """Return stacked bars of a figure by `slot`, coloured by `field`. `width_px` is the least width of the chart."""
    size = max(2, round(PLOT_WIDTH / span.num_slots) - 1)
    mark = alt.MarkDef(type="bar", size=size)
    return _over_time(frame, figure, field, colours, span, mark, stack=True, width_px=width_px)


def lines(
    frame: pd.DataFrame,
    figure: Figure,
    field: str,
    colours: Mapping[str, str],
    span: Span,
    *,
    width_px: int = HALF_PX,
) -> alt.Chart:
    """Return a line of a figure by `slot` for each `field`; next to a slot without a figure it has points instead."""
    point = alt.OverlayMarkDef(filled=True, size=18)
    mark = alt.MarkDef(type="line", point=point, strokeWidth=2, interpolate="linear")
    joined = with_gaps(frame, figure.column, field, span.step)
    return _over_time(joined, figure, field, colours, span, mark, stack=False, width_px=width_px)


def legend_of(names: Sequence[str], width_px: int) -> alt.Legend:
    """Return a legend of as many columns as fit in the width, since the browser cuts a longer row."""
    widths = [min(LABEL_PX, SYMBOL_PX + round(CHARACTER_PX * len(name))) for name in names]
    for columns in range(len(names), 1, -1):
        if sum(max(widths[first::columns]) for first in range(columns)) <= width_px:
            return alt.Legend(title=None, orient="top", columns=columns)
    return alt.Legend(title=None, orient="top", columns=1)


def with_gaps(frame: pd.DataFrame, column: str, field: str, step: timedelta) -> pd.DataFrame:
    """Return the frame with an empty row in each gap between two slots of a `field`, so that no line crosses it."""
    if not step:
        return frame
    ordered = frame.sort_values("slot")
    after = ordered.groupby(field)["slot"].shift(-1) - ordered["slot"]
    gaps = ordered[after > 1.5 * pd.Timedelta(step)]
    if gaps.empty:
        return frame
    empty = gaps.assign(slot=gaps["slot"] + step)[["slot", field]]
    return pd.concat([frame, empty.assign(**{column: None})], ignore_index=True)


def sides(frame: pd.DataFrame, figure: Figure, classes: Mapping[str, str], names: Sequence[str]) -> alt.Chart:
    """Return bars of a figure by `class`, two beside each other: the two `names` of `side`, the first one paler."""
    shown = [name for name in classes if name in set(frame["class"])]
    scale = alt.Scale(domain=shown, range=[classes[name] for name in shown])
    opacity = alt.Scale(domain=list(names), range=[0.4, 1.0])
    base = alt.Chart(frame[["class", "side", figure.column]]).encode(
        x=alt.X("class:N", sort=shown, title=None, axis=alt.Axis(labelAngle=0, grid=False)),
        xOffset=alt.XOffset("side:N", sort=list(names)),
        y=alt.Y(
            f"{figure.column}:Q",
            title=figure.unit,
            scale=alt.Scale(domain=[0, _top(frame[figure.column])]),
            axis=alt.Axis(tickCount=4, format="%" if is_share(figure) else "~r"),
        ),
        tooltip=["class:N", "side:N", alt.Tooltip(f"{figure.column}:Q", title=figure.unit, format=figure.number)],
    )
    bars = base.mark_bar(cornerRadiusTopLeft=2, cornerRadiusTopRight=2).encode(
        color=alt.Color("class:N", scale=scale, legend=None),
        opacity=alt.Opacity("side:N", scale=opacity, legend=alt.Legend(title=None, orient="top", symbolFillColor=GREY)),
    )
    labels = base.mark_text(dy=-6, fontSize=10, color=GREY).encode(
        text=alt.Text(f"{figure.column}:Q", format=figure.number)
    )
    return _styled((bars + labels).properties(height=HEIGHT, padding={"left": 0, "right": 8, "top": 4, "bottom": 0}))


def _top(values: pd.Series[float]) -> float:
    """Return the end of an axis from 0, with space for the numbers on the bars."""
    return float(values.max() * 1.12) or 1.0


def _over_time(
    frame: pd.DataFrame,
    figure: Figure,
    field: str,
    colours: Mapping[str, str],
    span: Span,
    mark: alt.MarkDef,
    *,
    stack: bool,
    width_px: int,
) -> alt.Chart:
    shown = [name for name in colours if name in set(frame[field])]
    time_format = "%H:%M" if span.until - span.since <= timedelta(days=1) else "%d %b"
    domain = [utc_moment(span.since), utc_moment(span.until)]
    scale = alt.Scale(domain=shown, range=[colours[name] for name in shown])
    data = frame.assign(middle=middle_ms(frame["slot"], span.step))[["middle", field, figure.column]]
    chart = (
        alt.Chart(data, mark=mark)
        .encode(
            x=alt.X(
                "middle:T",
                title=None,
                scale=alt.Scale(domain=domain),
                axis=alt.Axis(format=time_format, tickCount=6, grid=False, labelOverlap=True),
            ),
            y=alt.Y(
                f"{figure.column}:Q",
                title=figure.unit,
                stack="zero" if stack else None,
                scale=_scale_of(figure, frame),
                axis=_axis_of(figure, frame),
            ),
            color=alt.Color(f"{field}:N", scale=scale, legend=legend_of(shown, width_px)),
            tooltip=[
                alt.Tooltip("middle:T", title="around", format="%d %b %H:%M:%S"),
                alt.Tooltip(f"{field}:N", title=field),
                alt.Tooltip(f"{figure.column}:Q", title=figure.unit, format=figure.number),
            ],
        )
        .properties(height=HEIGHT, padding={"left": 0, "right": 8, "top": 0, "bottom": 0})
    )
    return _styled(chart)


def load_map(cells: pd.DataFrame, num_layers: int) -> alt.Chart:
    """Return a map of layers × experts, coloured by an expert's load over the mean of its layer.

    An even load is one colour, however high or low.
    """
    experts = cells["expert"].max() + 1
    every = max(1, 2 ** math.ceil(math.log2(max(1, experts / 32))))
    shown = cells.assign(log_times=np.log2(cells["times_mean"].clip(lower=0.01)))
    scale = alt.Scale(
        domain=[-2, 0, 2], range=[colours.LESS, colours.EVEN, colours.MORE_THAN], clamp=True, interpolate="rgb"
    )
    times = alt.Legend(
        title="× mean of the layer",
        orient="top",
        direction="horizontal",
        gradientLength=220,
        gradientThickness=9,
        values=[-2, -1, 0, 1, 2],
        labelExpr="datum.value < -1 ? '¼ or less' : datum.value > 1 ? '4 or more' : format(pow(2, datum.value), '~g')",
    )
    chart = (
        alt.Chart(shown, mark=alt.MarkDef(type="rect"))
        .encode(
            x=alt.X(
                "expert:O",
                title="expert",
                axis=alt.Axis(values=list(range(0, experts, every)), labelAngle=0, ticks=False, domain=False),
                scale=alt.Scale(paddingInner=0.08 if experts <= 64 else 0),
            ),
            y=alt.Y(
                "layer:O",
                title="layer",
                axis=alt.Axis(labelOverlap=True, ticks=False, domain=False),
                scale=alt.Scale(paddingInner=0.08 if num_layers <= 24 else 0),
            ),
            color=alt.Color("log_times:Q", scale=scale, legend=times),
            tooltip=[
                alt.Tooltip("layer:O", title="layer"),
                alt.Tooltip("expert:O", title="expert"),
                alt.Tooltip("tokens:Q", title="tokens", format=",d"),
                alt.Tooltip("times_mean:Q", title="× mean of the layer", format=".2f"),
            ],
        )
        .properties(height=110 + num_layers * (26 if num_layers <= 12 else 18 if num_layers <= 32 else 11))
    )
    return _styled(chart)


def ranked(frame: pd.DataFrame, name: str, column: str, share: str) -> alt.Chart:
    """Return one bar per row, the longest first, with its share beside it."""
    order = list(frame[name])
    y = alt.Y(
        f"{name}:N",
        sort=order,
        title=None,
        axis=alt.Axis(ticks=False, domain=False, labelLimit=150, labelOverlap=False),
    )
    base = alt.Chart(frame).encode(y=y, x=alt.X(f"{column}:Q", title=column, axis=_prefixed()))
    tooltip = [
        alt.Tooltip(f"{name}:N"),
        alt.Tooltip(f"{column}:Q", format=",d"),
        alt.Tooltip(f"{share}:Q", format=".1%"),
    ]
    bars = base.mark_bar(color=colours.TENANTS[0], size=14).encode(tooltip=tooltip)
    labels = base.mark_text(align="left", dx=5, color=colours.NEUTRAL).encode(text=alt.Text(f"{share}:Q", format=".1%"))
    return _styled((bars + labels).properties(height=max(HEIGHT, 26 * len(order) + 60)))


def is_share(figure: Figure) -> bool:
    return figure.number.endswith("%")


def _scale_of(figure: Figure, frame: pd.DataFrame) -> Any:
    """Return the scale; a share's ends at 100 %, and starts low enough that 98 % does not look like a fall."""
    if is_share(figure):
        return alt.Scale(domain=[share_floor(frame[figure.column].min()), 1], clamp=True)
    if figure.is_log:
        return alt.Scale(type="log", domain=list(decades(frame[figure.column])))
    if not frame[figure.column].any():
        return alt.Scale(domain=[0, 1])  # an all-zero series gives the axis no length
    return alt.Scale(zero=True, nice=True)


def decades(values: pd.Series[float]) -> tuple[float, float]:
    """Return the powers of ten that enclose the values, at least one decade."""
    positive = values[values > 0]
    if positive.empty:
        return 1.0, 10.0
    lowest = math.floor(math.log10(positive.min()))
    highest = max(math.ceil(math.log10(positive.max())), lowest + 1)
    return 10.0**lowest, 10.0**highest


def _axis_of(figure: Figure, frame: pd.DataFrame) -> alt.Axis:
    """Return an axis of about four lines; a logarithmic one has powers of ten, and their triples if those are few."""
    if not figure.is_log:
        if not is_share(figure) and not frame[figure.column].any():
            return alt.Axis(values=[0])  # parts of 1 have no meaning where nothing is counted
        if is_share(figure) or figure.axis != PREFIXED:
            return alt.Axis(tickCount=4, format="%" if is_share(figure) else figure.axis)
        return _prefixed()
    first, last = (round(math.log10(end)) for end in decades(frame[figure.column]))
    steps = (1, 3) if last - first <= 2 else (1,)
    ticks = [step * 10.0**power for power in range(first, last + 1) for step in steps]
    return alt.Axis(values=[tick for tick in ticks if tick <= 10.0**last], format="~s")


def _prefixed() -> alt.Axis:
    return alt.Axis(tickCount=4, format=PREFIXED, labelExpr="datum.value == 0 ? '0' : datum.label")


def share_floor(lowest: float) -> float:
    """Return the start of a share's axis: a tenth below the lowest value, and 80 % at most."""
    return max(0.0, min(0.8, int(lowest * 10) / 10 - 0.1))


def middle_ms(slots: pd.Series[pd.Timestamp], step: timedelta) -> pd.Series[float]:
    """Return the middles of the slots in the browser's milliseconds, since its frame reader rejects microseconds."""
    return (slots + pd.Timedelta(step) / 2).map(lambda moment: moment.timestamp() * 1000)


def utc_moment(moment: datetime) -> alt.DateTime:
    """Return a moment in the charts' own terms, whatever the browser's time zone."""
    at = moment.astimezone(UTC)
    return alt.DateTime(
        utc=True, year=at.year, month=at.month, date=at.day, hours=at.hour, minutes=at.minute, seconds=at.second
    )


def _styled(chart: alt.Chart | alt.LayerChart) -> alt.Chart:
    styled: alt.Chart = (
        chart.configure_view(stroke=None)
        .configure_axisY(titleFontSize=11, titleFontWeight="normal", domain=False, ticks=False)
        .configure_legend(
            padding=0,
            offset=6,
            labelLimit=LABEL_PX - SYMBOL_PX,
            symbolType="circle",
            symbolSize=60,
            symbolStrokeWidth=0,
        )
    )
    return styled
