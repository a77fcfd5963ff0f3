"""Declarations of commands over the admin API. Pure data: `cli/resource_commands.py` makes the commands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from enum import StrEnum
from typing import Any, Self


class ParameterLocation(StrEnum):
    """Part of a request that a parameter is sent in."""

    PATH = "path"
    QUERY = "query"
    BODY = "body"
    NONE = "none"  # it is not sent


class Output(StrEnum):
    """Form in which a response is shown."""

    ROW = "row"
    ROWS = "rows"
    PAGES = "pages"  # rows of all pages
    SECRET = "secret"  # text that is shown once


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """An argument or option of a command.

    `field` is the field of the request, by default `name`. `flag` replaces the flag that has the name. `parse` converts
    a given value to JSON; it raises ValueError with what follows the option's name in the complaint. With `finds`, the
    name of a resource, the value is the name or the id of one of its objects, and its id is sent. `models_of` returns
    the models that a converted value names; the command warns of those that no engine serves.
    """

    name: str
    help: str
    place: ParameterLocation = ParameterLocation.BODY
    type: Any = str
    field: str = ""
    flag: str = ""
    is_argument: bool = False
    is_required: bool = False
    minimum: int | None = None
    parse: Callable[[Any], Any] | None = None
    finds: str = ""
    models_of: Callable[[Any], Iterable[str]] | None = None

    @property
    def option(self) -> str:
        """The option as users write it."""
        return self.flag or f"--{self.name.replace('_', '-')}"

    @classmethod
    def argument(cls, name: str, help: str, **more: Any) -> Self:  # noqa: A002 - as typer calls it
        """Return a required argument."""
        return cls(name=name, help=help, is_argument=True, is_required=True, **more)

    @classmethod
    def path_argument(cls, name: str, help: str, *, finds: str = "") -> Self:  # noqa: A002 - as typer calls it
        """Return a required argument that identifies the object in the request's path."""
        return cls.argument(name, help, place=ParameterLocation.PATH, finds=finds)

    def in_path(self) -> Self:
        """Return the same parameter, sent in the request's path."""
        return replace(self, place=ParameterLocation.PATH)

    def in_query(self, field: str = "") -> Self:
        """Return the same parameter, sent in the query, as `field` if it is given."""
        return replace(self, place=ParameterLocation.QUERY, field=field or self.field)


def the_model(value: str) -> list[str]:
    """Return the models of a value that is one."""
    return [value]


TENANT_FILTER = Parameter(
    name="tenant",
    field="tenant_id",
    place=ParameterLocation.QUERY,
    help="Name or id of a tenant. If not given, all tenants.",
    finds="tenant",
)
"""Option that restricts a list to the objects of one tenant."""

OWNER_TENANT = Parameter(
    name="tenant",
    place=ParameterLocation.NONE,
    help="Name or id of the tenant whose name it is. Needed with a name if you see several tenants.",
    finds="tenant",
)
"""Option of a command that changes an object by a name of its tenant. It precedes the argument that has the name."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command that sends one request to the resource's collection, or below it.

    The path has the collection, the parameters of the path, then `suffix`. `constants` are sent in the body beside the
    parameters. `lacks` is the complaint where no option of the body is given, if one is needed. `notice` is what is
    said of a secret, with the response's fields in braces.
    """

    name: str
    help: str
    _: KW_ONLY
    method: str = "GET"
    suffix: str = ""
    parameters: tuple[Parameter, ...] = ()
    constants: Mapping[str, Any] = field(default_factory=dict)
    output: Output = Output.ROW
    lacks: str = ""
    notice: str = ""

    @classmethod
    def list_objects(cls, help: str, *parameters: Parameter, output: Output = Output.ROWS) -> Self:  # noqa: A002 - as typer calls it
        """Return the command `list`, which lists the objects."""
        return cls("list", help, parameters=parameters, output=output)

    @classmethod
    def show_object(cls, help: str, *parameters: Parameter) -> Self:  # noqa: A002 - as typer calls it
        """Return the command `show`, which shows the object that its parameters identify."""
        return cls("show", help, parameters=parameters)

    @classmethod
    def set_object(cls, help: str, *parameters: Parameter) -> Self:  # noqa: A002 - as typer calls it
        """Return the command `set`, which creates an object or replaces the one of that name."""
        return cls("set", help, method="PUT", parameters=parameters)

    @classmethod
    def delete_object(cls, help: str, *parameters: Parameter) -> Self:  # noqa: A002 - as typer calls it
        """Return the command `delete`, which deletes the object that its parameters identify."""
        return cls("delete", help, method="DELETE", parameters=parameters)


@dataclass(frozen=True, slots=True)
class CustomCommand:
    """A command that needs more than one request. `target` is its function, as `module:attribute`."""

    name: str
    target: str
