"""Current state of the gateway, by the names that a file would use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from moiety_platform.cli.admin_client import AdminClient
from moiety_platform.cli.apply.kinds import apply_kinds
from moiety_platform.cli.errors import Refused
from moiety_platform.resources.apply_kind import ApplyKind, ObjectPlace, Row
from moiety_platform.resources.paths import path_of


@dataclass(frozen=True)
class DeclaredEntry:
    """Entry of the ledger of declared objects."""

    source: str
    object_id: str | None


@dataclass(frozen=True)
class Current:
    """Objects as the admin API shows them; `claims` is the ledger."""

    rows: dict[ObjectPlace, Row]
    claims: dict[ObjectPlace, DeclaredEntry]

    def id_of(self, place: ObjectPlace) -> str | None:
        """Return the id of an object, None if it does not exist."""
        return apply_kinds()[place[0]].identity(self.rows.get(place))


def read_current(client: AdminClient) -> Current:
    """Read the current state. Raises CommandError."""
    ledger = client.get("/declarations")["data"]
    claims = {(one["kind"], one["name"]): DeclaredEntry(one["source"], one["object_id"]) for one in ledger}
    known: dict[ObjectPlace, str] = {
        (kind, claim.object_id): name for (kind, name), claim in claims.items() if claim.object_id is not None
    }
    rows: dict[ObjectPlace, Row] = {}
    names: dict[ObjectPlace, str] = {}  # by kind and id
    for kind in apply_kinds().values():
        for row in _list(client, kind, known):
            in_ledger = known.get((kind.kind, row["id"])) if kind.keeps_name else None
            name = kind.name_of(row, names) if in_ledger is None else in_ledger
            if name is None:
                continue
            rows[kind.kind, name] = row
            if kind.has_id:
                names[kind.kind, row["id"]] = name
    return Current(rows, claims)


def _list(client: AdminClient, kind: ApplyKind, known: Mapping[ObjectPlace, str]) -> Iterator[Row]:
    """Yield the objects of a kind; those in the ledger come last, so that they take names before others."""
    if not kind.is_listed:
        ids = [object_id for one, object_id in known if one == kind.kind]
        paths = [path_of(kind.collection, object_id) for object_id in ids]
        yield from (row for path in paths if (row := _find(client, path)) is not None)
        return
    path = path_of(kind.collection)
    rows = list(client.pages(path)) if kind.is_paged else client.get(path)["data"]
    yield from sorted(rows, key=lambda row: kind.keeps_name and (kind.kind, row["id"]) in known)


def _find(client: AdminClient, path: str) -> Row | None:
    try:
        return client.get(path)
    except Refused:
        return None
