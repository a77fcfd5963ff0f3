"""The reference pages have every option and every setting, and say of each what it is."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pydantic_settings import BaseSettings

from moiety_migrations.__main__ import _parser as migrate_parser
from moiety_platform.cli.main import build
from moiety_platform.cli.reference import all_commands, options_reference, settings_reference
from moiety_platform.settings import GatewaySettings
from moiety_platform.trace_receiver.settings import TraceSettings

DOCS = Path(__file__).parents[2] / "docs"
TABLES: dict[str, type[BaseSettings]] = {"gateway": GatewaySettings, "traces": TraceSettings}
WITHOUT_A_UNIT = re.compile(
    r"(timeout|ttl|interval|duration|drain|delay|period|silence|seconds|minutes|budget|memory)$"
)
METAPHORS = re.compile(
    r"\b(promis|whoever|thereof|guess|makes? room|shelf|door|lobby|of others'|hung up on)", re.IGNORECASE
)


@cache
def commands() -> dict[str, Any]:
    return dict(all_commands(build()))


def parameters() -> list[tuple[str, Any]]:
    return [(name, one) for name, command in commands().items() for one in command.params if one.name != "help"]


def is_option(one: Any) -> bool:
    return str(one.opts[0]).startswith("-")


def is_switch(one: Any) -> bool:
    return isinstance(one.default, bool)


def phrases() -> dict[str, str]:
    """Return what is said of each option and setting, by where it is said."""
    said = {f"{name} {one.opts[0]}": one.help or "" for name, one in parameters()}
    for table, model in TABLES.items():
        said |= {f"{table}.{name}": field.description or "" for name, field in model.model_fields.items()}
    return said


@pytest.mark.parametrize("page", ["settings.md", "options.md"])
def test_a_reference_page_is_what_is_declared(page: str) -> None:
    made = settings_reference(TABLES) if page == "settings.md" else options_reference(build())
    command = "moiety config reference" + (" --options" if page == "options.md" else "")
    assert (DOCS / page).read_text(encoding="utf-8") == made, f"write it anew: {command} > docs/{page}"


def test_every_flag_of_every_command_is_in_the_documents() -> None:
    text = (DOCS / "options.md").read_text(encoding="utf-8")
    flags = {flag for _, one in parameters() if is_option(one) for flag in (*one.opts, *one.secondary_opts)}
    assert len(flags) > 200
    assert [flag for flag in sorted(flags) if f"`{flag}`" not in text] == []


def test_the_options_of_migrate_which_has_its_own_parser_are_in_the_documents() -> None:
    text = (DOCS / "commands.md").read_text(encoding="utf-8")
    (subcommands,) = [action for action in migrate_parser()._actions if action.dest == "command"]
    parsers = subcommands.choices.values()
    flags = {flag for parser in parsers for flag in parser._option_string_actions if flag not in ("-h", "--help")}
    assert "--wait-s" in flags
    assert [flag for flag in sorted(flags) if flag not in text] == []


def test_every_setting_is_in_the_documents() -> None:
    text = (DOCS / "settings.md").read_text(encoding="utf-8")
    assert [name for model in TABLES.values() for name in model.model_fields if f"`{name}`" not in text] == []


def test_a_time_or_a_size_has_its_unit_in_the_name() -> None:
    names = [str(one.opts[0]).lstrip("-") for _, one in parameters() if is_option(one) and not is_switch(one)]
    names += [name for model in TABLES.values() for name in model.model_fields]
    assert [name for name in names if WITHOUT_A_UNIT.search(name)] == []


def test_everything_is_described_by_a_full_phrase() -> None:
    bad = {where: said for where, said in phrases().items() if not re.fullmatch(r"[`A-Zh/].*[.]", said)}
    assert bad == {}


def test_nothing_is_described_by_a_metaphor() -> None:
    assert {where: said for where, said in phrases().items() if METAPHORS.search(said)} == {}


def test_every_command_says_what_it_does_in_a_sentence() -> None:
    bad = {name: command.help for name, command in commands().items() if not (command.help or "").strip()}
    assert bad == {}
