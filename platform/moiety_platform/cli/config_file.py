"""`--config FILE` for a command: a table of a TOML or YAML file gives defaults for the options that were not given."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import typer


def read_table(path: Path, section: str) -> dict[str, Any]:
    """One table of the file; empty if the file has none of that name. Raises BadParameter."""
    try:
        text = path.read_text(encoding="utf-8")
        document = tomllib.loads(text) if path.suffix == ".toml" else _parse_yaml(text)
    except OSError as exc:
        raise typer.BadParameter(f"cannot read {path}: {exc.strerror}") from exc
    except ValueError as exc:
        raise typer.BadParameter(f"{path} cannot be understood: {exc}") from exc
    if not isinstance(document, dict):
        raise typer.BadParameter(f"{path} must hold tables, such as [{section}]")
    table = document.get(section, {})
    if not isinstance(table, dict):
        raise typer.BadParameter(f"{section!r} in {path} must be a table of options")
    return table


def _parse_yaml(text: str) -> Any:
    import yaml  # noqa: PLC0415  only those who choose YAML pay for it

    try:
        return yaml.safe_load(text) or {}
    except yaml.YAMLError as exc:
        raise ValueError(str(exc)) from exc


def take_defaults(context: typer.Context, path: Path | None) -> Path | None:
    """Callback of an eager `--config`: the command's table becomes the defaults of its options."""
    if path is None:
        return None
    section = context.info_name or ""
    known = {parameter.name for parameter in context.command.params}
    table = {name.replace("-", "_"): value for name, value in read_table(path, section).items()}
    unknown = sorted(set(table) - known)
    if unknown:
        names = ", ".join(sorted(name for name in known if name and name not in ("config", "help")))
        raise typer.BadParameter(f"[{section}] in {path} does not know {', '.join(unknown)}; it knows: {names}")
    context.default_map = {**table, **(context.default_map or {})}
    return path
