"""Service classes in a file that `moiety apply` reads."""

from __future__ import annotations

from collections.abc import Iterator

from moiety_platform.classes.schemas import ClassChange
from moiety_platform.resources.apply_kind import AdminRequest, ApplyKind, Entry, Wanted
from moiety_platform.resources.paths import path_of


class ClassForm(ClassChange, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A class: its name and the fields of `moiety class`."""

    name: str


def _objects(entry: Entry) -> Iterator[Wanted]:
    fields = {name: value for name, value in entry.raw.items() if name != "name"}
    yield Wanted("class", entry.form.name, entry.form.name, entry.path, fields)


CLASS = ApplyKind(
    kind="class",
    form=ClassForm,
    plural="classes",
    objects=_objects,
    rank=lambda one: (-float(one.fields.get("rank", 0)),),  # classes that others fall back to come first
    name_of=lambda row, names: row["name"],
    has_id=False,
    create=lambda one, parent: AdminRequest("POST", "/classes", {"name": one.own, **one.fields}),
    read=lambda row: AdminRequest("GET", path_of("classes", row["name"])),
    change=lambda one, row, change: AdminRequest("PATCH", path_of("classes", one.own), dict(change)),
    remove=lambda row: AdminRequest("DELETE", path_of("classes", row["name"])),
)
