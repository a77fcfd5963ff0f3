"""Requests with a quote by class: guarantees, credits, and actual times divided by predicted ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from moiety_dashboard.formatting import ratio

COLUMNS = (
    *("class", "requests", "met", "missed", "reasons", "credit", "ttft_median", "ttft_p90"),
    *("duration_median", "duration_p90"),
)


def quotes_frame(classes: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return one row per class of `/usage/quotes`. `met` is a share, and `credit` is in dollars."""
    rows = []
    for one in classes:
        reasons = sorted(one["credit_reasons"].items())
        row = {
            "class": one["service_class"],
            "requests": one["requests"],
            "met": ratio(one["num_guarantees_met"], one["num_guarantees"]),
            "missed": one["num_guarantees"] - one["num_guarantees_met"],
            "reasons": ", ".join(f"{reason} {count}" for reason, count in reasons),
            "credit": one["credit_nanodollars"] / 1e9,
        }
        for name in ("ttft", "duration"):
            found = one[f"{name}_ratio"] or {}
            row |= {f"{name}_median": found.get("median"), f"{name}_p90": found.get("p90")}
        rows.append(row)
    return pd.DataFrame(rows, columns=list(COLUMNS))
