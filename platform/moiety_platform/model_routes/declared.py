"""Routes in a file that `moiety apply` reads."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from moiety_platform.model_routes.terms import RouteTarget
from moiety_platform.resources.apply_kind import AdminRequest, ApplyKind, DeclaredObject, Entry

_FIELDS = (
    "targets", "fallbacks", "sticky", "downgrade_model", "downgrade_percent", "shadow_model", "shadow_percent",
)  # fmt: skip


class RouteForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A route, with the fields of the admin API. A target without a weight has the weight 1."""

    name: str
    targets: list[RouteTarget]
    fallbacks: list[str] = []
    sticky: str = "none"
    downgrade_model: str | None = None
    downgrade_percent: int | None = None
    shadow_model: str | None = None
    shadow_percent: float | None = None


def _objects(entry: Entry) -> Iterator[DeclaredObject]:
    form: RouteForm = entry.form
    shown = msgspec.to_builtins(form)
    fields = {name: shown[name] for name in _FIELDS if name in entry.raw}
    yield DeclaredObject("route", form.name, form.name, entry.path, fields, identity={"name": form.name})


ROUTE = ApplyKind(
    kind="route",
    form=RouteForm,
    objects=_objects,
    name_of=lambda row, names: row["name"],
    has_id=False,
    create_request=lambda declared, parent: AdminRequest("PUT", "/routes", {**declared.identity, **declared.fields}),
    custom_read_request=lambda row: AdminRequest("GET", "/routes/one", query={"route": row["name"]}),
    change_request=lambda declared, row, change: AdminRequest(
        "PUT", "/routes", {**{name: row[name] for name in _FIELDS}, **declared.identity, **change}
    ),
    remove_request=lambda row: AdminRequest("DELETE", "/routes", query={"route": row["name"]}),
)
