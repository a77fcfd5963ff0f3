"""Users in a file that `moiety apply` reads. Invitations are not declared: `moiety user invite` makes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from moiety_platform.access.roles import Role, tenant_complaint
from moiety_platform.resources.apply_kind import (
    AdminRequest,
    ApplyKind,
    DeclaredObject,
    Entry,
    InvalidEntry,
    fields_with_owner,
    name_in_tenant,
    row_name_in_tenant,
)
from moiety_platform.resources.paths import path_of


class UserForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A user. `tenant` is the name of the tenant of the role, left out for a role in all tenants.

    `projects` are the names of the projects that a developer reaches, null for all of the tenant.
    """

    email: str
    role: Role
    tenant: str | None = None
    name: str = ""
    projects: list[str] | None = None


def _objects(entry: Entry) -> Iterator[DeclaredObject]:
    form: UserForm = entry.form
    if complaint := tenant_complaint(form.role, form.tenant):
        raise InvalidEntry(entry.path, complaint)
    fields: dict[str, Any] = {"role": form.role.value}
    if "name" in entry.raw:
        fields["name"] = form.name
    if "projects" in entry.raw:
        if form.projects is not None and (form.role is not Role.DEVELOPER or not form.projects):
            message = "must be left out for roles other than developer" if form.projects else "must name a project"
            raise InvalidEntry(f"{entry.path}.projects", message)
        listed = None if form.projects is None else sorted({name_in_tenant(one, form.tenant) for one in form.projects})
        fields["project_ids"] = listed
    parent = None if form.tenant is None else ("tenant", form.tenant)
    email = form.email.lower()  # as the gateway stores it
    name = name_in_tenant(email, form.tenant)
    yield DeclaredObject("user", name, email, entry.path, fields, parent, identity={"email": email})


USER = ApplyKind(
    kind="user",
    form=UserForm,
    is_paged=True,
    references={"project_ids": "project"},
    objects=_objects,
    name_of=row_name_in_tenant("email"),
    create_request=lambda declared, tenant_id: AdminRequest("POST", "/users", fields_with_owner(declared, tenant_id)),
    change_request=lambda declared, row, change: AdminRequest("PATCH", path_of("users", row["id"]), dict(change)),
    remove_request=lambda row: AdminRequest("DELETE", path_of("users", row["id"])),
    removal_reason="left the file; its keys are revoked",
)
