"""The encoder's timer keeps no events of encodings that have ended."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moiety_engine.images.encoder_timer import EncoderTimer


class Event:
    """An event of a device that ends at once, or never."""

    has_ended = True
    num_open = 0

    def __init__(self, **_: Any) -> None:
        Event.num_open += 1

    def __del__(self) -> None:
        Event.num_open -= 1

    def record(self) -> None: ...

    def query(self) -> bool:
        return self.has_ended

    def elapsed_time(self, _: Event) -> float:
        return 500.0


def test_events_of_ended_encodings_are_dropped_where_nobody_reads_the_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    timer = EncoderTimer(torch.device("cuda"))
    for _ in range(50):
        with timer.measure():
            pass
    assert Event.num_open <= 4
    assert timer.seconds_total() == 25.0


def test_encodings_that_still_run_are_added_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Event, "has_ended", False)
    timer = EncoderTimer(torch.device("cuda"))
    for _ in range(3):
        with timer.measure():
            pass
    assert timer.seconds_total() == 0.0
    monkeypatch.setattr(Event, "has_ended", True)
    assert timer.seconds_total() == 1.5
