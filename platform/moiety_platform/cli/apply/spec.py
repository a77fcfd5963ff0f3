"""Schema of a declaration file, and its conversion to a flat list of objects with the fields that the file gives."""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import msgspec

from moiety_platform.classes.schemas import ClassChange
from moiety_platform.cli.apply.document import ROOT, Document, FileError
from moiety_platform.cli.errors import CommandError
from moiety_platform.prices.terms import dollars, parse_dollars
from moiety_platform.quota.kinds import LimitKind, Meter

Amount = str | int | float
T = TypeVar("T")

_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`")
_STRICT = {"forbid_unknown_fields": True, "frozen": True}


class ClassSpec(ClassChange, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A class: its name and the fields of `moiety class`."""

    name: str


class PriceSpec(msgspec.Struct, **_STRICT):
    """Prices in dollars per million tokens."""

    model: str
    input: Amount
    output: Amount
    cached_input: Amount | None = None
    service_class: str | None = None


class LimitSpec(msgspec.Struct, **_STRICT):
    """Caps by kind; money in dollars."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    tokens_per_day: int | None = None
    tokens_per_month: int | None = None
    dollars_per_day: Amount | None = None
    dollars_per_month: Amount | None = None
    alert_at: list[int] | None = None


class KeySpec(msgspec.Struct, **_STRICT, rename={"key_secret": "keySecret"}):
    """A key for clients. The file never holds its text, which goes into the Secret `keySecret`."""

    name: str
    models: list[str] | None = None
    key_secret: str | None = None
    limits: LimitSpec = LimitSpec()


class ProjectSpec(msgspec.Struct, **_STRICT):
    name: str
    limits: LimitSpec = LimitSpec()
    keys: list[KeySpec] = []


class TenantSpec(msgspec.Struct, **_STRICT):
    """A tenant. `models` apply to its keys without models of their own; `service_class` is the best that it may use."""

    name: str
    service_class: str | None = None
    weight: float | None = None
    status: Literal["active", "suspended"] | None = None
    models: list[str] | None = None
    limits: LimitSpec = LimitSpec()
    projects: list[ProjectSpec] = []


class WebhookSpec(msgspec.Struct, **_STRICT, rename={"key_secret": "keySecret"}):
    """An address for alerts; the secret that signs them goes into the Secret `keySecret`."""

    name: str
    url: str
    key_secret: str | None = None


PARTS: dict[str, type[msgspec.Struct]] = {
    "classes": ClassSpec,
    "tenants": TenantSpec,
    "prices": PriceSpec,
    "webhooks": WebhookSpec,
}


@dataclass(frozen=True)
class Wanted:
    """An object that the file declares.

    `name` is unique among its kind, `own` is its name in the API; `parent` is (kind, name) of the object that it
    belongs to. `fields` are those that the file gives, as the admin API names them.
    """

    kind: str
    name: str
    own: str
    path: str
    fields: dict[str, Any]
    parent: tuple[str, str] | None = None
    key_secret: str | None = None
    also: dict[str, Any] = field(default_factory=dict)  # identifying fields: a price's model, a limit's kind

    @property
    def place(self) -> tuple[str, str]:
        return self.kind, self.name


def read_wanted(document: Document) -> list[Wanted]:
    """Return all objects of the file, parents before children. Raises CommandError that lists all errors."""
    if not isinstance(document.data, dict):
        raise document.wrong(ROOT, f"must hold lists at the top: {', '.join(PARTS)}")
    wrong = [
        document.wrong(f"{ROOT}.{part}", f"is not known; {_meant(part, list(PARTS))}")
        for part in document.data
        if part not in PARTS
    ]
    found: dict[tuple[str, str], Wanted] = {}
    for part, form in PARTS.items():
        try:
            for wanted in _of_part(document, part, form, wrong):
                if wanted.place in found:
                    first = document.line(found[wanted.place].path)
                    told = f"the {wanted.kind} {wanted.name!r} stands on line {first} already; take one away"
                    wrong.append(document.wrong(wanted.path, told))
                found[wanted.place] = wanted
        except FileError as exc:
            wrong.append(exc)
    if wrong:
        raise CommandError("\n".join(map(str, wrong)))
    return list(found.values())


def price_name(model: str, service_class: str | None) -> str:
    return model if service_class is None else f"{model} in {service_class}"


def limit_name(scope: str, kind: str) -> str:
    return f"{scope}: {kind}"


def _of_part(document: Document, part: str, form: type[msgspec.Struct], wrong: list[FileError]) -> Iterator[Wanted]:
    entries = document.data.get(part) or []
    if not isinstance(entries, list):
        raise document.wrong(f"{ROOT}.{part}", "must be a list, each entry after a dash")
    for number, raw in enumerate(entries):
        path = f"{ROOT}.{part}[{number}]"
        try:
            spec = _convert(document, raw, form, path)
            yield from _FLAT[form](document, path, raw, spec)
        except FileError as exc:
            wrong.append(exc)


def _convert(document: Document, raw: Any, form: type[T], path: str) -> T:
    try:
        return msgspec.convert(raw, form)
    except msgspec.ValidationError as exc:
        told, _, inner = str(exc).partition(" - at `$")
        place = path + inner.rstrip("`")
        if unknown := _UNKNOWN.fullmatch(told):
            name = unknown[1]
            raise document.wrong(f"{place}.{name}", f"is not known; {_meant(name, _known(form, inner))}") from exc
        raise document.wrong(place, f"{told[:1].lower()}{told[1:]}") from exc


