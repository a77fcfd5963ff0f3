"""Declaration of one administered resource."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from moiety_platform.access.actions import AdminAction
from moiety_platform.resources.commands import Command, CustomCommand


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """An administered resource.

    `name` is its name in commands, `collection` its path under `/admin/v1` and its tag in the OpenAPI document. `about`
    heads the help of its commands, `summary` is its line in `moiety --help`; both are empty without commands. `columns`
    maps the fields of a table to their headings; `plain` converts a row for the terminal. `more` are actions beside
    reading and writing. `apply_kind` is the `module:attribute` of its ApplyKind, empty where files do not declare it.
    `page` is the page of the documentation.
    """

    name: str
    collection: str
    read: AdminAction
    write: AdminAction
    page: str
    more: tuple[AdminAction, ...] = ()
    about: str = ""
    summary: str = ""
    columns: Mapping[str, str] = field(default_factory=dict)
    plain: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    commands: tuple[Command | CustomCommand, ...] = ()
    apply_kind: str = ""

    @property
    def path(self) -> str:
        return f"/{self.collection}"

    @property
    def tags(self) -> tuple[str]:
        return (self.collection,)

    @property
    def actions(self) -> tuple[AdminAction, ...]:
        return (self.read, self.write, *self.more)
