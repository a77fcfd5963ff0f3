"""Commands for Typer whose options are the fields of a dataclass, and command lines of such options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import MISSING, fields
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from moiety_options.declaration import DeclaredOption, declared_options
from moiety_options.sizes import format_size, size_parser

Options = TypeVar("Options")


def command_of(options: type[Options], run: Callable[[Options], None]) -> Callable[..., None]:
    """Return a function for Typer with a parameter for each field of `options`, a dataclass.

    A field is declared by `moiety_options.declaration.option`, or annotated as Typer's own parameters are. The function
    calls `run` with the values given, and its help is the docstring of `run`.
    """
    declared = declared_options(options)
    hints = get_type_hints(options, include_extras=True)
    hints |= {name: Annotated[hints[name], typer_option(one)] for name, one in declared.items()}

    def command(**given: Any) -> None:
        run(options(**given))

    parameters = []
    for one in fields(options):  # type: ignore[arg-type]
        default = inspect.Parameter.empty if one.default is MISSING else one.default
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(one.name, kind, default=default, annotation=hints[one.name]))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: hints[one.name] for one in parameters}
    command.__doc__ = run.__doc__
    command.__name__ = run.__name__
    return command


def typer_option(declared: DeclaredOption) -> Any:
    """Return Typer's declaration of an option."""
    option = declared.option
    further: dict[str, Any] = {}
    if option.is_size:
        further = {"parser": size_parser(option.min), "metavar": "SIZE"}
        if declared.default is not None:
            further["show_default"] = format_size(declared.default)
    elif declared.type in (int, float):
        further = {"min": option.min, "max": option.max}
    elif declared.type is Path:
        further = {"file_okay": option.file_okay, "dir_okay": option.dir_okay}
    elif declared.default == "":
        further = {"show_default": False}
    flags = declared.flag if declared.negative_flag is None else f"{declared.flag}/{declared.negative_flag}"
    return typer.Option(
        flags,
        envvar=declared.env,
        help=option.help,
        rich_help_panel=option.panel,
        hidden=not option.is_shown,
        **further,
    )


def arguments_of(options: Any, names: Iterable[str]) -> list[str]:
    """Return the command line that gives another command the options of these names with the values of `options`."""
    declared = declared_options(type(options))
    return [word for name in names for word in _words(declared[name], getattr(options, name))]


def _words(one: DeclaredOption, value: Any) -> list[str]:
    if one.type is bool:
        flag = one.flag if value else one.negative_flag
        return [] if flag is None else [flag]
    values = value if one.is_list else [value]
    return [word for each in values or [] if each is not None for word in (one.flag, _text(each))]


def _text(value: Any) -> str:
    return str(value.value if isinstance(value, Enum) else value)
