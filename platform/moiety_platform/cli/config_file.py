"""`--config FILE` for a command: a table of a TOML or YAML file gives defaults for the options that were not given."""

from __future__ import annotations

from pathlib import Path

import typer

from moiety_platform.config_file import ConfigFileError, read_config_section


def take_defaults(context: typer.Context, path: Path | None) -> Path | None:
    """Callback of an eager `--config`: the command's table becomes the defaults of its options."""
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
        raise typer.BadParameter(f"[{section}] in {path} does not know {', '.join(unknown)}; it knows: {names}")
    context.default_map = {**table, **(context.default_map or {})}
    return path
