"""Time windows of the pages, and the query for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pandas as pd

from moiety_dashboard.charts import Span
from moiety_dashboard.client import AdminClient, Answer
from moiety_dashboard.frames.series import hours_frame, minutes_frame

MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Window:
    """A window up to now. A window longer than the stored minutes uses hourly data."""

    label: str
    length: timedelta
    step: timedelta

    @property
    def by_hour(self) -> bool:
        return self.step >= HOUR

    @property
    def slot(self) -> str:
        return "1 h" if self.by_hour else f"{round(self.step / MINUTE)} min"

    def span(self, now: datetime | None = None) -> Span:
        """Return whole steps, including the current one, so that no single requests have to be added up."""
        now = now or datetime.now(UTC)
        size = self.step.total_seconds()
        until = datetime.fromtimestamp((now.timestamp() // size + 1) * size, UTC)
        return Span(until - self.length, until, self.step)


LIVE = (
    Window("15 min", 15 * MINUTE, MINUTE),
    Window("1 h", HOUR, MINUTE),
    Window("6 h", 6 * HOUR, 5 * MINUTE),
    Window("24 h", DAY, HOUR),
)
LONG = (
    Window("1 h", HOUR, HOUR),
    Window("24 h", DAY, HOUR),
    Window("7 d", 7 * DAY, HOUR),
    Window("30 d", 30 * DAY, HOUR),
)


def series(
    client: AdminClient, window: Window, span: Span, group: Sequence[str], **only: str
) -> tuple[Answer, pd.DataFrame]:
    """Return sums over time by group (`service_class`, `tenant`)."""
    since = span.since.isoformat()
    if window.by_hour:
        until = span.until.isoformat()
        answer = client.get("/usage", group_by=",".join(("hour", *group)), since=since, until=until, **only)
        return answer, hours_frame(answer.data["data"], datetime.now(UTC))
    step = round(window.step / MINUTE)
    answer = client.get("/usage/minutes", group_by=",".join(group) or None, step=step, since=since, **only)
    return answer, minutes_frame(answer.data["data"], window.step, datetime.now(UTC))