def _known(form: Any, inner: str) -> list[str]:
    """Return the fields of the struct at this path inside `form`."""
    for name in re.findall(r"\.(\w+)", inner):
        fields = {one.encode_name: one.type for one in msgspec.structs.fields(form)}
        form = getattr(fields[name], "__args__", (fields[name],))[0]
    return [one.encode_name for one in msgspec.structs.fields(form)]


def _meant(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known are: {', '.join(known)}"


def _class(_: Document, path: str, raw: dict[str, Any], spec: ClassSpec) -> Iterator[Wanted]:
    fields = {name: value for name, value in raw.items() if name != "name"}
    yield Wanted("class", spec.name, spec.name, path, fields)


def _price(document: Document, path: str, raw: dict[str, Any], spec: PriceSpec) -> Iterator[Wanted]:
    names = [name for name in ("input", "output", "cached_input") if raw.get(name) is not None]
    fields = {name: _dollars(document, f"{path}.{name}", raw[name])[0] for name in names}
    identity = {"model": spec.model, "service_class": spec.service_class}
    yield Wanted("price", price_name(spec.model, spec.service_class), spec.model, path, fields, also=identity)


def _tenant(document: Document, path: str, raw: dict[str, Any], spec: TenantSpec) -> Iterator[Wanted]:
    fields = {name: raw[name] for name in ("service_class", "weight", "status") if raw.get(name) is not None}
    name = unicodedata.normalize("NFC", spec.name)  # as the gateway stores it
    tenant = Wanted("tenant", spec.name, spec.name, path, {"name": name, **fields})
    yield tenant
    yield from _limits(document, tenant, spec.limits)
    for number, one in enumerate(spec.projects):
        inner = f"{path}.projects[{number}]"
        project = Wanted("project", f"{spec.name}/{one.name}", one.name, inner, {}, tenant.place)
        yield project
        yield from _limits(document, project, one.limits)
        for place, each in enumerate(one.keys):
            models = each.models if each.models is not None else spec.models
            key = Wanted(
                "key", f"{project.name}/{each.name}", each.name, f"{inner}.keys[{place}]",
                {"allowed_models": None if models is None else sorted(set(models))}, project.place, each.key_secret,
            )  # fmt: skip
            yield key
            yield from _limits(document, key, each.limits)


def _webhook(_: Document, path: str, __: dict[str, Any], spec: WebhookSpec) -> Iterator[Wanted]:
    yield Wanted("webhook", spec.name, spec.name, path, {"url": spec.url}, key_secret=spec.key_secret)


def _limits(document: Document, of: Wanted, spec: LimitSpec) -> Iterator[Wanted]:
    given = {name: value for name, value in msgspec.structs.asdict(spec).items() if value is not None}
    alert_at = given.pop("alert_at", None)
    for name, value in given.items():
        path = f"{of.path}.limits.{name}"
        kind = LimitKind(name.replace("dollars", "money"))
        cap = _dollars(document, path, value)[1] if name.startswith("dollars") else value
        fields: dict[str, Any] = {"cap": cap}
        if alert_at is not None and kind.meter is Meter.STOCK:
            fields["alert_at"] = sorted(set(alert_at))
        yield Wanted("limit", limit_name(of.name, kind), kind, path, fields, of.place)


def _dollars(document: Document, path: str, amount: Amount) -> tuple[str, int]:
    """Return an amount as the API writes it, and in nano-dollars."""
    try:
        nano = parse_dollars(str(amount))
        return dollars(nano), nano
    except ValueError as exc:
        raise document.wrong(path, f"{exc}; write it in quotes, such as '0.15'") from exc


_FLAT: dict[Any, Any] = {ClassSpec: _class, PriceSpec: _price, TenantSpec: _tenant, WebhookSpec: _webhook}
