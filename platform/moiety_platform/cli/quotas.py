"""`moiety quota …`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from moiety_platform.cli.admin_client import DEFAULT_DATA_DIR, AdminClient, AdminKey, AsJson, DataDirOption, Url
from moiety_platform.cli.tables import show_row, show_rows

COLUMNS = {
    "level": "of",
    "scope_id": "id",
    "kind": "limit",
    "cap": "cap",
    "used": "used",
    "reserved": "reserved",
    "resets_at": "renewed",
    "id": "limit's id",
}

app = typer.Typer(no_args_is_help=True, help="Limits: how many tokens a tenant, a project or a key may use.")

TenantOption = Annotated[str | None, typer.Option(help="A tenant's (name or id).")]
ProjectOption = Annotated[str | None, typer.Option(help="A project's (id).")]
KeyOption = Annotated[str | None, typer.Option(help="A key's (id).")]
QuotaId = Annotated[str, typer.Argument(help="Id of the limit; list them with: moiety quota list.")]


@app.command("list")
def list_quotas(
    tenant: TenantOption = None,
    project: ProjectOption = None,
    key: KeyOption = None,
    url: Url = None,
    admin_key: AdminKey = None,
    data_dir: DataDirOption = DEFAULT_DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """Limits with what is used of them, oldest first; of one tenant, project or key if that is given."""
    client = AdminClient.connect(url, admin_key, data_dir)
    given = _scopes(client, tenant, project, key)
    scope_id = given[0][1] if given else None
    show_rows(list(client.pages("/quotas", scope_id=scope_id)), COLUMNS, as_json)


@app.command("set")
def set_quota(
    tenant: TenantOption = None,
    project: ProjectOption = None,
    key: KeyOption = None,
    tokens_per_day: Annotated[int | None, typer.Option(min=0, help="Prompt and output tokens, a UTC day.")] = None,
    tokens_per_month: Annotated[int | None, typer.Option(min=0, help="The same for a calendar month, UTC.")] = None,
    url: Url = None,
    admin_key: AdminKey = None,
    data_dir: DataDirOption = DEFAULT_DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """Set limits, or change their caps. They hold at every gateway within seconds."""
    caps = {"tokens_per_day": tokens_per_day, "tokens_per_month": tokens_per_month}
    chosen = {kind: cap for kind, cap in caps.items() if cap is not None}
    client = AdminClient.connect(url, admin_key, data_dir)
    given = _scopes(client, tenant, project, key)
    if len(given) != 1 or not chosen:
        raise typer.BadParameter("give one of --tenant, --project and --key, and --tokens-per-day or another limit")
    level, scope_id = given[0]
    rows: list[dict[str, Any]] = [
        client.call("PUT", "/quotas", {"level": level, "scope_id": scope_id, "kind": kind, "cap": cap})
        for kind, cap in chosen.items()
    ]
    show_rows(rows, COLUMNS, as_json)


@app.command("delete")
def delete_quota(
    quota_id: QuotaId,
    url: Url = None,
    admin_key: AdminKey = None,
    data_dir: DataDirOption = DEFAULT_DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """Take a limit away."""
    show_row(AdminClient.connect(url, admin_key, data_dir).call("DELETE", f"/quotas/{quota_id}"), as_json)


def _scopes(client: AdminClient, tenant: str | None, project: str | None, key: str | None) -> list[tuple[str, str]]:
    """What was named, as (level, id)."""
    found = []
    if tenant is not None:
        found.append(("tenant", client.find_tenant(tenant)["id"]))
    if project is not None:
        found.append(("project", project))
    if key is not None:
        found.append(("key", key))
    return found
