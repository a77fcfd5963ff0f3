"""Limits in a file that `moiety apply` reads: one part of a tenant, a project or a key holds a limit of each kind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from moiety_platform.prices.declared import Amount, nano_dollars_of
from moiety_platform.prices.token_cost import dollars
from moiety_platform.quota.kinds import LimitKind, Meter
from moiety_platform.resources.apply_kind import AdminRequest, ApplyKind, DeclaredObject, Entry, ObjectPlace, Row
from moiety_platform.resources.paths import path_of


class LimitForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Caps by kind; money in dollars."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    token_counts_per_minute: int | None = None
    tokens_per_day: int | None = None
    tokens_per_month: int | None = None
    dollars_per_day: Amount | None = None
    dollars_per_month: Amount | None = None
    alert_at: list[int] | None = None


def _objects(entry: Entry) -> Iterator[DeclaredObject]:
    assert entry.parent is not None
    given = {name: getattr(entry.form, name) for name in LimitForm.__struct_fields__}
    alert_at = given.pop("alert_at")
    for name, value in given.items():
        if value is None:
            continue
        path = f"{entry.path}.{name}"
        kind = LimitKind(name.replace("dollars", "money"))
        fields: dict[str, Any] = {"cap": nano_dollars_of(path, value) if name.startswith("dollars") else value}
        if alert_at is not None and kind.meter is Meter.STOCK:
            fields["alert_at"] = sorted(set(alert_at))
        yield DeclaredObject("limit", _name_of(entry.parent.name, kind), kind, path, fields, entry.parent.place)


def _name_of(scope: str, kind: str) -> str:
    return f"{scope}: {kind}"


def _name_of_row(row: Row, names: Mapping[ObjectPlace, str]) -> str | None:
    scope = names.get((row["level"], row["scope_id"]))
    return None if scope is None else _name_of(scope, row["kind"])


def _put(declared: DeclaredObject, scope_id: str) -> AdminRequest:
    assert declared.parent is not None
    return AdminRequest(
        "PUT",
        "/quotas",
        {"level": declared.parent[0], "scope_id": scope_id, "kind": declared.api_name, **declared.fields},
    )


def _shown(declared: DeclaredObject | None, field: str, value: Any) -> str | None:
    is_money = (
        field == "cap" and isinstance(value, int) and declared is not None and declared.api_name.startswith("money")
    )
    return f"$ {dollars(value)}" if is_money else None


LIMIT = ApplyKind(
    kind="limit",
    form=LimitForm,
    within=("tenant", "project", "key"),
    is_list=False,
    objects=_objects,
    resource="quotas",
    is_paged=True,
    name_of=_name_of_row,
    create_request=_put,
    change_request=lambda declared, row, change: _put(declared, row["scope_id"]),
    remove_request=lambda row: AdminRequest("DELETE", path_of("quotas", row["id"])),
    show_value=_shown,
)
