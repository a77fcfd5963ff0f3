"""Charts of output tokens per second and SLO attainment, by service class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from moiety_dashboard import charts, panels
from moiety_dashboard.client import Answer
from moiety_dashboard.escaping import as_text


@dataclass(frozen=True, slots=True)
class RateTexts:
    """Note beside the titles, text for a time without requests, and beginning of the keys of widgets."""

    note: str
    empty: str
    key: str = ""


def draw_rates(
    places: tuple[Any, Any],
    answer: Answer,
    frame: pd.DataFrame,
    span: charts.Span,
    inks: Mapping[str, str],
    texts: RateTexts,
) -> None:
    """Draw the output rate in the first place and the attainment in the second."""
    left, right = places
    key = texts.key
    with left, panels.panel("Output tokens per second", texts.note, [answer], key=f"{key}tokens", frame=frame):
        figure = charts.Figure("tokens_per_s", "tokens/s")
        panels.draw(
            lambda: charts.stacked(frame, figure, "class", inks, span),
            frame,
            as_text(texts.empty),
            f"{key}tokens chart",
        )
    with right, panels.panel("SLO attainment", texts.note, [answer], key=f"{key}attainment", frame=frame):
        with_slo = frame[frame["attainment"].notna()]
        share = charts.Figure("attainment", "SLO attainment", ".1%")
        panels.draw(
            lambda: charts.lines(with_slo, share, "class", inks, span),
            with_slo,
            as_text(texts.empty),
            f"{key}attainment chart",
        )
