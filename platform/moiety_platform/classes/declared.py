"""Service classes in a file that `moiety apply` reads."""

from __future__ import annotations

from collections.abc import Iterator

from moiety_platform.classes.schemas import ClassChange
from moiety_platform.resources.apply_kind import AdminRequest, ApplyKind, DeclaredObject, Entry
from moiety_platform.resources.paths import path_of


class ClassForm(ClassChange, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A class: its name and the fields of `moiety class`."""

    name: str


def _objects(entry: Entry) -> Iterator[DeclaredObject]:
    fields = {name: value for name, value in entry.raw.items() if name != "name"}
    yield DeclaredObject("class", entry.form.name, entry.form.name, entry.path, fields)


CLASS = ApplyKind(
    kind="class",
    form=ClassForm,
    plural="classes",
    objects=_objects,
    rank=lambda declared: (-float(declared.fields.get("rank", 0)),),  # classes that others fall back to come first
    name_of=lambda row, names: row["name"],
    has_id=False,
    create_request=lambda declared, parent: AdminRequest(
        "POST", "/classes", {"name": declared.api_name, **declared.fields}
    ),
    custom_read_request=lambda row: AdminRequest("GET", path_of("classes", row["name"])),
    change_request=lambda declared, row, change: AdminRequest(
        "PATCH", path_of("classes", declared.api_name), dict(change)
    ),
    remove_request=lambda row: AdminRequest("DELETE", path_of("classes", row["name"])),
)
