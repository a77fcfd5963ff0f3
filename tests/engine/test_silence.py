"""A rank that hangs is detected in time, and one that is late because the whole machine is slow does not count as
lost."""

from __future__ import annotations

import pytest

from moiety_engine.distribution.heartbeat_timeout import HeartbeatTimeout
from moiety_engine.distribution.rank_heartbeat import BEAT_INTERVAL_S, SILENCE_S

INTERVAL_S = BEAT_INTERVAL_S / 2


def noticed_after_s(wakes_after_s: float, *, most_s: float = 60.0) -> float:
    """Return the time after which a silent rank is detected if each turn takes `wakes_after_s`."""
    silence, now_s = HeartbeatTimeout([1, 2], limit_s=SILENCE_S, interval_s=INTERVAL_S, now_s=100.0), 100.0
    while now_s < 100.0 + most_s:
        now_s += wakes_after_s
        silence.begin_interval(now_s)
        silence.record(2)
        if silence.too_long():
            assert silence.too_long() == [1]
            break
    return now_s - 100.0


@pytest.mark.parametrize("wakes_after_s", [0.001, 0.1, INTERVAL_S, INTERVAL_S + 0.01])
def test_a_rank_that_hangs_is_noticed_within_five_seconds_however_often_others_are_heard(wakes_after_s: float) -> None:
    assert SILENCE_S < noticed_after_s(wakes_after_s) < 5.0


def test_while_this_process_is_kept_from_running_nobody_is_taken_for_lost() -> None:
    silence = HeartbeatTimeout([1], limit_s=SILENCE_S, interval_s=INTERVAL_S, now_s=0.0)
    for now_s in (3.0, 33.0, 63.0):  # this rank was stopped meanwhile, and so may the other have been
        silence.begin_interval(now_s)
        assert silence.too_long() == []
    silence.record(1)
    silence.begin_interval(93.0)
    assert silence.too_long() == []


def test_a_rank_that_hangs_on_an_overloaded_machine_is_noticed_by_the_time_that_there_was_to_run() -> None:
    assert noticed_after_s(4 * INTERVAL_S) == pytest.approx(4 * (SILENCE_S + INTERVAL_S))


def test_ranks_heard_shortly_after_the_lost_one_are_distinguished_from_live_ones() -> None:
    silence, now_s = HeartbeatTimeout([1, 2, 3], limit_s=SILENCE_S, interval_s=INTERVAL_S, now_s=0.0), 0.0
    while not silence.too_long():
        now_s += INTERVAL_S
        silence.begin_interval(now_s)
        silence.record(3)
        if now_s <= 2 * INTERVAL_S:
            silence.record(2)
    assert silence.too_long() == [1]
    assert silence.longer_than(SILENCE_S / 2) == [1, 2]
