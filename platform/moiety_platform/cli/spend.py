"""Commands `moiety usage spend`, `forecast` and `budgets`: what usage costs, will cost, and may cost."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from moiety_platform.cli.admin_command import Admin, admin_command
from moiety_platform.cli.object_names import ObjectNames
from moiety_platform.cli.tables import show_json
from moiety_platform.cli.usage_options import Grouping, ModelFilter, ReportOptions, TenantFilter, find_tenant_id
from moiety_platform.prices.token_cost import dollars

SPEND = {
    "requests": "requests",
    "prompt_tokens": "prompt tokens",
    "cached_tokens": "of them cached",
    "output_tokens": "output tokens",
    "before_credits": "before credits $",
    "credit": "credit $",
    "cost": "$",
    "share": "share",
}
SPEND_DETAILS = ("cached_tokens", "before_credits", "credit", "prompt_tokens", "share")
BUDGETS = {
    "scope": "scope",
    "limit": "limit",
    "cap": "cap $",
    "used": "used $",
    "share": "used",
    "rate": "$ a day",
    "forecast": "forecast $",
    "exhausted_at": "used up",
    "window_end": "ends",
    "quota_id": "quota",
}
BUDGET_DETAILS = ("quota_id", "window_end", "rate")


@admin_command
def spend(
    admin: Admin,
    *,
    by: Grouping = "tenant",
    scope: ReportOptions,
    model: ModelFilter = None,
    service_class: Annotated[
        str | None, typer.Option("--class", help="Name of a service class. If not given, all classes.")
    ] = None,
) -> None:
    """Show what was spent, after credits; the figures are those of `moiety usage` and of the ledger."""
    wanted = {**scope.query_of(admin), "model": model, "service_class": service_class}
    report = admin.client.get("/spend", group_by=by, **wanted)
    if scope.print_data(admin, report, by):
        return
    whole = report["total"]["cost_nanodollars"]
    rows = [{**named(one["group"]), **_in_dollars(one["totals"], whole)} for one in report["data"]]
    groups = {field: field.replace("_", " ") for one in report["data"][:1] for field in named(one["group"])}
    if rows and groups:
        rows.append({**dict.fromkeys(groups), next(iter(groups)): "total", **_in_dollars(report["total"], whole)})
    admin.show_rows(rows, {**groups, **SPEND}, SPEND_DETAILS)


@admin_command
def forecast(
    admin: Admin,
    tenant: TenantFilter = None,
    model: ModelFilter = None,
) -> None:
    """Forecast the spend of this month: what is spent, plus the mean of the last seven days for the rest of it."""
    found = admin.client.get("/spend/forecast", tenant_id=find_tenant_id(admin, tenant), model=model)
    if admin.as_json:
        show_json(found)
        return
    admin.show_row(
        {
            "month": f"{found['month_start'][:10]} to {found['month_end'][:10]}, UTC",
            "spent_$": dollars(found["spent_nanodollars"]),
            "$_a_day": dollars(found["rate_nanodollars_per_day"]),
            "mean_since": found["rate_since"],
            "forecast_$": dollars(found["forecast_nanodollars"]),
        }
    )


@admin_command
def budgets(admin: Admin, tenant: TenantFilter = None) -> None:
    """List the limits on money: what is used, the forecast for the end of their window, and when they are used up."""
    tenant_id = find_tenant_id(admin, tenant)
    found = list(admin.client.pages("/spend/budgets", tenant_id=tenant_id))
    if admin.as_json:
        show_json({"data": found})
        return
    names = ObjectNames(admin.client)
    rows = [
        {
            **one,
            "scope": names.scope(one["level"], one["scope_id"]),
            "limit": one["kind"].replace("_", " "),
            "cap": dollars(one["cap_nanodollars"]),
            "used": dollars(one["used_nanodollars"]),
            "share": _share(one["used_nanodollars"], one["cap_nanodollars"]),
            "rate": dollars(one["rate_nanodollars_per_day"]),
            "forecast": dollars(one["forecast_nanodollars"]),
        }
        for one in found
    ]
    admin.show_rows(rows, BUDGETS, BUDGET_DETAILS)


def _in_dollars(totals: dict[str, Any], whole: int) -> dict[str, Any]:
    return {
        **totals,
        "before_credits": dollars(totals["cost_before_credits_nanodollars"]),
        "credit": dollars(totals["credit_nanodollars"]) if totals["credit_nanodollars"] else None,
        "cost": dollars(totals["cost_nanodollars"]),
        "share": _share(totals["cost_nanodollars"], whole),
    }


def _share(part: int, whole: int) -> str | None:
    return f"{part / whole:.1%}" if whole else None


def named(group: dict[str, str | None]) -> dict[str, str | None]:
    """Return a group by the names of its members, or by their ids if they have no name."""
    shown: dict[str, str | None] = {}
    for field, value in group.items():
        if field.endswith("_name"):
            shown[field.removesuffix("_name")] = value or group[field.removesuffix("name") + "id"]
        elif not field.endswith("_id"):
            shown[field] = value
    return shown
