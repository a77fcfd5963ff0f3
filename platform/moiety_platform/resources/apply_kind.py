"""Handling of the objects of one resource by `moiety apply`: their fields in a file, and the requests for a change.

Pure: requests are data, which `cli/apply/` sends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import msgspec

from moiety_platform.resources.paths import path_of

Row = dict[str, Any]  # an object as the admin API shows it
ObjectPlace = tuple[str, str]  # kind and name


class InvalidEntry(Exception):
    """An entry of a file that cannot be read. `path` is the path of the wrong part below the entry."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(message)
        self.path = path


class AdminRequest(msgspec.Struct, frozen=True):
    """A request to the admin API. `path` is below `/admin/v1`."""

    method: str
    path: str
    body: Any = None
    query: Mapping[str, Any] = {}


@dataclass(frozen=True)
class DeclaredObject:
    """An object that the file declares.

    `name` is unique among its kind, `api_name` is its name in the API; `parent` is (kind, name) of the object that it
    belongs to. `fields` are those that the file gives, as the admin API names them.
    """

    kind: str
    name: str
    api_name: str
    path: str
    fields: dict[str, Any]
    parent: ObjectPlace | None = None
    key_secret: str | None = None
    identity: dict[str, Any] = field(default_factory=dict)  # identifying fields: a price's model, a limit's kind

    @property
    def place(self) -> ObjectPlace:
        return self.kind, self.name


@dataclass(frozen=True)
class Entry:
    """An entry of a file. `form` is the parsed one, `raw` has only what the file gives.

    `parent` is the object that contains the entry, `around` are the forms of the entries around it, outermost first.
    """

    path: str
    raw: Mapping[str, Any]
    form: Any
    parent: DeclaredObject | None = None
    around: Sequence[Any] = ()


class Removal(StrEnum):
    """Action for an object that is no longer in the file."""

    DELETE = "delete"
    SUSPEND = "suspend"  # it stays in the ledger
    RELEASE = "release"  # it stays, and is not declared any more


def _no_rank(_: DeclaredObject) -> tuple[float, ...]:
    return ()


def _no_note(_: DeclaredObject, __: Row) -> str:
    return ""


def _no_request(_: DeclaredObject, __: Row) -> AdminRequest | None:
    return None


def _tenant_of(row: Row) -> str:
    return row.get("tenant_id") or ""


def _no_name(_: Row, __: Mapping[ObjectPlace, str]) -> str | None:
    return None


def _as_it_is(_: DeclaredObject | None, __: str, ___: Any) -> str | None:
    return None


def name_in_tenant(name: str, tenant: str | None) -> str:
    """Return the name in a file of an object that belongs to a tenant, or to the deployment for None."""
    return name if tenant is None else f"{tenant}/{name}"


def row_name_in_tenant(field: str) -> Callable[[Row, Mapping[ObjectPlace, str]], str]:
    """Return a function that names a row as `name_in_tenant` does. `field` has the name without the tenant."""

    def name_of_row(row: Row, names: Mapping[ObjectPlace, str]) -> str:
        tenant_id = row["tenant_id"]
        return name_in_tenant(row[field], None if tenant_id is None else names.get(("tenant", tenant_id), tenant_id))

    return name_of_row


def with_ids(
    declared: DeclaredObject, references: Mapping[str, str], find_id: Callable[[ObjectPlace], str | None]
) -> DeclaredObject:
    """Return the object with ids in place of the names of other objects, sorted as the gateway shows them.

    Names for which `find_id` returns None stay.
    """
    fields = dict(declared.fields)
    for name, kind in references.items():
        if fields.get(name) is not None:
            fields[name] = sorted(find_id((kind, one)) or one for one in fields[name])
    return replace(declared, fields=fields)


def fields_with_owner(declared: DeclaredObject, tenant_id: str) -> dict[str, Any]:
    """Return the body that creates an object. `tenant_id` is empty for an object of the deployment."""
    owner = {"tenant_id": tenant_id} if tenant_id else {}
    return {**declared.identity, **declared.fields, **owner}


@dataclass(frozen=True, kw_only=True)
class ApplyKind:
    """Kind of objects that a file can declare.

    In the file: entries with the fields of `form` are in the list `part` at the top, or in the entries of the kinds
    `within`; with `is_list` unset, `part` is one entry. `objects` returns the objects of an entry, of which `rank`
    orders those of the kind.

    At the gateway: `collection` is the path of all objects below `/admin/v1`, in pages if `is_paged`; without
    `is_listed` only those in the ledger are read, each by `custom_read_request`. `name_of` returns the name that a
    file uses, given the names of other objects by kind and id; None where only the ledger knows it. With `keeps_name`
    an object in the ledger keeps its name there, even if it was renamed since. Without `has_id` the ledger identifies
    objects by their kind and name.

    `references` are the fields that list objects of another kind, with this kind: by their names in a file, and by
    their ids at the gateway.

    `plural` is the plural of the kind where that is not the kind with an s; `resource` is the collection where that is
    not the plural.

    Requests: `create_request` gets the object and the id of its parent. `follow_up_request` may add another request.
    The response of `custom_read_request` has an ETag, unless `has_secret`: the text of such an object is shown once, so
    it is never changed, but replaced. `change_request` gets the object, the row and the changed fields.
    `remove_request` deletes or suspends, as `removal` says, for the reason `removal_reason`.
    """

    kind: str
    form: type[msgspec.Struct]
    objects: Callable[[Entry], Iterable[DeclaredObject]]
    create_request: Callable[[DeclaredObject, str], AdminRequest]
    custom_read_request: Callable[[Row], AdminRequest] | None = None  # by default of the object with the row's id
    name_of: Callable[[Row, Mapping[ObjectPlace, str]], str | None] = _no_name
    plural: str = ""
    resource: str = ""
    references: Mapping[str, str] = field(default_factory=dict)
    is_listed: bool = True
    within: tuple[str, ...] = ()
    is_list: bool = True
    rank: Callable[[DeclaredObject], tuple[float, ...]] = _no_rank
    is_paged: bool = False
    keeps_name: bool = False
    has_id: bool = True
    has_secret: bool = False
    follow_up_request: Callable[[DeclaredObject, Row], AdminRequest | None] = _no_request
    change_request: Callable[[DeclaredObject, Row, Mapping[str, Any]], AdminRequest] | None = None
    remove_request: Callable[[Row], AdminRequest] | None = None
    removal: Removal = Removal.DELETE
    removal_reason: str = "left the file"
    tenant_of: Callable[[Row], str] = _tenant_of
    note: Callable[[DeclaredObject, Row], str] = _no_note
    show_value: Callable[[DeclaredObject | None, str, Any], str | None] = _as_it_is

    @property
    def part(self) -> str:
        """Name of the kind's entries in a file."""
        return self.plural or f"{self.kind}s"

    @property
    def collection(self) -> str:
        """Name of the kind's objects in paths of the admin API."""
        return self.resource or self.part

    def read_request(self, row: Row) -> AdminRequest:
        """Return the request that reads an object."""
        return (
            AdminRequest("GET", path_of(self.collection, row["id"]))
            if self.custom_read_request is None
            else self.custom_read_request(row)
        )

    def identity(self, row: Row | None) -> str | None:
        """Return the object's identity in the ledger: its id, or its kind if it has none."""
        if row is None:
            return None
        return str(row["id"]) if self.has_id else self.kind
