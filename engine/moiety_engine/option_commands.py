"""Commands whose options are the fields of a dataclass, so that several commands share one declaration of an option."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, TypeVar, get_type_hints

Options = TypeVar("Options")


def command_of(options: type[Options], run: Callable[[Options], None]) -> Callable[..., None]:
    """Return a function for Typer with an option for each field of `options`.

    `options` is a dataclass whose fields have defaults and are annotated with `typer.Option`. The function calls `run`
    with the options given, and its help is the docstring of `run`.
    """
    hints = get_type_hints(options, include_extras=True)

    def command(**given: Any) -> None:
        run(options(**given))

    parameters = []
    for field in fields(options):  # type: ignore[arg-type]
        assert field.default is not MISSING, f"{field.name} has a default"
        kind, annotation = inspect.Parameter.KEYWORD_ONLY, hints[field.name]
        parameters.append(inspect.Parameter(field.name, kind, default=field.default, annotation=annotation))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {field.name: hints[field.name] for field in fields(options)}  # type: ignore[arg-type]
    command.__doc__ = run.__doc__
    command.__name__ = run.__name__
    return command
