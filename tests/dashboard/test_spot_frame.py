"""Published prices of spot classes as a data frame."""

from __future__ import annotations

from datetime import timedelta

from moiety_dashboard.frames.spot import spot_frame


def test_spot_prices_are_means_over_models_by_slot() -> None:
    at = {"service_class": "spot", "idle_percent": 50}
    prices = [
        {**at, "starts_at": "2026-01-01T12:01:00Z", "percent": 40},
        {**at, "starts_at": "2026-01-01T12:00:30.5Z", "percent": 20},
        {**at, "starts_at": "2026-01-01T12:00:00Z", "percent": 30},
    ]
    frame = spot_frame(prices, timedelta(minutes=1))
    assert [(row["slot"].minute, row["class"], row["percent"]) for _, row in frame.iterrows()] == [
        (0, "spot", 25.0), (1, "spot", 40.0),
    ]  # fmt: skip
    assert spot_frame([], timedelta(minutes=1)).empty
