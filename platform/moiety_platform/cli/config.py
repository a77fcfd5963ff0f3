"""Commands `moiety config …`: check a configuration file before a part reads it, and show a gateway's settings."""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import SecretStr, ValidationError
from pydantic_settings import BaseSettings

from moiety_platform.cli.admin_client import AdminClient
from moiety_platform.cli.admin_command import Admin, AdminKey, DataDir, Url, admin_command
from moiety_platform.cli.errors import CommandError
from moiety_platform.cli.lazy import as_command, explain_missing_package, load_target
from moiety_platform.cli.printing import print_line
from moiety_platform.cli.reference import options_reference, settings_reference
from moiety_platform.cli.tables import show_json
from moiety_platform.config_file import ConfigFileError, read_config_section
from moiety_platform.redaction import hide_url_passwords
from moiety_platform.reloadable import AT_ONCE, AT_RESTART
from moiety_platform.reloading.shown import SET, shown
from moiety_platform.reloading.source import SettingOrigin
from moiety_platform.settings import SECTION, GatewaySettings
from moiety_platform.trace_receiver.settings import TraceSettings

TRACES, SERVE = "traces", "serve"
BY_OPTIONS = (SERVE, "engine", "dashboard")  # these have options and no settings
NOT_IN_FILES = ("config", "help", "version")
PLACEHOLDER = "x" * 16  # stands for a setting without a default that comes from the environment
WAITS = "no, the file has a change that waits for a restart"
NO_FILE = "no, the gateway reads no file"
READS_NO_FILE = "never: the gateway reads no configuration file; start it with --config"
HOT_RELOAD = {AT_ONCE: "yes", AT_RESTART: "no"}

app = typer.Typer(no_args_is_help=True, help="Check a configuration file, and show the settings of a gateway.")


@app.callback()
def config() -> None:
    """Check a configuration file, and show the settings of a gateway."""


def in_digits(value: Any) -> Any:
    """Return a number as it is written in a file; any other value unchanged."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


class Against(StrEnum):
    """Target that a file may be compared with."""

    RUNNING = "running"


@dataclass(frozen=True)
class SettingDifference:
    """A setting that differs between the running gateway and a file; `taken` says when the change takes effect."""

    name: str
    now: Any
    then: Any
    taken: str


@dataclass(frozen=True)
class Problem:
    """A problem in a file. `is_warning`: it works, but should be changed."""

    line: int
    name: str
    message: str
    is_warning: bool = False


@app.command("check")
def check(
    file: Annotated[Path, typer.Argument(help="TOML or YAML configuration file.")],
    against: Annotated[
        Against | None,
        typer.Option(
            help="`running` compares the file with the running gateway and shows which settings would change, and when."
        ),
    ] = None,
    url: Url = None,
    admin_key: AdminKey = None,
    data_dir: DataDir = Path(".moiety"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
) -> None:
    """Check a file: unknown names, invalid values, secrets in plain text. Ends with 1 if it would not work."""
    try:
        problems = sorted(problems_of(file), key=lambda one: (one.line, one.name))
    except ConfigFileError as exc:
        raise CommandError(str(exc)) from exc
    wrong = [one for one in problems if not one.is_warning]
    differences: list[SettingDifference] = []
    other_file = None
    if against is not None and not wrong:
        with contextlib.closing(AdminClient.connect(url, admin_key, data_dir).http) as http:
            running = AdminClient(http).get("/settings")
        differences = list(differences_from(file, running["data"], reads_file=running["file"] is not None))
        other_file = other_file_of(file, running["file"])
    if as_json:
        rows = [{"line": p.line, "name": p.name, "message": p.message, "warning": p.is_warning} for p in problems]
        report = {"file": str(file), "works": not wrong, "problems": rows}
        show_json(
            report
            if against is None
            else report | {"differences": list(map(asdict, differences)), "other_file": other_file}
        )
    else:
        for one in problems:
            print_line(f"{file}:{one.line}: {'warning: ' if one.is_warning else ''}{one.name}: {one.message}")
        for other in differences:
            print_line(f"{file}: {other.name}: {other.now!r} becomes {other.then!r} {other.taken}")
        if other_file is not None and differences:
            print_line(f"the running gateway reads {other_file}: the changes apply when they are in that file")
        print_line(f"{file}: {len(wrong)} wrong, {len(problems) - len(wrong)} warnings")
    if wrong:
        raise typer.Exit(1)


@app.command("reference")
def reference(
    options: Annotated[
        bool, typer.Option("--options", help="Print every option of every command instead of the settings.")
    ] = False,
    api_fields: Annotated[
        bool, typer.Option("--api-fields", help="Print every request field of the text APIs instead of the settings.")
    ] = False,
) -> None:
    """Print every setting of the gateway and the trace store with its default and its hot reload, in Markdown."""
    if api_fields:
        print_line(load_target("moiety_platform.cli.field_reference:fields_reference")(), nl=False)
    elif options:
        print_line(options_reference(load_target("moiety_platform.cli.main:build")()), nl=False)
    else:
        print_line(settings_reference({SECTION: GatewaySettings, TRACES: TraceSettings}), nl=False)


@app.command("show")
@admin_command
def show(admin: Admin) -> None:
    """Show a gateway's settings: value, origin, and when a change of the file takes effect."""
    told = admin.client.get("/settings")
    if admin.as_json:
        show_json(told)
        return
    reload = HOT_RELOAD if told["file"] is not None else dict.fromkeys(HOT_RELOAD, NO_FILE)
    rows = [
        {**one, "value": in_digits(one["value"]), "reload": WAITS if one["waits"] else reload[one["reload"]]}
        for one in told["data"]
    ]
    columns = {"name": "name", "value": "value", "origin": "from", "reload": "hot reload"}
    admin.show_rows(rows, columns, prose=("value", "reload"))
    if told["file"] is not None:
        print_line(f"{told['file']}, loaded {told['taken_at']}")
    else:
        print_line("the gateway reads no configuration file; start it with --config for hot reload")
    if told["problem"]:
        raise CommandError(f"the current file was not loaded: {told['problem']}")


