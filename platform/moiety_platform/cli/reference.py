"""Generator of the reference pages in Markdown, from the declarations: `docs/settings.md` and `docs/options.md`."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings
from typer.core import TyperGroup

from moiety_platform.cli.lazy import LazyCommand
from moiety_platform.reloadable import is_live
from moiety_platform.reloading.shown import shown

SETTINGS_HEAD = """# Settings

This page lists every setting of the gateway and of the trace store. `moiety config reference` generates it from the
declarations of the settings. [Configuration](commands.md#configuration-precedence) describes the file and the
environment variables, [operations](operations.md#hot-reload-of-the-configuration) how a running process reloads
its file. The options of commands are on [another page](options.md).
"""
OPTIONS_HEAD = """# Command-line options

This page lists every option of every command. `moiety config reference --options` generates it from the declarations of
the options; [Commands](commands.md) describes the commands. In the table of a command in a
[configuration file](commands.md#configuration-precedence) an option has the same name without the leading dashes.
Engines read their options at the start: a change needs a restart.

Options that several commands share come first.
"""
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "min_length": "characters ≥"}
FEW_COMMANDS = 4  # that a heading names
LINES_SAVED = 4  # by a table for several commands, at least


@dataclass(frozen=True)
class OptionRow:
    """One option as a row of a table; commands that share it have equal rows."""

    flags: str
    default: str
    variable: str
    description: str

    def __str__(self) -> str:
        return f"| {self.flags} | {self.default} | {self.variable} | {self.description} |\n"


OPTIONS_TABLE = str(OptionRow("option", "default", "environment variable", "description")) + "|---|---|---|---|\n"


def settings_reference(tables: Mapping[str, type[BaseSettings]]) -> str:
    """Return the reference of the settings in all tables of a configuration file."""
    parts = [SETTINGS_HEAD]
    for section, model in tables.items():
        parts.append(f"\n## `{section}`\n\n| setting | default | hot reload | description |\n|---|---|---|---|\n")
        fields = sorted(
            model.model_fields.items(), key=lambda named: named[0] not in model.__annotations__
        )  # own first
        parts += [_setting_row(model, name, field) for name, field in fields]
    return "".join(parts)


def options_reference(root: TyperGroup) -> str:
    """Return the reference of the options of all commands. Raises CommandError if a command cannot be imported."""
    by_command = {name: list(_option_rows(command)) for name, command in all_commands(root)}
    owners: dict[OptionRow, list[str]] = defaultdict(list)
    for name, found in by_command.items():
        for row in found:
            owners[row].append(name)
    by_owners: dict[tuple[str, ...], list[OptionRow]] = defaultdict(list)
    for row, names in owners.items():
        by_owners[tuple(names)].append(row)
    shared = [(them, rows) for them, rows in by_owners.items() if len(rows) * (len(them) - 1) >= LINES_SAVED]
    parts = [OPTIONS_HEAD]
    for them, found in sorted(shared, key=lambda one: -len(one[1])):
        parts += [_shared_heading(them), OPTIONS_TABLE, *map(str, found)]
    in_shared = {row for _, found in shared for row in found}
    for name, found in by_command.items():
        own = [row for row in found if row not in in_shared]
        if own:
            parts += [f"\n## `{name}`\n\n", OPTIONS_TABLE, *map(str, own)]
    return "".join(parts)


def all_commands(command: Any, name: str = "moiety") -> Iterator[tuple[str, Any]]:
    """Yield a command and, of a group, all commands below it, each with its full name, loaded. Raises CommandError."""
    loaded = command.load() if isinstance(command, LazyCommand) else command
    yield name, loaded
    if isinstance(loaded, TyperGroup):
        for part, one in loaded.commands.items():
            yield from all_commands(one, f"{name} {part}")


def _shared_heading(names: tuple[str, ...]) -> str:
    listed = ", ".join(f"`{name}`" for name in names)
    if len(names) <= FEW_COMMANDS:
        return f"\n## Options of {listed}\n\n"
    return f"\n## Options of {len(names)} commands\n\n{listed}:\n\n"


def _option_rows(command: Any) -> Iterator[OptionRow]:
    for one in command.params:
        if not one.opts[0].startswith("-") or one.name == "help":
            continue
        flags = ", ".join(f"`{flag}`" for flag in (*one.opts, *one.secondary_opts))
        limits = ", ".join(_option_limits(one))
        message = _in_table(one.help or "") + (f" ({limits})" if limits else "")
        variable = f"`{one.envvar}`" if one.envvar else ""
        yield OptionRow(flags, _option_default(one), variable, message)


def _option_limits(one: Any) -> Iterator[str]:
    if isinstance(one.default, Enum):
        yield ", ".join(str(choice.value) for choice in type(one.default))
    for attribute, sign in (("min", "≥"), ("max", "≤")):
        if (bound := getattr(getattr(one, "type", one), attribute, None)) is not None:
            yield f"{sign} {bound:,}"


def _option_default(one: Any) -> str:
    if isinstance(one.show_default, str):
        return f"`{one.show_default}`"
    value = one.default.value if isinstance(one.default, Enum) else one.default
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "–" if value is None or value in ("", [], ()) else _plain(str(value) if isinstance(value, Path) else value)


def _setting_row(model: type[BaseSettings], name: str, field: FieldInfo) -> str:
    bounds = ", ".join(_setting_bounds(field))
    default = "" if field.is_required() else _plain(shown(field.default))
    message = _in_table(field.description or "") + (f" ({bounds})" if bounds else "")
    return f"| `{name}` | {default} | {'yes' if is_live(model, name) else 'no'} | {message} |\n"


def _setting_bounds(field: FieldInfo) -> Iterator[str]:
    for one in field.metadata:
        for attribute, sign in BOUNDS.items():
            if (bound := getattr(one, attribute, None)) is not None:
                yield f"{sign} {bound:,}"
    choices = re.findall(r"'([^']+)'", str(field.annotation)) if "Literal" in str(field.annotation) else []
    if choices:
        yield ", ".join(choices)


def _in_table(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _plain(value: Any) -> str:
    if value is None or value in ([], {}):
        return "–"
    return f"{value:,}" if isinstance(value, int | float) and not isinstance(value, bool) else f"`{value}`"
