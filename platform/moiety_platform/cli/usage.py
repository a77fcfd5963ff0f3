"""`moiety usage`: sums by what one asks for, or single requests."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import typer

from moiety_platform.cli.admin_command import Admin, admin_command
from moiety_platform.cli.tables import show_csv, show_json
from moiety_platform.prices.terms import dollars

TOTALS = {
    "requests": "requests",
    "failed": "failed",
    "rejected": "rejected",
    "disconnected": "disconnected",
    "prompt_tokens": "prompt tokens",
    "cached_tokens": "of them cached",
    "output_tokens": "output tokens",
    "mean_ttft_ms": "mean TTFT ms",
    "mean_duration_ms": "mean duration ms",
    "preemptions": "preemptions",
    "cost": "$",
    "attainment": "SLA kept",
}
REQUESTS = {
    "started_at": "started",
    "tenant_id": "tenant",
    "endpoint": "endpoint",
    "model": "model",
    "service_class": "class",
    "outcome": "outcome",
    "http_status": "status",
    "prompt_tokens": "prompt",
    "output_tokens": "output",
    "ttft_ms": "TTFT ms",
    "duration_ms": "duration ms",
    "num_preemptions": "preempted",
    "sla_attained": "SLA kept",
    "request_id": "request",
}


@admin_command
def usage(
    admin: Admin,
    by: Annotated[
        str, typer.Option(help="tenant, project, key, model, service_class and hour, with commas.")
    ] = "tenant",
    hours: Annotated[float, typer.Option(min=0.001, help="How far back.")] = 24,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant (name or id).")] = None,
    requests: Annotated[int, typer.Option(min=0, max=500, help="Show the last so many single requests instead.")] = 0,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV instead of a table, with every field.")] = False,
) -> None:
    """Show what was used: requests, tokens, times and money."""
    if as_csv and admin.as_json:
        raise typer.BadParameter("give --csv or --json, not both")
    tenant_id = admin.client.find_tenant(tenant)["id"] if tenant is not None else None
    since = (datetime.now(UTC) - timedelta(hours=hours)).isoformat()
    if requests:
        page = admin.client.get("/usage/requests", limit=requests, since=since, tenant_id=tenant_id)
        show_csv(page["data"]) if as_csv else admin.show_rows(page["data"], REQUESTS)
        return
    report = admin.client.get("/usage", group_by=by, since=since, tenant_id=tenant_id)
    if admin.as_json:
        show_json(report)
        return
    if as_csv:
        show_csv([{**one["group"], **one["totals"]} for one in report["data"]])
        return
    rows: list[dict[str, Any]] = [
        {**named(one["group"]), **one["totals"], "attainment": percent(one["totals"]), "cost": cost(one["totals"])}
        for one in report["data"]
    ]
    headings = {field: field.replace("_", " ") for row in rows[:1] for field in row if field not in TOTALS}
    admin.show_rows(rows, {**headings, **TOTALS})


def percent(totals: dict[str, Any]) -> str | None:
    """The share of promises kept, for people."""
    attainment = totals["attainment"]
    return None if attainment is None else f"{attainment:.2%}"


def cost(totals: dict[str, Any]) -> str:
    """In dollars."""
    return dollars(totals["cost_nanodollars"])


def named(group: dict[str, str | None]) -> dict[str, str | None]:
    """A group by the names of its members where they have one, else by their ids."""
    shown: dict[str, str | None] = {}
    for field, value in group.items():
        if field.endswith("_name"):
            shown[field.removesuffix("_name")] = value or group[field.removesuffix("name") + "id"]
        elif not field.endswith("_id"):
            shown[field] = value
    return shown
