"""Declaration of one administered resource."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from moiety_platform.access.actions import AdminAction, CollectionAccess
from moiety_platform.resources.commands import Command, CustomCommand


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """An administered resource.

    `name` is its name in commands, `help` describes it in `moiety --help`, empty without commands. `plural` is the name
    of its collection where that is not `name` with an s. `page` is the page of the documentation. `columns` maps the
    fields of a table to their headings; `details` are those that a table leaves out first on a narrow terminal, and
    `prose` those whose text may continue on further lines. `plain` converts a row for the terminal. `more` are actions
    beside reading and writing. `apply_kind` is the `module:attribute` of its ApplyKind, empty where files do not
    declare it.
    """

    name: str
    plural: str = ""
    help: str = ""
    access: CollectionAccess
    page: str
    columns: Mapping[str, str] = field(default_factory=dict)
    details: tuple[str, ...] = ()
    prose: tuple[str, ...] = ()
    plain: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    commands: tuple[Command | CustomCommand, ...] = ()
    more: tuple[AdminAction, ...] = ()
    apply_kind: str = ""

    @property
    def collection(self) -> str:
        """Path under `/admin/v1`, and tag in the OpenAPI document."""
        return self.plural or f"{self.name}s"

    @property
    def read(self) -> AdminAction:
        return self.access.read(self.collection)

    @property
    def write(self) -> AdminAction:
        return self.access.write(self.collection)

    @property
    def path(self) -> str:
        return f"/{self.collection}"

    @property
    def tags(self) -> tuple[str]:
        return (self.collection,)

    @property
    def actions(self) -> tuple[AdminAction, ...]:
        return (self.read, self.write, *self.more)
