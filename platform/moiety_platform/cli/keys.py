"""Commands `moiety key …`, which find tenants, projects and keys by their names first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import typer

from moiety_platform.access.roles import Role, tenant_complaint
from moiety_platform.auth.admin_resource import KEEP_KEY_NOTICE, KEYS
from moiety_platform.cli.admin_client import AdminClient
from moiety_platform.cli.admin_command import Admin, admin_command
from moiety_platform.cli.object_names import (
    ObjectNames,
    find_key,
    find_project,
    require_tenant_of_name,
    warn_of_unknown_models,
)
from moiety_platform.cli.printing import print_line
from moiety_platform.cli.resource_commands import show_secret
from moiety_platform.cli.tables import show_time
from moiety_platform.prices.token_cost import dollars, parse_dollars
from moiety_platform.quota.kinds import LimitKind
from moiety_platform.resources.paths import path_of

DEFAULT_PROJECT = "default"

KeyArgument = Annotated[
    str, typer.Argument(help="Id of the key (the part between mty_ and the dot), or name of an active key.")
]
KeyLimits = Annotated[
    list[str] | None,
    typer.Option(
        help="Quota of the key as KIND=AMOUNT, such as tokens_per_day=100000 or dollars_per_month=20. May be given "
        "several times.",
    ),
]
KeyTenant = Annotated[
    str | None,
    typer.Option(
        "--tenant",
        help="Name or id of the tenant whose key the name means. Needed with a name if you see several tenants.",
    ),
]


@admin_command
def list_keys(
    admin: Admin,
    tenant: Annotated[str | None, typer.Option(help="Name or id of a tenant. If not given, all tenants.")] = None,
    project: Annotated[
        str | None, typer.Option(help="Id or name of a project, or TENANT/NAME. If not given, all projects.")
    ] = None,
    role: Annotated[
        Role | None, typer.Option(help="Role of administrators' keys. If not given, keys of all roles.")
    ] = None,
) -> None:
    """List keys, oldest first, without their secrets. Those with a role are administrators'.

    The spend is that of this month, in UTC.
    """
    tenant_id = admin.client.find_tenant(tenant)["id"] if tenant is not None else None
    project_id = None if project is None else _project_id(admin.client, tenant_id, project)
    rows = list(admin.client.pages("/keys", tenant_id=tenant_id, project_id=project_id, role=role, details="true"))
    if admin.as_json:
        admin.show_rows(rows, KEYS.columns)
        return
    names = ObjectNames(admin.client)
    shown = [
        {
            **row,
            "belongs_to": row["project_id"] or row["tenant_id"],
            "owner": names.owner_of_key(row),
            **_shown_details(row["details"]),
        }
        for row in rows
    ]
    admin.show_rows(shown, KEYS.columns, KEYS.details)


@admin_command
def create_key(
    admin: Admin,
    name: Annotated[str, typer.Argument(help="Name of the key.")],
    tenant: Annotated[
        str | None,
        typer.Option(
            help="Name or id of the tenant that the key belongs to, or that an administrator is restricted to."
        ),
    ] = None,
    project: Annotated[
        str, typer.Option(help="Name or id of the tenant's project. `default` is created if it does not exist.")
    ] = DEFAULT_PROJECT,
    role: Annotated[
        Role | None,
        typer.Option(
            help="Create an administrator's key with this role. tenant-admin requires --tenant, viewer accepts it."
        ),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="Name of a model that the key may use. May be given several times. If not given, all models."
        ),
    ] = None,
    expires_in_days: Annotated[
        float | None, typer.Option(min=0.0001, max=36500, help="Lifetime of the key, in days. If not given, unlimited.")
    ] = None,
    limit: KeyLimits = None,
) -> None:
    """Create a key for a tenant's clients, or with --role one for an administrator, which only owners may.

    Standard output has the key alone; its id and expiry are on standard error.
    """
    body: dict[str, Any] = {"name": name, "allowed_models": model or None}
    if role is not None:
        if complaint := tenant_complaint(role, tenant):
            raise typer.BadParameter(complaint)
        tenant_id = None if tenant is None else admin.client.find_tenant(tenant)["id"]
        body |= {"role": role, "tenant_id": tenant_id}
    elif tenant is not None:
        body["project_id"] = find_or_make_project(admin.client, admin.client.find_tenant(tenant)["id"], project)
    else:
        raise typer.BadParameter("give --tenant, --role or both")
    if expires_in_days is not None:
        body["expires_at"] = (datetime.now(UTC) + timedelta(days=expires_in_days)).isoformat()
    if limit:
        body["limits"] = parse_limits(limit)
    warn_of_unknown_models(admin.client, model or ())
    made = admin.client.call("POST", "/keys", body)
    show_secret(admin, made, KEEP_KEY_NOTICE)
    if not admin.as_json:
        _tell(f"id {made['key']['id']}, {_expiry(made['key'])}")


@admin_command
def rotate_key(
    admin: Admin,
    key: KeyArgument,
    tenant: KeyTenant = None,
    grace_s: Annotated[
        int | None,
        typer.Option(min=0, help="Time for which the old key remains valid, in seconds. If not given, one day."),
    ] = None,
) -> None:
    """Create a key's successor, with the same rights. The old key remains valid for a grace period.

    Standard output has the new key alone; both ids, the expiry and the end of the grace are on standard error.
    """
    old = _find(admin.client, key, tenant, rotatable=True)
    path = path_of("keys", old["id"])
    body = None if grace_s is None else {"grace_s": grace_s}
    made = admin.client.call("POST", f"{path}/rotate", body)
    show_secret(admin, made, KEEP_KEY_NOTICE)
    if not admin.as_json:
        _tell(f"id {made['key']['id']}, {_expiry(made['key'])}")
        end = show_time(admin.client.get(path)["expires_at"])
        _tell(f"the old key {old['id']} is valid until {end}")


@admin_command
def revoke_key(admin: Admin, key: KeyArgument, tenant: KeyTenant = None) -> None:
    """Revoke a key permanently."""
    found = _find(admin.client, key, tenant)
    admin.show_row(admin.client.call("POST", path_of("keys", found["id"], "revoke")))


def _find(client: AdminClient, text: str, tenant: str | None, *, rotatable: bool = False) -> dict[str, Any]:
    """Return the key that a command changes. Raises CommandError, also for a name of any of several tenants."""
    tenant_id = None if tenant is None else client.find_tenant(tenant)["id"]
    found = find_key(client, text, tenant_id=tenant_id, rotatable=rotatable)
    if tenant_id is None:
        require_tenant_of_name(client, text, found)
    return found


def parse_limits(texts: Sequence[str]) -> dict[str, int]:
    """Return the caps of texts KIND=AMOUNT, in the units of the API. Raises typer.BadParameter."""
    found: dict[str, int] = {}
    for text in texts:
        name, _, amount = text.partition("=")
        kind = name.strip().replace("-", "_").replace("dollars", "money")
        if kind not in frozenset(LimitKind):
            known = ", ".join(one.replace("money", "dollars") for one in LimitKind)
            raise typer.BadParameter(f"--limit must be KIND=AMOUNT with a kind of {known}, not {text!r}")
        try:
            found[kind] = parse_dollars(amount) if kind.startswith("money") else int(amount)
        except ValueError as exc:
            raise typer.BadParameter(f"--limit {name}: {amount!r} is not an amount") from exc
    return found


def _shown_details(details: Mapping[str, Any]) -> dict[str, Any]:
    """Return the details of a key for a table: last use, spend and quotas."""
    limits = ", ".join(
        f"{kind.replace('money', 'dollars')} {dollars(cap) if kind.startswith('money') else cap}"
        for kind, cap in details["limits"].items()
    )
    return {
        "last_used_at": details["last_used_at"],
        "spend": f"$ {dollars(details['month_cost_nanodollars'])}",
        "limits": limits or None,
    }


def find_or_make_project(client: AdminClient, tenant_id: str, name: str) -> str:
    """Return the project's id; a missing `default` is created, so that a tenant's first key needs only one command."""
    if name == DEFAULT_PROJECT and not list(client.pages("/projects", tenant_id=tenant_id, name=name)):
        return str(client.call("POST", "/projects", {"name": name, "tenant_id": tenant_id})["id"])
    return str(client.find_project(tenant_id, name)["id"])


def _project_id(client: AdminClient, tenant_id: str | None, text: str) -> str:
    found = find_project(client, text) if tenant_id is None else client.find_project(tenant_id, text)
    return str(found["id"])


def _expiry(key: dict[str, Any]) -> str:
    return "does not expire" if key["expires_at"] is None else f"expires {show_time(key['expires_at'])}"


def _tell(text: str) -> None:
    print_line(text, err=True)
