"""Command `moiety usage`: sums by chosen groups, or single requests."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from moiety_platform.cli.admin_client import AdminClient
from moiety_platform.cli.admin_command import Admin, admin_command
from moiety_platform.cli.engine_journals import compare, read_journals
from moiety_platform.cli.object_names import ObjectNames
from moiety_platform.cli.printing import print_line
from moiety_platform.cli.spend import budgets, forecast, named, spend
from moiety_platform.cli.tables import show_csv, show_json
from moiety_platform.cli.time_options import ReportPeriod
from moiety_platform.cli.usage_options import Grouping, ModelFilter, ReportOptions, TenantFilter, find_tenant_id
from moiety_platform.cli.usage_restore import restore
from moiety_platform.prices.token_cost import dollars

PAGE = 500
TOTALS = {
    "requests": "requests",
    "failed": "failed",
    "rejected": "rejected",
    "disconnected": "disconnected",
    "prompt_tokens": "prompt tokens",
    "cached_tokens": "cached tokens",
    "output_tokens": "output tokens",
    "mean_ttft_ms": "mean TTFT ms",
    "mean_duration_ms": "mean duration ms",
    "preemptions": "preemptions",
    "speculative_tokens": "speculative tokens",
    "speculative_used_tokens": "speculative used",
    "expert_read": "experts read",
    "expert_moved": "experts moved",
    "cost": "$",
    "credit": "credit $",
    "guarantees": "guarantees met",
    "attainment": "SLO attained",
}
DETAILS = (
    "expert_read", "expert_moved", "guarantees", "credit", "speculative_used_tokens", "speculative_tokens",
    "preemptions", "mean_duration_ms", "disconnected", "rejected", "cached_tokens", "mean_ttft_ms", "failed",
    "attainment",
)  # fmt: skip
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
    "slo_attained": "SLO attained",
    "guarantee_met": "guarantee met",
    "credit": "credit $",
    "credit_reason": "reason",
    "end_user": "end user",
    "tags": "tags",
    "request_id": "request",
}
REQUEST_DETAILS = (
    "credit_reason", "guarantee_met", "credit", "num_preemptions", "tags", "end_user", "slo_attained", "http_status",
    "endpoint", "service_class", "duration_ms", "ttft_ms", "prompt_tokens", "output_tokens", "model",
)  # fmt: skip

QUOTES = {
    "service_class": "class",
    "requests": "quoted requests",
    "guarantees": "guarantees met",
    "reasons": "missed by",
    "credit": "credit $",
    "ttft": "TTFT ÷ predicted (p10 · p50 · p90)",
    "duration": "duration ÷ predicted",
}

app = typer.Typer(help="Show usage: requests, tokens, latencies and cost; and reconcile it.")


@app.callback(invoke_without_command=True)
@admin_command
def usage(
    admin: Admin,
    context: typer.Context,
    *,
    by: Grouping = "tenant",
    scope: ReportOptions,
    model: ModelFilter = None,
    requests: Annotated[
        int, typer.Option(min=0, max=500, help="Number of newest single requests to show instead of sums.")
    ] = 0,
) -> None:
    """Show usage: requests, tokens, times and money."""
    if context.invoked_subcommand is not None:
        return
    wanted = {**scope.query_of(admin), "model": model}
    if requests:
        found = admin.client.get("/usage/requests", limit=requests, **wanted)["data"]
        rows = (
            found
            if admin.as_json
            else [{**one, "tags": tags_in_line(one["tags"]), "credit": credit(one)} for one in found]
        )
        if rows and not (scope.as_csv or admin.as_json):
            names = ObjectNames(admin.client)
            rows = [{**one, "tenant_id": names.tenant(one["tenant_id"])} for one in rows]
        show_csv(rows) if scope.as_csv else admin.show_rows(rows, REQUESTS, REQUEST_DETAILS)
        return
    report = admin.client.get("/usage", group_by=by, **wanted)
    if scope.print_data(admin, report, by):
        return
    sums: list[dict[str, Any]] = [
        {**named(one["group"]), **one["totals"], **for_people(one["totals"])} for one in report["data"]
    ]
    groups = {field: field.replace("_", " ") for one in report["data"][:1] for field in named(one["group"])}
    admin.show_rows(sums, {**groups, **TOTALS}, DETAILS)


@app.command("reconcile")
@admin_command
def reconcile(
    admin: Admin,
    period: ReportPeriod,
    journal: Annotated[
        list[Path] | None,
        typer.Option(
            "--journal",
            help="Usage journal of an engine (its --usage-journal). Give the journals of all engines.",
            exists=True,
        ),
    ] = None,
) -> None:
    """Check that requests, ledger, sums and limits agree, and that bills equal the engines' counts.

    Ends with 1 if something differs.
    """
    since, until = period.times(datetime.now(UTC))
    if journal and until is not None:
        raise typer.BadParameter("--journal compares up to now; leave --to out")
    until_text = None if until is None else until.isoformat()
    report = admin.client.get("/usage/reconciliation", since=since.isoformat(), until=until_text)
    if journal:
        report["engines"] = compare(read_journals(journal, since), requests_since(admin.client, since))
    agrees = report["agrees"] and not report.get("engines", {}).get("differences")
    if admin.as_json:
        show_json(report)
    else:
        show_reconciliation(report)
    if not agrees:
        raise typer.Exit(1)


@app.command("quotes")
@admin_command
def quotes(
    admin: Admin,
    period: ReportPeriod,
    tenant: TenantFilter = None,
) -> None:
    """Compare predicted with actual times of requests that had a quote; show met guarantees, credits and reasons."""
    tenant_id = find_tenant_id(admin, tenant)
    report = admin.client.get("/usage/quotes", tenant_id=tenant_id, **period.query())
    if admin.as_json:
        show_json(report)
        return
    rows = [
        {
            **one,
            "credit": credit(one),
            "guarantees": guarantees(one),
            "reasons": ", ".join(f"{reason} {count}" for reason, count in one["credit_reasons"].items()),
            "ttft": ratios(one["ttft_ratio"]),
            "duration": ratios(one["duration_ratio"]),
        }
        for one in report["data"]
    ]
    admin.show_rows(rows, QUOTES)


app.command("restore")(restore)
app.command("spend")(spend)
app.command("forecast")(forecast)
app.command("budgets")(budgets)


def requests_since(client: AdminClient, since: datetime) -> dict[str, dict[str, Any]]:
    """Return all requests by their id."""
    found: dict[str, dict[str, Any]] = {}
    cursor: str | None = ""
    while cursor is not None:
        page = client.get("/usage/requests", limit=PAGE, since=since.isoformat(), cursor=cursor or None)
        found |= {row["request_id"]: row for row in page["data"]}
        cursor = page["next_cursor"]
    return found


def show_reconciliation(report: dict[str, Any]) -> None:
    """Print a reconciliation for people."""
    total = report["total"]
    print_line(f"tenants: {report['tenants']}, requests: {total['requests']}, output tokens: {total['output_tokens']}")
    print_line("requests, ledger and sums agree" if not report["differences"] else "they differ:")
    for one in report["differences"]:
        print_line(f"  tenant {one['tenant_id']}: {one['requests']} · {one['ledger']} · {one['hours']}")
    if report["days"]:
        print_line(
            "sums of days differ from the sums of their hours; DELETE FROM usage_day_marks makes retention compute "
            "them again:"
        )
    for one in report["days"]:
        print_line(f"  tenant {one['tenant_id']}: {one['days']} · {one['hours']}")
    unbilled = report.get("quarantined_usage", {})
    if unbilled.get("rows") or unbilled.get("unreadable_lines"):
        print_line(
            f"not billed: {unbilled['rows']} quarantined rows, and {unbilled['unreadable_lines']} unreadable lines;"
        )
        print_line("so requests and bills do not agree; write them to the database: moiety usage restore")
    for one in unbilled.get("shown", ()):
        print_line(f"  {one['request_id']} of tenant {one['tenant_id']}, begun {one['started_at']}")
    print_line("limits add up" if not report["windows"] else "limits differ from their leases:")
    for one in report["windows"]:
        print_line(f"  {one}")
    for one in report["quarantined"]:
        print_line(f"of {one['replica_id']}, which died, {one['leases']} leases are not proven unspent")
    engines = report.get("engines")
    if engines is not None:
        print_line(f"{engines['compared']} requests compared with the engines' count; {engines['unproven']} unproven")
        for one in engines["differences"]:
            print_line(f"  {one['request_id']}: billed {one['billed']}, counted {one['counted']}")


def for_people(totals: dict[str, Any]) -> dict[str, str | None]:
    """Return the totals that a table shows in another form than JSON."""
    return {
        "attainment": percent(totals),
        "cost": cost(totals),
        "credit": credit(totals),
        "guarantees": guarantees(totals),
        "expert_read": in_bytes(totals["expert_read_bytes"]),
        "expert_moved": in_bytes(totals["expert_moved_bytes"]),
    }


def in_bytes(count: int | None) -> str | None:
    """Return bytes with a decimal prefix, such as 12.3 GB."""
    if count is None or count < 1000:
        return None if count is None else f"{count} B"
    size, prefixes = count / 1000, iter("kMGTPE")
    prefix = next(prefixes)
    while size >= 999.95 and (larger := next(prefixes, None)) is not None:
        size, prefix = size / 1000, larger
    return f"{size:.1f} {prefix}B"


def percent(totals: dict[str, Any]) -> str | None:
    """Return the SLO attainment as a percentage, for people."""
    attainment = totals["attainment"]
    return None if attainment is None else f"{attainment:.2%}"


def cost(totals: dict[str, Any]) -> str:
    """Return the cost in dollars."""
    return dollars(totals["cost_nanodollars"])


def credit(amounts: dict[str, Any]) -> str | None:
    """Return the credits in dollars, or None if there are none."""
    return dollars(amounts["credit_nanodollars"]) if amounts["credit_nanodollars"] else None


def guarantees(totals: dict[str, Any]) -> str | None:
    """Return how many of the quotes' guarantees were kept, such as 8 of 9, or None if there are none."""
    return f"{totals['num_guarantees_met']} of {totals['num_guarantees']}" if totals["num_guarantees"] else None


def ratios(found: dict[str, float] | None) -> str | None:
    """Return percentiles of actual divided by predicted times in one line."""
    return None if found is None else " · ".join(f"{found[name]:.2f}" for name in ("p10", "median", "p90"))


def tags_in_line(tags: dict[str, str]) -> str:
    """Return a request's tags in one line."""
    return ", ".join(f"{name}={value}" for name, value in tags.items())
