"""When a core reports its load."""

from __future__ import annotations

from moiety_engine.load_reporter import REPORT_INTERVAL_NS, LoadReporter


def test_the_load_is_told_at_first_and_then_when_somebody_came_or_went_or_it_is_time() -> None:
    telling, now_ns = LoadReporter(), 10**18
    assert telling.is_due(now_ns, is_news=False)
    assert not telling.is_due(now_ns + REPORT_INTERVAL_NS - 1, is_news=False)
    assert telling.is_due(now_ns + REPORT_INTERVAL_NS - 1, is_news=True)
    assert not telling.is_due(now_ns + REPORT_INTERVAL_NS, is_news=False)
    assert telling.is_due(now_ns + 2 * REPORT_INTERVAL_NS, is_news=False)
    assert telling.is_due(now_ns, is_news=False), "the clock was put back"
