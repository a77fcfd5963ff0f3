"""Groups of options: a command has the options of its groups where the groups stand in its signature."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer
from typer.testing import CliRunner

from moiety_platform.cli.lazy import as_command
from moiety_platform.cli.option_groups import OptionGroup, with_option_groups

Words = Annotated[str | None, typer.Option("--from", help="First word.")]


@dataclass(frozen=True)
class Place(OptionGroup):
    """Two options."""

    begin: Words = None
    rows: Annotated[int, typer.Option(min=1)] = 3


@dataclass(frozen=True)
class WidePlace(Place):
    """Three options."""

    wide: Annotated[bool, typer.Option("--wide")] = False


given: list[tuple[str, WidePlace, bool]] = []


@with_option_groups
def show(name: Annotated[str, typer.Argument()], *, place: WidePlace, as_json: bool = False) -> None:
    """Show a place."""
    given.append((name, place, as_json))


def test_a_command_has_the_options_of_a_group_in_the_groups_place() -> None:
    command = as_command(show, "show")
    assert [one.name for one in command.params] == ["name", "begin", "rows", "wide", "as_json"]
    assert command.help == "Show a place."


def test_a_command_gets_a_group_with_what_was_given_and_its_defaults() -> None:
    app = typer.Typer()
    app.command()(show)
    given.clear()
    assert CliRunner().invoke(app, ["a", "--from", "b", "--wide"]).exit_code == 0
    assert CliRunner().invoke(app, ["a", "--as-json"]).exit_code == 0
    assert CliRunner().invoke(app, ["a", "--rows", "0"]).exit_code == 2
    assert given == [("a", WidePlace("b", 3, wide=True), False), ("a", WidePlace(), True)]
