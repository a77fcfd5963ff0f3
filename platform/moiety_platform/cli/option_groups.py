"""Groups of options that several commands share: a command takes a group as one argument, users give its options."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, get_type_hints


class OptionGroup:
    """Base of dataclasses whose fields are options, annotated for typer, with defaults."""


def with_option_groups(function: Callable[..., None]) -> Callable[..., None]:
    """Return the function as a command that has, in place of each argument of a group, the options of the group."""
    hints = get_type_hints(function, include_extras=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, type[Any]] = {}
    for parameter in inspect.signature(function).parameters.values():
        kind = hints[parameter.name]
        if isinstance(kind, type) and issubclass(kind, OptionGroup):
            groups[parameter.name] = kind
            parameters += _options_of(kind)
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=kind))

    def command(**given: Any) -> None:
        for name, kind in groups.items():
            given[name] = kind(**{field.name: given.pop(field.name) for field in fields(kind)})
        function(**given)

    return as_function(command, function, parameters)


def as_function(
    command: Callable[..., None], function: Callable[..., None], parameters: list[inspect.Parameter]
) -> Callable[..., None]:
    """Give a command the name and the help of a function, and the signature that typer reads."""
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__name__, command.__doc__ = function.__name__, function.__doc__
    return command


def _options_of(group: type[Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for field in fields(group)
    ]
