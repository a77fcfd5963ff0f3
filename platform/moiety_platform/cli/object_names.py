"""Search for objects by their name or id, names of ids for tables, and warnings about unknown models."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from moiety_platform.cli.admin_client import AdminClient
from moiety_platform.cli.errors import CommandError, NotAllowed, Refused
from moiety_platform.cli.printing import print_prose
from moiety_platform.cli.tables import show_time
from moiety_platform.resources.paths import path_of

MAX_SHOWN = 10
ADAPTER_SEPARATOR = ":"  # clients request an adapter as MODEL:NAME

Row = dict[str, Any]

_ID = re.compile(r"[A-Za-z0-9_]{1,32}", re.ASCII)
_KEY_PREFIX = "mty_"


def find_key(client: AdminClient, text: str, *, tenant_id: str | None = None, rotatable: bool = False) -> Row:
    """Return the key with this id, or else the active key with this name.

    `tenant_id` restricts names to one tenant; `rotatable` excludes keys that have a successor. Raises CommandError,
    also if several keys have the name.
    """
    if (found := _by_id(client, "key", text.removeprefix(_KEY_PREFIX))) is not None:
        return found
    named = list(client.pages("/keys", name=text, tenant_id=tenant_id))
    usable = [one for one in named if one["status"] == "active" and not (rotatable and one["replaced_by"])]
    if len(usable) == 1:
        return usable[0]
    if not named:
        raise CommandError(f"there is no key with the id or name {text!r}; see: moiety key list")
    if not usable:
        state = "active key without a successor" if rotatable else "active key"
        raise CommandError(f"no {state} is named {text!r}; see: moiety key list")
    names = ObjectNames(client)
    shown = [f"{one['id']} (of {names.owner_of_key(one)}, {_expiry(one)})" for one in usable]
    raise CommandError(f"{len(usable)} active keys are named {text!r}; give the id of one:\n{_lines(shown)}")


def find_project(client: AdminClient, text: str) -> Row:
    """Return the project with this id, or else the one with this name, as NAME or TENANT/NAME. Raises CommandError."""
    if (found := _by_id(client, "project", text)) is not None:
        return found
    named = list(client.pages("/projects", name=text))
    if not named and "/" in text:
        tenant, _, name = text.partition("/")
        return client.find_project(client.find_tenant(tenant)["id"], name)
    if len(named) == 1:
        return named[0]
    if not named:
        raise CommandError(f"there is no project with the id or name {text!r}; see: moiety project list")
    names = ObjectNames(client)
    shown = [names.project(one["id"]) for one in named]
    raise CommandError(f"{len(named)} tenants have a project {text!r}; give one as TENANT/NAME:\n{_lines(shown)}")


def find_webhook(client: AdminClient, text: str) -> Row:
    """Return the webhook with this address; any other text is returned as its id. Raises CommandError."""
    if "://" not in text:
        return {"id": text}
    return _only(client, "webhooks", "url", text, owner="webhook has", owners="webhooks have", noun="the address")


def find_adapter(client: AdminClient, text: str, *, tenant_id: str | None = None) -> Row:
    """Return the adapter that clients request as MODEL:NAME; any other text is returned as its id.

    `tenant_id` restricts names to one tenant. Raises CommandError.
    """
    if ADAPTER_SEPARATOR not in text:
        return {"id": text}
    words = {"owner": "tenant has", "owners": "tenants have", "noun": "an adapter"}
    return _only(client, "adapters", "served_as", text, **words, tenant_id=tenant_id)


def _only(
    client: AdminClient, collection: str, field: str, text: str, *, owner: str, owners: str, noun: str, **wanted: Any
) -> Row:
    """Return the only object whose field has this text. Raises CommandError, whose text has the other words."""
    found: list[Row] = [one for one in client.get(f"/{collection}", **wanted)["data"] if one[field] == text]
    if len(found) != 1:
        told = f"no {owner}" if not found else f"{len(found)} {owners}"
        raise CommandError(f"{told} {noun} {text!r}; give an id of: moiety {collection.removesuffix('s')} list")
    return found[0]


def find_user(client: AdminClient, text: str, *, tenant_id: str | None = None) -> Row:
    """Return the user with this id, or else the one with this email address. Raises CommandError.

    `tenant_id` restricts addresses to one tenant; otherwise an address with roles in several is an error.
    """
    if "@" not in text:
        if (found := _by_id(client, "user", text)) is not None:
            return found
        raise CommandError(f"there is no user with the id or email address {text!r}; see: moiety user list")
    named = list(client.pages("/users", email=text, tenant_id=tenant_id))
    if not named:
        raise CommandError(f"there is no user with the email address {text!r}; see: moiety user list")
    return _only_named(client, named, f"{text!r} has {len(named)} roles", "{role} of {tenant}")


def find_run(client: AdminClient, text: str, *, tenant_id: str | None = None) -> Row:
    """Return the agent run with this id, or else the only one with this name. Raises CommandError.

    `tenant_id` restricts names to one tenant.
    """
    if (found := _by_id(client, "run", text)) is not None:
        return found
    named: list[Row] = client.get("/runs", name=text, tenant_id=tenant_id)["data"]
    if not named:
        raise CommandError(f"there is no run with the id or name {text!r}; see: moiety run list")
    return _only_named(client, named, f"{len(named)} tenants have a run {text!r}", "of {tenant}")


def _only_named(client: AdminClient, named: Sequence[Row], several: str, form: str) -> Row:
    """Return the only object of a name. Raises CommandError with `several` and the ids, each described by `form`."""
    if len(named) == 1:
        return named[0]
    names = ObjectNames(client)
    shown = [f"{one['id']} ({form.format(**one, tenant=names.tenant_of_row(one))})" for one in named]
    raise CommandError(f"{several}; give the id of one:\n{_lines(shown)}")


def require_tenant_of_name(client: AdminClient, text: str, found: Row) -> None:
    """Raise CommandError for an object that was found by a name which another tenant may use too.

    An administrator of all tenants who means the object of one tenant may find that of another, if only that one
    exists. An id, an object of no tenant, and an administrator who sees one tenant need no more than the name.
    """
    project_id = found.get("project_id")  # of a client's key
    if found["id"] == text.removeprefix(_KEY_PREFIX) or (found.get("tenant_id") is None and project_id is None):
        return
    if len(client.get("/tenants", limit=2)["data"]) < 2:
        return
    names = ObjectNames(client)
    owner = names.tenant_of_row(found) if project_id is None else names.project(project_id)
    raise CommandError(
        f"{text!r} is a name of {owner} now, and can be one of another tenant; give --tenant, or the id {found['id']}"
    )


FINDERS: Mapping[str, Callable[[AdminClient, str], Row]] = MappingProxyType(
    {
        "tenant": lambda client, text: client.find_tenant(text),
        "project": find_project,
        "user": find_user,
        "webhook": find_webhook,
        "adapter": find_adapter,
        "run": find_run,
    }
)
"""Functions that return an object for its name or id, by the name of its resource."""

TENANT_FINDERS: Mapping[str, Callable[..., Row]] = MappingProxyType({"adapter": find_adapter, "run": find_run})
"""Those for names that belong to a tenant; they take its id as `tenant_id`."""


@dataclass
class ObjectNames:
    """Names of tenants, projects and keys by id, each read once. An unknown id is its own name."""

    client: AdminClient
    _rows: dict[str, dict[str, Row]] = field(default_factory=dict)

    def tenant(self, tenant_id: str) -> str:
        return self._name("/tenants", tenant_id)

    def project(self, project_id: str) -> str:
        """Return TENANT/PROJECT."""
        row = self._read("/projects").get(project_id)
        return project_id if row is None else f"{self.tenant(row['tenant_id'])}/{row['name']}"

    def key(self, key_id: str) -> str:
        return self._name("/keys", key_id)

    def owner_of_key(self, key: Mapping[str, Any]) -> str:
        """Return the project of a client's key, or the tenant of an administrator's."""
        if key["project_id"] is not None:
            return self.project(key["project_id"])
        return "all tenants" if key["tenant_id"] is None else self.tenant(key["tenant_id"])

    def tenant_of_row(self, row: Mapping[str, Any]) -> str:
        """Return the tenant that a row belongs to."""
        return "all tenants" if row["tenant_id"] is None else self.tenant(row["tenant_id"])

    def scope(self, level: str, scope_id: str) -> str:
        """Return the name of a tenant, project or key that a quota limits."""
        by_level = {"tenant": self.tenant, "project": self.project, "key": self.key}
        return by_level[level](scope_id)

    def _name(self, path: str, object_id: str) -> str:
        row = self._read(path).get(object_id)
        return object_id if row is None else str(row["name"])

    def _read(self, path: str) -> dict[str, Row]:
        if path not in self._rows:
            self._rows[path] = {row["id"]: row for row in self.client.pages(path)}
        return self._rows[path]


def warn_of_unknown_models(client: AdminClient, models: Iterable[str]) -> None:
    """Write a warning to standard error for each model that no engine serves now.

    Only roles that can read engines get warnings: for others the gateway does not say which models there are.
    """
    wanted = sorted(set(models))
    if not wanted:
        return
    try:
        engines = client.get("/engines")["data"]
    except NotAllowed:
        return
    served = {one["card"]["model"] for one in engines if one["card"] is not None}
    for model in wanted:
        if model not in served and model.partition(ADAPTER_SEPARATOR)[0] not in served:
            known = f"served are: {_some(sorted(served))}" if served else "no engine is connected"
            print_prose(f"warning: no engine serves the model {model!r}; {known}")


def _by_id(client: AdminClient, kind: str, object_id: str) -> Row | None:
    if not _ID.fullmatch(object_id):
        return None
    try:
        return client.get(path_of(f"{kind}s", object_id))
    except Refused as exc:
        if exc.param != f"{kind}_id":
            raise
        return None


def _some(names: list[str]) -> str:
    more = len(names) - MAX_SHOWN
    return ", ".join(names[:MAX_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _lines(names: list[str]) -> str:
    more = len(names) - MAX_SHOWN
    return "\n".join(f"  {name}" for name in [*names[:MAX_SHOWN], *([f"and {more} more"] if more > 0 else [])])


def _expiry(key: Mapping[str, Any]) -> str:
    return "no expiry" if key["expires_at"] is None else f"expires {show_time(key['expires_at'])}"
