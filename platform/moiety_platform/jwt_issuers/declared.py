"""Issuers of JWTs in a file that `moiety apply` reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from moiety_platform.resources.apply_kind import AdminRequest, ApplyKind, DeclaredObject, Entry, Row
from moiety_platform.resources.paths import path_of

_FIELDS = (
    "url", "audience", "grants", "claim", "required_claims", "jwks_url", "jwks", "end_user_claim", "service_class",
    "models",
)  # fmt: skip
_KEYS = ("jwks_url", "jwks")


class JwtGrantForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A grant. `project` are the names of the tenant and of the project, such as `acme/web`."""

    project: str
    claim_value: str | None = None
    models: list[str] | None = None


class JwtIssuerForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An issuer of JWTs, with the fields of the admin API."""

    name: str
    url: str
    audience: str
    grants: list[JwtGrantForm]
    claim: str | None = None
    required_claims: dict[str, str] = {}
    jwks_url: str | None = None
    jwks: dict[str, Any] | None = None
    end_user_claim: str | None = "sub"
    service_class: str | None = None
    models: list[str] | None = None


def _objects(entry: Entry) -> Iterator[DeclaredObject]:
    form: JwtIssuerForm = entry.form
    shown = msgspec.to_builtins(form)
    fields = {name: shown[name] for name in _FIELDS if name in entry.raw}
    for listed in (fields, *fields["grants"]):
        if listed.get("models") is not None:
            listed["models"] = sorted(set(listed["models"]))  # as the admin API shows them
    yield DeclaredObject("issuer", form.name, form.name, entry.path, fields, identity={"name": form.name})


def _change(declared: DeclaredObject, row: Row, change: Mapping[str, Any]) -> AdminRequest:
    kept = {name: row[name] for name in _FIELDS}
    if any(name in change for name in _KEYS):  # another place of the keys replaces the one before
        kept |= dict.fromkeys(_KEYS)
    return AdminRequest("PUT", "/issuers", {**kept, **declared.identity, **declared.fields, **change})


ISSUER = ApplyKind(
    kind="issuer",
    form=JwtIssuerForm,
    objects=_objects,
    name_of=lambda row, names: row["name"],
    has_id=False,
    create_request=lambda declared, parent: AdminRequest("PUT", "/issuers", {**declared.identity, **declared.fields}),
    custom_read_request=lambda row: AdminRequest("GET", path_of("issuers", row["name"])),
    change_request=_change,
    remove_request=lambda row: AdminRequest("DELETE", path_of("issuers", row["name"])),
)
