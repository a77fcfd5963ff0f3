"""Option `--config FILE` of a command: a table of a TOML or YAML file gives defaults for missing options."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from moiety_platform.config_file import ConfigFileError, read_config_section


def take_defaults(context: typer.Context, path: Path | None) -> Path | None:
    """Make the command's table the defaults of its options: the callback of an eager `--config`."""
    if path is None:
        return None
    section = context.info_name or ""
    known = {parameter.name for parameter in context.command.params}
    try:
        table = {name.replace("-", "_"): value for name, value in read_config_section(path, section).items()}
    except ConfigFileError as exc:
        raise typer.BadParameter(str(exc)) from exc
    unknown = sorted(set(table) - known)
    if unknown:
        names = ", ".join(sorted(name for name in known if name and name not in ("config", "help")))
        raise typer.BadParameter(f"[{section}] in {path} has unknown settings: {', '.join(unknown)}; known: {names}")
    context.default_map = {**table, **(context.default_map or {})}
    return path


FileOption = Annotated[
    Path | None,
    typer.Option(
        callback=take_defaults,
        is_eager=True,
        help="TOML or YAML configuration file. Its table with the name of the command sets these options.",
    ),
]


def with_file(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--config` to a command of a package that does not support files."""

    def command(**given: Any) -> Any:
        del given["config"]
        return function(**given)

    own, keyword = inspect.signature(function).parameters.values(), inspect.Parameter.KEYWORD_ONLY
    hints = get_type_hints(function, include_extras=True) | {"config": FileOption}
    parameters = [one.replace(kind=keyword, annotation=hints[one.name]) for one in own]
    parameters.append(inspect.Parameter("config", keyword, default=None, annotation=FileOption))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = hints
    command.__name__, command.__doc__ = function.__name__, function.__doc__
    return command