def other_file_of(file: Path, read: str | None) -> str | None:
    """Return the file that the running gateway reads, if it is another one; None also if it reads none."""
    return read if read is not None and Path(read).absolute() != file.absolute() else None


def differences_from(
    file: Path, running: Sequence[Mapping[str, Any]], *, reads_file: bool
) -> Iterator[SettingDifference]:
    """Yield the settings that this file would change at the running gateway. Secrets are not compared.

    A gateway that reads no file takes no change. Raises ConfigFileError.
    """
    table = read_config_section(file, SECTION)
    wanted = GatewaySettings.model_validate(table)
    for one in running:
        name, now = one["name"], one["value"]
        then = shown(getattr(wanted, name))
        if now == then or SET in (now, then):
            continue
        if one["origin"] in (SettingOrigin.OPTION, SettingOrigin.ENVIRONMENT):
            if name in table:
                yield SettingDifference(name, now, then, f"never: the gateway's {one['origin']} overrides the file")
        elif name in table or one["origin"] == SettingOrigin.FILE:
            yield SettingDifference(name, now, then, one["reload"] if reads_file else READS_NO_FILE)


def problems_of(file: Path) -> Iterator[Problem]:
    """Yield the problems of a file. Raises ConfigFileError."""
    document = read_config_section(file, None)
    lines = file.read_text(encoding="utf-8").splitlines()
    known = {SECTION, TRACES, *BY_OPTIONS}
    for section, table in document.items():
        if section not in known:
            yield Problem(_line(lines, section), section, f"no command reads this table; {_meant(section, known)}")
        elif not isinstance(table, dict):
            yield Problem(_line(lines, section), section, "must be a table of settings")
        elif section in BY_OPTIONS:
            yield from _of_options(lines, section, table)
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


def _of_options(lines: list[str], section: str, table: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the problems of a table of options, which `moiety serve` and parts of other packages take by name."""
    try:
        command = as_command(_command(section), section)
    except ModuleNotFoundError as exc:
        message = f"cannot be checked here: {explain_missing_package(exc) or exc}"
        yield Problem(_line(lines, section), section, message, is_warning=True)
        return
    known = {one.name: one for one in command.params if one.name and one.name not in NOT_IN_FILES}
    for name, value in table.items():
        option = known.get(name.replace("-", "_"))
        if option is None:
            message = f"is not known; {_meant(name, known)}"
            yield Problem(_line(lines, name, section), f"{section}.{name}", message)
            continue
        try:
            command.make_context(section, [], default_map={option.name: value}).close()
        except typer.BadParameter as exc:
            yield Problem(_line(lines, name, section), f"{section}.{name}", exc.message.removeprefix("Value error, "))


def _command(section: str) -> Any:
    if section == SERVE:
        return load_target("moiety_platform.cli.serve:serve")
    (point,) = entry_points(group="moiety.commands", name=section)
    return point.load()


def _in_clear(lines: list[str], section: str, name: str, value: Any, kind: Any) -> Iterator[Problem]:
    """Yield a warning for a secret in plain text, since more people may read the file than may know the secret."""
    variable = f"MOIETY_{name.upper()}"
    if "SecretStr" in str(kind) or kind is SecretStr:
        message = f"a secret in plain text: give it in the environment, as {variable}"
        yield Problem(_line(lines, name, section), f"{section}.{name}", message, is_warning=True)
    elif isinstance(value, str) and hide_url_passwords(value) != value:
        message = f"a password in plain text: give the address in the environment, as {variable}"
        yield Problem(_line(lines, name, section), f"{section}.{name}", message, is_warning=True)


def _line(lines: list[str], name: str, section: str | None = None) -> int:
    """Return the line of a name: after its table's own line, if `section` is given; 1 if it is not found."""
    start = _line(lines, section) if section is not None else 0
    wanted = re.compile(rf"""\s*\[?["']?{re.escape(name)}["']?\s*[\]=:]""")
    for number, line in enumerate(lines[start:], start=start + 1):
        if wanted.match(line):
            return number
    return max(start, 1)


def _meant(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {close[0]!r}?" if close else f"known are: {', '.join(sorted(known))}"
