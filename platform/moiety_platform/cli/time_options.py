"""Options of a period, as reports take them: the last hours, or from one time to another."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import typer

from moiety_platform.cli.option_groups import OptionGroup

DEFAULT_HOURS = 24.0

Hours = Annotated[
    float | None,
    typer.Option(min=0.001, help="Length of the period, in hours, up to now or to --to. If not given, 24."),
]
From = Annotated[
    str | None,
    typer.Option(
        "--from",
        help="Begin of the period, such as 2026-11-01 or 2026-11-01T08:00Z. Without a zone, local time as in tables.",
    ),
]
To = Annotated[str | None, typer.Option("--to", help="End of the period, which is not part of it. If not given, now.")]


@dataclass(frozen=True)
class ReportPeriod(OptionGroup):
    """Options of the period of a report."""

    hours: Hours = None
    begin: From = None
    end: To = None

    def times(self, now: datetime) -> tuple[datetime, datetime | None]:
        """Return the begin of the period, and its end where one is given, as aware times.

        `now` is aware. Raises typer.BadParameter for a time that cannot be read, or an empty period.
        """
        if self.hours is not None and self.begin is not None:
            raise typer.BadParameter("give --hours or --from, not both")
        until = None if self.end is None else _moment(self.end, "--to")
        if self.begin is None:
            return (until or now) - timedelta(hours=DEFAULT_HOURS if self.hours is None else self.hours), until
        since = _moment(self.begin, "--from")
        if since >= (until or now):
            raise typer.BadParameter(f"--from ({self.begin}) must be before --to ({self.end or 'now'})")
        return since, until

    def query(self) -> dict[str, Any]:
        """Return the period as query parameters. Raises typer.BadParameter."""
        since, until = self.times(datetime.now(UTC))
        return {"since": since.isoformat(), "until": None if until is None else until.isoformat()}


def _moment(text: str, option: str) -> datetime:
    try:
        return datetime.fromisoformat(text.strip()).astimezone()
    except (ValueError, OverflowError) as exc:
        raise typer.BadParameter(f"{option} must be a date or a time such as 2026-11-01T08:00Z, not {text!r}") from exc
