"""Published prices of spot classes over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import pandas as pd

COLUMNS = ("slot", "class", "percent", "idle_percent")


def spot_frame(prices: Sequence[Mapping[str, Any]], step: timedelta) -> pd.DataFrame:
    """Return the mean price of each class over its models, by slot of `step`, in percent of the class's price."""
    if not prices:
        return pd.DataFrame(columns=list(COLUMNS))
    frame = pd.DataFrame(
        {
            "slot": pd.to_datetime([one["starts_at"] for one in prices], utc=True, format="ISO8601"),
            "class": [one["service_class"] for one in prices],
            "percent": [one["percent"] for one in prices],
            "idle_percent": [one["idle_percent"] for one in prices],
        }
    )
    frame["slot"] = frame["slot"].dt.floor(pd.Timedelta(step))
    return frame.groupby(["slot", "class"], as_index=False)[["percent", "idle_percent"]].mean()
