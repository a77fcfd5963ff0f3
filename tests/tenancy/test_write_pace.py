"""Pauses between the writes of usage rows."""

from __future__ import annotations

import pytest

from moiety_platform.usage import write_pace
from moiety_platform.usage.write_pace import BUSY_ROWS, WritePace


class Clock:
    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(write_pace, "time", made)
    return made


def test_the_first_row_is_written_after_one_interval(clock: Clock) -> None:
    assert WritePace(0.25).pause_s() == 0.25


@pytest.mark.parametrize("num_rows, expected_s", [(1, 1.0), (BUSY_ROWS - 1, 1.0), (BUSY_ROWS, 0.5), (900, 0.5)])
def test_writes_are_rarer_while_rows_keep_coming(clock: Clock, num_rows: int, expected_s: float) -> None:
    pace = WritePace(0.25)
    pace.note_write(num_rows)
    clock.now_s += 1.9
    assert pace.pause_s() == expected_s


def test_a_row_after_a_pause_is_written_after_one_interval(clock: Clock) -> None:
    pace = WritePace(0.25)
    pace.note_write(900)
    clock.now_s += 2.0
    assert pace.pause_s() == 0.25
