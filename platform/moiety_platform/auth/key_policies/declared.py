"""Key policies in a file that `moiety apply` reads: one part of a tenant."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from moiety_platform.prices.declared import nano_dollars_of
from moiety_platform.quota.declared import LimitForm
from moiety_platform.resources.apply_kind import (
    AdminRequest,
    ApplyKind,
    DeclaredObject,
    Entry,
    InvalidEntry,
    ObjectPlace,
    Row,
)
from moiety_platform.resources.paths import path_of

_FIELDS = ("makes_keys", "max_keys", "max_days", "allowed_models", "limits")


class KeyPolicyForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Key policy of a tenant. `limits` are the highest quotas of a key; money in dollars."""

    makes_keys: bool = True
    max_keys: int = 5
    max_days: int | None = None
    allowed_models: list[str] | None = None
    limits: LimitForm = LimitForm()


def _objects(entry: Entry) -> Iterator[DeclaredObject]:
    assert entry.parent is not None
    if not entry.raw:  # the tenant has no such part
        return
    form: KeyPolicyForm = entry.form
    if form.limits.alert_at is not None:
        raise InvalidEntry(f"{entry.path}.limits.alert_at", "is for quotas, not for a policy; leave it out")
    fields: dict[str, Any] = {name: getattr(form, name) for name in _FIELDS if name in entry.raw}
    if fields.get("allowed_models") is not None:
        fields["allowed_models"] = sorted(set(fields["allowed_models"]))
    if "limits" in fields:
        fields["limits"] = _caps(entry.path, form.limits)
    name = entry.parent.name
    yield DeclaredObject("key_policy", name, name, entry.path, fields, entry.parent.place)


def _caps(path: str, form: LimitForm) -> dict[str, int]:
    """Return the caps by kind, as the admin API shows them."""
    given = {name: getattr(form, name) for name in LimitForm.__struct_fields__ if name != "alert_at"}
    return {
        name.replace("dollars", "money"): nano_dollars_of(f"{path}.limits.{name}", value)
        if name.startswith("dollars")
        else value
        for name, value in given.items()
        if value is not None
    }


def _name_of_row(row: Row, names: Mapping[ObjectPlace, str]) -> str | None:
    return names.get(("tenant", row["tenant_id"]))


def _change(_: DeclaredObject, row: Row, change: Mapping[str, Any]) -> AdminRequest:
    kept = {name: row[name] for name in (*_FIELDS, "tenant_id")}
    return AdminRequest("PUT", "/key-policies", {**kept, **change})


KEY_POLICY = ApplyKind(
    kind="key_policy",
    form=KeyPolicyForm,
    plural="key_policy",
    resource="key-policies",
    within=("tenant",),
    is_list=False,
    is_paged=True,
    has_id=False,
    objects=_objects,
    name_of=_name_of_row,
    create_request=lambda declared, tenant_id: AdminRequest(
        "PUT", "/key-policies", {"tenant_id": tenant_id, **declared.fields}
    ),
    custom_read_request=lambda row: AdminRequest("GET", path_of("key-policies", row["tenant_id"])),
    change_request=_change,
    remove_request=lambda row: AdminRequest("DELETE", path_of("key-policies", row["tenant_id"])),
)
