"""Tenants and their projects in a file that `moiety apply` reads."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec

from moiety_platform.resources.apply_kind import (
    AdminRequest,
    ApplyKind,
    DeclaredObject,
    Entry,
    ObjectPlace,
    Removal,
    Row,
)
from moiety_platform.resources.paths import path_of


class TenantForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tenant. `models` apply to its keys without models of their own; `service_class` is the best that it may use."""

    name: str
    service_class: str | None = None
    weight: float | None = None
    status: Literal["active", "suspended"] | None = None
    models: list[str] | None = None


class ProjectForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A project of a tenant."""

    name: str


def _tenant_objects(entry: Entry) -> Iterator[DeclaredObject]:
    given = ("service_class", "weight", "status")
    fields = {name: entry.raw[name] for name in given if entry.raw.get(name) is not None}
    name = unicodedata.normalize("NFC", entry.form.name)  # as the gateway stores it
    yield DeclaredObject("tenant", entry.form.name, entry.form.name, entry.path, {"name": name, **fields})


def _project_objects(entry: Entry) -> Iterator[DeclaredObject]:
    assert entry.parent is not None
    yield DeclaredObject(
        "project", f"{entry.parent.name}/{entry.form.name}", entry.form.name, entry.path, {}, entry.parent.place
    )


def _create_tenant(declared: DeclaredObject, _: str) -> AdminRequest:
    return AdminRequest(
        "POST", "/tenants", {name: value for name, value in declared.fields.items() if name != "status"}
    )


def _set_status(declared: DeclaredObject, row: Row) -> AdminRequest | None:
    status = declared.fields.get("status", "active")
    return None if status == row["status"] else AdminRequest("PATCH", path_of("tenants", row["id"]), {"status": status})


def _change_tenant(_: DeclaredObject, row: Row, change: Mapping[str, Any]) -> AdminRequest:
    return AdminRequest("PATCH", path_of("tenants", row["id"]), dict(change))


def _note(declared: DeclaredObject, row: Row) -> str:
    sleeps = "status" not in declared.fields and row["status"] != "active"
    return "suspended; set status: active to resume it" if sleeps else ""


def _project_name(row: Row, names: Mapping[ObjectPlace, str]) -> str:
    return f"{names.get(('tenant', row['tenant_id']), row['tenant_id'])}/{row['name']}"


TENANT = ApplyKind(
    kind="tenant",
    form=TenantForm,
    objects=_tenant_objects,
    is_paged=True,
    keeps_name=True,
    name_of=lambda row, names: row["name"],
    create_request=_create_tenant,
    follow_up_request=_set_status,
    change_request=_change_tenant,
    remove_request=lambda row: AdminRequest("PATCH", path_of("tenants", row["id"]), {"status": "suspended"}),
    removal=Removal.SUSPEND,
    removal_reason="tenants are not deleted; moiety tenant erase deletes their data",
    tenant_of=lambda row: str(row["id"]),
    note=_note,
)

PROJECT = ApplyKind(
    kind="project",
    form=ProjectForm,
    within=("tenant",),
    objects=_project_objects,
    is_paged=True,
    keeps_name=True,
    name_of=_project_name,
    create_request=lambda declared, parent: AdminRequest(
        "POST", "/projects", {"name": declared.api_name, "tenant_id": parent}
    ),
    removal=Removal.RELEASE,
    removal_reason="projects are not deleted; its declared keys are revoked",
)
