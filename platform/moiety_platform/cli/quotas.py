"""Commands `moiety quota list` and `set`, which take a limit of each kind as an option."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from moiety_platform.cli.admin_client import AdminClient
from moiety_platform.cli.admin_command import Admin, admin_command
from moiety_platform.cli.object_names import ObjectNames, find_key, find_project
from moiety_platform.prices.token_cost import parse_dollars
from moiety_platform.quota.admin_resource import QUOTAS, plain

WINDOWS = ("_per_day", "_per_month")

TenantOption = Annotated[str | None, typer.Option(help="Name or id of the tenant that the limit is for.")]
ProjectOption = Annotated[
    str | None, typer.Option(help="Id or name of the project that the limit is for, or TENANT/NAME.")
]
KeyOption = Annotated[str | None, typer.Option(help="Id of the key that the limit is for, or name of an active key.")]


@admin_command
def list_quotas(
    admin: Admin,
    tenant: TenantOption = None,
    project: ProjectOption = None,
    key: KeyOption = None,
) -> None:
    """List limits with their use, oldest first; of one tenant, project or key if that is given."""
    given = _scopes(admin.client, tenant, project, key)
    scope_id = given[0][1] if given else None
    _show(admin, list(admin.client.pages("/quotas", scope_id=scope_id)))


@admin_command
def set_quota(
    admin: Admin,
    tenant: TenantOption = None,
    project: ProjectOption = None,
    key: KeyOption = None,
    requests_per_minute: Annotated[
        int | None, typer.Option(min=0, help="Largest number of requests per minute (a token bucket).")
    ] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(min=0, help="Largest number of prompt and output tokens per minute (a token bucket).")
    ] = None,
    concurrent_requests: Annotated[
        int | None, typer.Option(min=0, help="Largest number of concurrent requests.")
    ] = None,
    token_counts_per_minute: Annotated[
        int | None,
        typer.Option(min=0, help="Largest number of requests per minute that only count tokens or get a quote."),
    ] = None,
    tokens_per_day: Annotated[
        int | None, typer.Option(min=0, help="Largest number of prompt and output tokens per day (UTC).")
    ] = None,
    tokens_per_month: Annotated[int | None, typer.Option(min=0, help="The same per calendar month (UTC).")] = None,
    dollars_per_day: Annotated[
        str | None, typer.Option(help="Largest cost per day (UTC) in US dollars, by the prices of `moiety price`.")
    ] = None,
    dollars_per_month: Annotated[str | None, typer.Option(help="The same per calendar month (UTC).")] = None,
    alert_at: Annotated[
        str | None,
        typer.Option(
            help="Percentages of the daily and monthly caps at which webhooks are notified, such as 50,80,100; or none."
        ),
    ] = None,
) -> None:
    """Set limits, or change their caps, with effect at every gateway within seconds."""
    percents = thresholds(alert_at)
    caps = {
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "concurrent_requests": concurrent_requests,
        "token_counts_per_minute": token_counts_per_minute,
        "tokens_per_day": tokens_per_day,
        "tokens_per_month": tokens_per_month,
        "money_per_day": nano_dollars(dollars_per_day),
        "money_per_month": nano_dollars(dollars_per_month),
    }
    chosen = {kind: cap for kind, cap in caps.items() if cap is not None}
    if sum(given is not None for given in (tenant, project, key)) != 1 or not chosen:
        raise typer.BadParameter("give one of --tenant, --project and --key, and --tokens-per-day or another limit")
    if percents and not any(kind.endswith(WINDOWS) for kind in chosen):
        raise typer.BadParameter("--alert-at applies to limits per day or month; set one of these as well")
    ((level, scope_id),) = _scopes(admin.client, tenant, project, key)
    rows = []
    for kind, cap in chosen.items():
        body: dict[str, Any] = {"level": level, "scope_id": scope_id, "kind": kind, "cap": cap}
        if percents is not None and kind.endswith(WINDOWS):
            body["alert_at"] = percents
        rows.append(admin.client.call("PUT", "/quotas", body))
    _show(admin, rows)


def _scopes(client: AdminClient, tenant: str | None, project: str | None, key: str | None) -> list[tuple[str, str]]:
    """Return the given scopes as (level, id)."""
    found = []
    if tenant is not None:
        found.append(("tenant", client.find_tenant(tenant)["id"]))
    if project is not None:
        found.append(("project", find_project(client, project)["id"]))
    if key is not None:
        found.append(("key", find_key(client, key)["id"]))
    return found


def nano_dollars(text: str | None) -> int | None:
    """Return an amount in dollars as nano-dollars. Raises typer.BadParameter."""
    try:
        return None if text is None else parse_dollars(text)
    except ValueError as exc:
        raise typer.BadParameter(str(exc)) from exc


def thresholds(text: str | None) -> list[int] | None:
    """Return the given percents; an empty list for `none`. Raises typer.BadParameter."""
    if text is None or text.strip() == "none":
        return None if text is None else []
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as exc:
        raise typer.BadParameter("--alert-at must be whole percentages, such as 50,80,100, or none") from exc


def _show(admin: Admin, rows: list[dict[str, Any]]) -> None:
    """Show limits; JSON has nano-dollars, tables dollars and names."""
    if not admin.as_json:
        names = ObjectNames(admin.client)
        rows = [{**plain(row), "name": names.scope(row["level"], row["scope_id"])} for row in rows]
    admin.show_rows(rows, QUOTAS.columns, QUOTAS.details)
