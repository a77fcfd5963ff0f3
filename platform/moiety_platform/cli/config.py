"""`moiety config …`: whether a configuration file is what gateway, trace store and engine take, before they are started
with it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import SecretStr, ValidationError
from pydantic_settings import BaseSettings

from moiety_platform.cli.errors import CommandError
from moiety_platform.cli.lazy import as_command
from moiety_platform.cli.tables import show_json
from moiety_platform.config_file import ConfigFileError, read_config_section
from moiety_platform.settings import SECTION, GatewaySettings
from moiety_platform.trace_receiver.settings import TraceSettings

TRACES, SERVE = "traces", "serve"
NOT_IN_FILES = ("config", "help", "version")
PLACEHOLDER = "x" * 16  # where a setting without a default comes from the environment
PASSWORD_IN_URL = re.compile(r"://[^/\s:@]*:[^/\s@]+@")

app = typer.Typer(no_args_is_help=True, help="Check the configuration file.")


@app.callback()
def config() -> None:
    """Check the configuration file."""


@dataclass(frozen=True)
class Problem:
    """`is_warning`: it works, and should not be so."""

    line: int
    name: str
    told: str
    is_warning: bool = False


@app.command("check")
def check(
    file: Annotated[Path, typer.Argument(help="TOML or YAML file, as --config takes it.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")] = False,
) -> None:
    """Check a file: unknown names, values that are none, secrets in plain text. Ends with 1 if it would not work."""
    try:
        problems = sorted(problems_of(file), key=lambda one: (one.line, one.name))
    except ConfigFileError as exc:
        raise CommandError(str(exc)) from exc
    wrong = [one for one in problems if not one.is_warning]
    if as_json:
        rows = [{"line": p.line, "name": p.name, "told": p.told, "warning": p.is_warning} for p in problems]
        show_json({"file": str(file), "works": not wrong, "problems": rows})
    else:
        for one in problems:
            typer.echo(f"{file}:{one.line}: {'warning: ' if one.is_warning else ''}{one.name}: {one.told}")
        typer.echo(f"{file}: {len(wrong)} wrong, {len(problems) - len(wrong)} warnings")
    if wrong:
        raise typer.Exit(1)


def problems_of(file: Path) -> Iterator[Problem]:
    """Raises ConfigFileError."""
    document = read_config_section(file, None)
    lines = file.read_text(encoding="utf-8").splitlines()
    known = {SECTION, TRACES, SERVE}
    for section, table in document.items():
        if section not in known:
            yield Problem(_line(lines, section), section, f"no part reads this table; {_meant(section, known)}")
        elif not isinstance(table, dict):
            yield Problem(_line(lines, section), section, "must be a table of settings")
        elif section == SERVE:
            yield from _of_options(lines, table)
        else:
            model = GatewaySettings if section == SECTION else TraceSettings
            yield from _of_settings(lines, section, table, model)


def _of_settings(
    lines: list[str], section: str, table: Mapping[str, Any], model: type[BaseSettings]
) -> Iterator[Problem]:
    fields = model.model_fields
    for name in table:
        if name not in fields:
            yield Problem(_line(lines, name, section), f"{section}.{name}", f"is not known; {_meant(name, fields)}")
    given = {name: value for name, value in table.items() if name in fields}
    for name, value in given.items():
        yield from _in_clear(lines, section, name, value, fields[name].annotation)
    missing = {name: PLACEHOLDER for name, one in fields.items() if one.is_required() and name not in given}
    try:
        model.model_validate({**missing, **given})
    except ValidationError as exc:
        for one in exc.errors(include_input=False):
            name = str(one["loc"][0]) if one["loc"] else section
            told = one["msg"].removeprefix("Value error, ")
            where = f"{section}.{'.'.join(map(str, one['loc']))}" if one["loc"] else section
            yield Problem(_line(lines, name, section), where, told)


def _of_options(lines: list[str], table: Mapping[str, Any]) -> Iterator[Problem]:
    """`moiety serve` takes its options by their names."""
    from moiety_platform.cli.serve import serve  # noqa: PLC0415  only for files that have its table

    known = [one.name for one in as_command(serve, SERVE).params if one.name not in NOT_IN_FILES]
    for name in table:
        if name.replace("-", "_") not in known:
            told = f"is not known; {_meant(name, [one for one in known if one])}"
            yield Problem(_line(lines, name, SERVE), f"{SERVE}.{name}", told)


def _in_clear(lines: list[str], section: str, name: str, value: Any, kind: Any) -> Iterator[Problem]:
    """Who may read the file is seldom who may know what is in it."""
    variable = f"MOIETY_{name.upper()}"
    if "SecretStr" in str(kind) or kind is SecretStr:
        told = f"a secret in plain text: give it in the environment, as {variable}"
        yield Problem(_line(lines, name, section), f"{section}.{name}", told, is_warning=True)
    elif isinstance(value, str) and PASSWORD_IN_URL.search(value):
        told = f"a password in plain text: give the address in the environment, as {variable}"
        yield Problem(_line(lines, name, section), f"{section}.{name}", told, is_warning=True)


def _line(lines: list[str], name: str, section: str | None = None) -> int:
    """Where a name stands: after its table's own line, if that is given; 1 where it cannot be told."""
    start = _line(lines, section) if section is not None else 0
    wanted = re.compile(rf"""\s*\[?["']?{re.escape(name)}["']?\s*[\]=:]""")
    for number, line in enumerate(lines[start:], start=start + 1):
        if wanted.match(line):
            return number
    return max(start, 1)


def _meant(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {close[0]!r}?" if close else f"known are: {', '.join(sorted(known))}"
