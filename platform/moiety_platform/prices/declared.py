"""Prices in a file that `moiety apply` reads."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from moiety_platform.prices.token_cost import dollars, parse_dollars
from moiety_platform.resources.apply_kind import AdminRequest, ApplyKind, DeclaredObject, Entry, InvalidEntry, Row

Amount = str | int | float
PRICED = ("input", "output", "cached_input")


class PriceForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Prices in dollars per million tokens."""

    model: str
    input: Amount
    output: Amount
    cached_input: Amount | None = None
    service_class: str | None = None


def nano_dollars_of(path: str, amount: Amount) -> int:
    """Return an amount in a file as nano-dollars. Raises InvalidEntry."""
    try:
        return parse_dollars(str(amount))
    except ValueError as exc:
        raise InvalidEntry(path, f"{exc}; write it in quotes, such as '0.15'") from exc


def _objects(entry: Entry) -> Iterator[DeclaredObject]:
    form: PriceForm = entry.form
    fields = {
        name: dollars(nano_dollars_of(f"{entry.path}.{name}", entry.raw[name]))
        for name in PRICED
        if entry.raw.get(name) is not None
    }
    identity = {"model": form.model, "service_class": form.service_class}
    yield DeclaredObject(
        "price", _name_of(form.model, form.service_class), form.model, entry.path, fields, identity=identity
    )


def _name_of(model: str, service_class: str | None) -> str:
    return model if service_class is None else f"{model} in {service_class}"


def _identity(row: Row) -> Row:
    return {"model": row["model"], "service_class": row["service_class"]}


PRICE = ApplyKind(
    kind="price",
    form=PriceForm,
    objects=_objects,
    name_of=lambda row, names: _name_of(row["model"], row["service_class"]),
    has_id=False,
    create_request=lambda declared, parent: AdminRequest("PUT", "/prices", {**declared.identity, **declared.fields}),
    custom_read_request=lambda row: AdminRequest("GET", "/prices/one", query=_identity(row)),
    change_request=lambda declared, row, change: AdminRequest(
        "PUT", "/prices", {**{name: row[name] for name in PRICED}, **declared.identity, **change}
    ),
    remove_request=lambda row: AdminRequest("DELETE", "/prices", query=_identity(row)),
)
