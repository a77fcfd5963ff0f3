"""Guardrails in a file that `moiety apply` reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from moiety_platform.guardrails.terms import Detector, GuardrailAction, GuardrailFailure, GuardrailStage
from moiety_platform.resources.apply_kind import (
    AdminRequest,
    ApplyKind,
    DeclaredObject,
    Entry,
    InvalidEntry,
    Row,
    fields_with_owner,
    name_in_tenant,
    row_name_in_tenant,
)
from moiety_platform.resources.paths import path_of

_FIELDS = ("stage", "action", "on_failure", "detectors", "url", "entry_point", "timeout_ms", "memory_mb")
_CHECKS = ("detectors", "url", "entry_point")


class GuardrailForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A guardrail, with the fields of the admin API. `tenant` is the name of the only tenant that it is for."""

    name: str
    stage: GuardrailStage
    tenant: str | None = None
    action: GuardrailAction = GuardrailAction.BLOCK
    on_failure: GuardrailFailure = GuardrailFailure.CLOSED
    detectors: list[Detector] = []
    url: str | None = None
    entry_point: str | None = None
    timeout_ms: int = 1000
    memory_mb: int = 512


def _objects(entry: Entry) -> Iterator[DeclaredObject]:
    form: GuardrailForm = entry.form
    shown = msgspec.to_builtins(form)
    if sum(bool(shown[name]) for name in _CHECKS) != 1:
        raise InvalidEntry(entry.path, f"must have exactly one of {', '.join(_CHECKS)}")
    fields = {name: shown[name] for name in _FIELDS if name in entry.raw}
    parent = None if form.tenant is None else ("tenant", form.tenant)
    name = name_in_tenant(form.name, form.tenant)
    yield DeclaredObject("guardrail", name, form.name, entry.path, fields, parent, identity={"name": form.name})


def _change(declared: DeclaredObject, row: Row, change: Mapping[str, Any]) -> AdminRequest:
    kept = {name: row[name] for name in (*_FIELDS, "tenant_id")}
    if any(name in change for name in _CHECKS):  # another kind of check takes the place of the one before
        kept |= {"detectors": [], "url": None, "entry_point": None}
    return AdminRequest("PUT", "/guardrails", {**kept, **declared.identity, **declared.fields, **change})


GUARDRAIL = ApplyKind(
    kind="guardrail",
    form=GuardrailForm,
    objects=_objects,
    name_of=row_name_in_tenant("name"),
    has_id=False,
    create_request=lambda declared, tenant_id: AdminRequest(
        "PUT", "/guardrails", fields_with_owner(declared, tenant_id)
    ),
    custom_read_request=lambda row: AdminRequest("GET", path_of("guardrails", row["name"])),
    change_request=_change,
    remove_request=lambda row: AdminRequest("DELETE", path_of("guardrails", row["name"])),
)
