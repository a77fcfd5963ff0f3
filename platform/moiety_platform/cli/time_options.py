"""Options of a period, as reports take them: the last hours, or from one time to another."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Annotated

import typer

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


def period_of(
    hours: float | None, begin: str | None, end: str | None, now: datetime
) -> tuple[datetime, datetime | None]:
    """Return the begin of a period, and its end where one is given, as aware times.

    `now` is aware. Raises typer.BadParameter for a time that cannot be read, or an empty period.
    """
    if hours is not None and begin is not None:
        raise typer.BadParameter("give --hours or --from, not both")
    until = None if end is None else _moment(end, "--to")
    if begin is None:
        return (until or now) - timedelta(hours=DEFAULT_HOURS if hours is None else hours), until
    since = _moment(begin, "--from")
    if since >= (until or now):
        raise typer.BadParameter(f"--from ({begin}) must be before --to ({end or 'now'})")
    return since, until


def _moment(text: str, option: str) -> datetime:
    try:
        return datetime.fromisoformat(text.strip()).astimezone()
    except (ValueError, OverflowError) as exc:
        raise typer.BadParameter(f"{option} must be a date or a time such as 2026-11-01T08:00Z, not {text!r}") from exc
