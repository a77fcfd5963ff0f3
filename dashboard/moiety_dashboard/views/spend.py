"""Spend: by tenant, project, key, model, class, end user or tag, over any days, with a forecast and with budgets."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, date, datetime, time, timedelta
from typing import Any

import pandas as pd
import streamlit as st

from moiety_dashboard import charts, colours, panels, session
from moiety_dashboard.client import AdminClient, Answer
from moiety_dashboard.escaping import as_text, show_unseen
from moiety_dashboard.formatting import dollars
from moiety_dashboard.frames.attribution import tag_names
from moiety_dashboard.frames.spend import PREDICTED, REMAINING, budgets_frame, burn_frame, days_frame, spend_frame
from moiety_dashboard.page import Page
from moiety_dashboard.panels import Tile
from moiety_dashboard.views.columns import scope_columns, token_columns
from moiety_dashboard.views.tenants.limits import QUOTA_WRITES
from moiety_dashboard.views.tenants.names import names_of, scope_names_of

DAY = timedelta(days=1)
MONTH, LAST_MONTH, OTHER = "This month", "Last month", "Other days"
LENGTHS = {"7 d": 7, "30 d": 30, "90 d": 90}
WINDOWS = (MONTH, LAST_MONTH, *LENGTHS, OTHER)
GROUPINGS = {
    "tenant": "Tenant", "project": "Project", "key": "Key", "model": "Model", "service_class": "Class",
    "end_user": "End user",
}  # fmt: skip
END_USER = "end_user"
TAG = "tag:"
NUM_DRAWN = 5  # groups with colours of their own in the chart
NUM_SAMPLED = 500  # newest requests in which the names of tags are looked for
NOBODY, HOW = "No cost in this time.", "Set prices with `moiety price set`, and send requests."
ALL, REST = "all", "others"


def draw(page: Page) -> None:
    panels.head("Spend", "Cost after credits, as billed; days and months are those of UTC")
    with page.asking() as client:
        names = names_of(client)
        since, until, tenant_id, grouping = choose(client, names)
        given = {"since": since.isoformat(), "until": until.isoformat(), "tenant_id": tenant_id}
        forecast, groups, budgets = client.get_all(
            [
                ("/spend/forecast", {"tenant_id": tenant_id}),
                ("/spend", {"group_by": grouping, **given}),
                ("/spend/budgets", {"tenant_id": tenant_id, "limit": 200}),
            ]
        )
        draw_month(forecast)
        draw_groups(client, groups, grouping, (since, until), given, names)
        draw_budgets(budgets, scope_names_of(client))


def choose(client: AdminClient, names: Mapping[str, str]) -> tuple[datetime, datetime, str | None, str]:
    """Return the chosen time [since, until), tenant, and grouping."""
    has_days, has_tenants = st.session_state.get("spend time") == OTHER, not session.is_of_one_tenant()
    places = iter(st.columns(2 + has_days + has_tenants))
    window = next(places).selectbox("Time", WINDOWS, key="spend time")
    since, until = days_of(window, datetime.now(UTC))
    if has_days:
        given = next(places).date_input("Days, in UTC", (since.date(), until.date() - DAY), key="spend days")
        since, until = between(given, since, until)
    tenant_id = None
    if has_tenants:
        tenants = sorted((one for one in names if one.startswith("ten_")), key=lambda one: names[one])
        tenant_id = next(places).selectbox(
            "Tenant",
            tenants,
            None,
            format_func=lambda one: show_unseen(names[one]),
            placeholder="all",
            key="spend tenant",
        )
    is_of_one = tenant_id is not None or not has_tenants
    groupings = [name for name in GROUPINGS if name not in ("tenant", END_USER)]
    groupings = groupings if not has_tenants else ["tenant", *groupings]
    if is_of_one:  # end users and tags are each tenant's own
        groupings.append(END_USER)
        sample = client.get("/usage/requests", tenant_id=tenant_id, limit=NUM_SAMPLED, since=since.isoformat())
        groupings += [f"{TAG}{name}" for name in tag_names(sample.data["data"])]
    grouping = next(places).selectbox("Group by", groupings, format_func=label_of, key="spend by")
    return since, until, tenant_id, grouping


def days_of(window: str, now: datetime) -> tuple[datetime, datetime]:
    """Return the whole days of a window, in UTC; today is the last one of those up to now."""
    today = now.replace(hour=0, minute=0, second=0, microsecond=0)
    month = today.replace(day=1)
    if window == LAST_MONTH:
        return (month - DAY).replace(day=1), month
    return (today - (LENGTHS[window] - 1) * DAY if window in LENGTHS else month), today + DAY


def between(given: Any, since: datetime, until: datetime) -> tuple[datetime, datetime]:
    """Return the chosen days as a time; the given one while only one end is chosen."""
    chosen: tuple[date, ...] = given if isinstance(given, tuple) else (given,)
    if len(chosen) != 2:
        return since, until
    begin, end = (datetime.combine(day, time(), UTC) for day in chosen)
    return begin, end + DAY


def label_of(grouping: str) -> str:
    """Return the name of a grouping, which is not escaped."""
    return GROUPINGS.get(grouping) or f"Tag {grouping.removeprefix(TAG)}"


def draw_month(answer: Answer) -> None:
    """Draw the figures of this month, whatever time is chosen."""
    found = answer.data
    rate, since = dollars(found["rate_nanodollars_per_day"]), found["rate_since"]
    how = (
        "What is spent, plus the mean of the last seven days and of today for the rest of the month; without spend "
        "before, the mean since the first day with spend."
    )
    figures = [
        Tile("Spent this month", dollars(found["spent_nanodollars"]), f"since {found['month_start'][:10]}"),
        Tile("Forecast for the month", dollars(found["forecast_nanodollars"]), f"to {found['month_end'][:10]}", how),
        Tile("Spend per day", rate, "no spend in four weeks" if since is None else f"mean since {since[:10]}"),
    ]
    panels.tiles(figures, [answer])


def nobody() -> str:
    return f"{NOBODY}{session.advice(HOW, 'prices.write')}"


def draw_groups(
    client: AdminClient,
    answer: Answer,
    grouping: str,
    times: tuple[datetime, datetime],
    given: Mapping[str, Any],
    names: Mapping[str, str],
) -> None:
    """Draw the cost by day and by group of an answer to a request with the `given` time and tenant."""
    since, until = times
    total = answer.data["total"]
    field = f"{grouping}_id" if grouping in ("tenant", "project", "key") else grouping
    frame = spend_frame(answer.data["data"], field, total["cost_nanodollars"], names)
    answers, days = read_days(client, grouping, frame, given)
    span = charts.Span(since, until, DAY)
    inks = dict(zip(dict.fromkeys(days["name"]), (*colours.TENANTS, colours.NEUTRAL), strict=False))
    whole = f"{dollars(total['cost_nanodollars'])} in all"
    with panels.panel("Cost by day", whole, answers or [answer], key="days", frame=days):
        figure = charts.Figure("cost", "dollars", ",.4~f", axis="$,.3~r")
        panels.draw(
            lambda: charts.stacked(days, figure, "name", inks, span, width_px=charts.WHOLE_PX),
            days,
            nobody(),
            "spend chart",
        )
    note = f"{since:%Y-%m-%d} to {until - DAY:%Y-%m-%d}; the CSV has all rows"
    with panels.panel(f"By {as_text(label_of(grouping).lower())}", note, [answer], key="spend", frame=frame):
        panels.table(frame, columns(grouping), nobody(), max_rows=14)
        if answer.data["truncated"]:
            st.caption(f"Only {len(frame):,d} groups are listed: those with most output tokens.")


def read_days(
    client: AdminClient, grouping: str, frame: pd.DataFrame, given: Mapping[str, Any]
) -> tuple[list[Answer], pd.DataFrame]:
    """Return the cost by day, of the largest groups each, with the answers that it comes from.

    End users and tags are not told apart here: the gateway would read all requests of the time for each of them.
    """
    if grouping == END_USER or grouping.startswith(TAG):
        answer = client.get("/spend", group_by="day", **given)
        return [answer], days_frame({ALL: answer.data["data"]})
    filter_of = f"{grouping}_id" if grouping in ("tenant", "project", "key") else grouping
    largest = frame[frame["cost"] > 0].head(NUM_DRAWN)
    by_day = {"group_by": "day", **given}
    only = [by_day | {filter_of: row["id"]} for _, row in largest.iterrows()]
    has_rest = len(frame) > len(largest)
    answers = client.get_all([("/spend", one) for one in (*only, *([by_day] if has_rest else []))])
    found = dict(zip(map(str, largest["name"]), answers, strict=False))
    days = days_frame({name: answer.data["data"] for name, answer in found.items()})
    if has_rest:
        days = with_rest(days, days_frame({REST: answers[-1].data["data"]}))
    return list(answers), days


def with_rest(days: pd.DataFrame, whole: pd.DataFrame) -> pd.DataFrame:
    """Return the days with what the whole has beyond them, by day."""
    known = days.groupby("slot")["cost"].sum() if len(days) else pd.Series(dtype=float)
    rest = whole.assign(cost=whole["cost"] - whole["slot"].map(known).fillna(0.0))
    rest = rest[rest["cost"] > 1e-9]
    return pd.concat([days, rest], ignore_index=True) if len(days) else rest


def columns(grouping: str) -> dict[str, Any]:
    column = st.column_config
    without = "A dash stands for requests without one" if grouping == END_USER or grouping.startswith(TAG) else None
    return {
        "name": column.TextColumn(as_text(GROUPINGS.get(grouping, "Tag value")), help=without),
        "share": column.ProgressColumn("Share of cost", min_value=0.0, max_value=1.0, format="percent"),
        "requests": panels.count_column("Requests"),
        **token_columns(),
        "before_credits": column.NumberColumn("Before credits", format="dollar"),
        "credit": column.NumberColumn("Credits", format="dollar", help="For missed guarantees of quotes"),
        "cost": column.NumberColumn("Cost", format="dollar"),
    }


def draw_budgets(answer: Answer, names: Mapping[str, str]) -> None:
    budgets = answer.data["data"]
    frame = budgets_frame(budgets, names, session.zone())
    with panels.panel("Budgets", "limits on money, in their present window", [answer], key="budgets", frame=frame):
        how = "Set one on the Tenants page, or with `moiety quota set --dollars-per-month`."
        none = f"No limit on money is set.{session.advice(how, QUOTA_WRITES)}"
        panels.table(frame, budget_columns(), none)
    if not budgets:
        return
    by_id = {one["quota_id"]: one for one in budgets}
    labels = {row["quota_id"]: f"{row['scope']}, {row['limit']}" for _, row in frame.iterrows()}
    chosen = st.selectbox(
        "Burn-down of", list(labels), format_func=lambda one: show_unseen(labels[one]), key="spend budget"
    )
    budget = by_id[chosen]
    burn = burn_frame(budget)
    begin, end = (datetime.fromisoformat(budget[name]) for name in ("window_start", "window_end"))
    span = charts.Span(begin, end, timedelta())
    inks = {REMAINING: colours.TENANTS[0], PREDICTED: colours.NEUTRAL}
    note = f"of {dollars(budget['cap_nanodollars'])}, by the usage of its scope"
    with panels.panel("Burn-down", note, [answer], key="burn-down", frame=burn):
        figure = charts.Figure("remaining", "dollars", ",.4~f")
        panels.draw(
            lambda: charts.lines(burn, figure, "name", inks, span, width_px=charts.WHOLE_PX),
            burn,
            nobody(),
            "burn-down chart",
        )


def budget_columns() -> dict[str, Any]:
    column = st.column_config
    return {
        **scope_columns("Share used"),
        "used": column.NumberColumn("Used", format="dollar", help="What the limit has counted"),
        "cap": column.NumberColumn("Cap", format="dollar"),
        "forecast": column.NumberColumn("Forecast", format="dollar", help="Used by the window's end at this rate"),
        "per_day": column.NumberColumn("Per day", format="dollar", help="Mean of the last seven days"),
        "exhausted_at": column.TextColumn("Cap reached", help="At the rate per day, if in this window", width=140),
        "ends": panels.time_column("Window ends", "YYYY-MM-DD HH:mm"),
    }
