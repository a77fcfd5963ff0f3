"""Current state of the gateway, by the names that a file would use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moiety_platform.cli.admin_client import AdminClient
from moiety_platform.cli.apply.spec import limit_name, price_name
from moiety_platform.cli.errors import Refused
from moiety_platform.cli.gateway_client import path_of

Place = tuple[str, str]  # kind and name


@dataclass(frozen=True)
class DeclaredEntry:
    """Entry of the ledger of declared objects."""

    source: str
    object_id: str | None


@dataclass(frozen=True)
class Current:
    """Objects as the admin API shows them; `claims` is the ledger."""

    rows: dict[Place, dict[str, Any]]
    claims: dict[Place, DeclaredEntry]


def read_current(client: AdminClient) -> Current:
    """Read the current state. Raises CommandError."""
    ledger = client.get("/declarations")["data"]
    claims = {(one["kind"], one["name"]): DeclaredEntry(one["source"], one["object_id"]) for one in ledger}
    known = {(kind, claim.object_id): name for (kind, name), claim in claims.items() if claim.object_id is not None}
    rows: dict[Place, dict[str, Any]] = {("class", row["name"]): row for row in client.get("/classes")["data"]}
    for row in client.get("/prices")["data"]:
        rows["price", price_name(row["model"], row["service_class"])] = row
    scopes: dict[Place, str] = {}  # level and id → name
    tenants = list(client.pages("/tenants"))
    # an object in the ledger keeps its name there, even if it was renamed since
    for row in sorted(tenants, key=lambda row: ("tenant", row["id"]) in known):
        name = scopes["tenant", row["id"]] = known.get(("tenant", row["id"]), row["name"])
        rows["tenant", name] = row
    for row in client.pages("/projects"):
        own = f"{scopes.get(('tenant', row['tenant_id']), row['tenant_id'])}/{row['name']}"
        name = scopes["project", row["id"]] = known.get(("project", row["id"]), own)
        rows["project", name] = row
    for (kind, key_id), name in known.items():
        if kind == "key" and (found := _find(client, path_of("keys", key_id))) is not None:
            rows["key", name], scopes["key", str(key_id)] = found, name
    for row in client.pages("/quotas"):
        if (scope := scopes.get((row["level"], row["scope_id"]))) is not None:
            rows["limit", limit_name(scope, row["kind"])] = row
    for row in client.get("/webhooks")["data"]:
        if (webhook := known.get(("webhook", row["id"]))) is not None:
            rows["webhook", webhook] = row
    return Current(rows, claims)


def _find(client: AdminClient, path: str) -> dict[str, Any] | None:
    try:
        return client.get(path)
    except Refused:
        return None
