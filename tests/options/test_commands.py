"""Commands made of a dataclass of options, and command lines of such options."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from moiety_options.commands import arguments_of, command_of
from moiety_options.declaration import declared_options, option
from moiety_options.engine_options import EngineOptions


class Color(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(slots=True, kw_only=True)
class PaintOptions:
    file: Annotated[Path, typer.Argument(help="File to paint.")]
    color: Color = option(Color.RED, "Color of the paint.", env="PAINT_")
    layers: int = option(2, "Number of layers.", env="PAINT_", min=1, max=9)
    memory_bytes: int = option(1 << 30, "Memory for the paint.", env="PAINT_", is_size=True)
    dry: bool = option(True, "Wait until the paint is dry.")
    tag: list[str] | None = option(None, "Tag of the painting. May be given several times.")


def call(*arguments: str, **environment: str) -> tuple[PaintOptions | None, Any]:
    seen: list[PaintOptions] = []

    def paint(options: PaintOptions) -> None:
        """Paint a file."""
        seen.append(options)

    app = typer.Typer()
    app.command()(command_of(PaintOptions, paint))
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", **environment})
    return (seen[0] if seen else None), result


def test_a_command_gets_its_options_of_the_command_line_over_the_environment_over_the_defaults() -> None:
    words = ("--layers", "3", "--tag", "a", "--tag", "b", "--no-dry")
    options, _ = call("f", *words, PAINT_LAYERS="4", PAINT_COLOR="blue")
    assert options == PaintOptions(file=Path("f"), color=Color.BLUE, layers=3, dry=False, tag=["a", "b"])


def test_a_size_is_given_in_units_and_is_shown_in_units() -> None:
    options, _ = call("f", "--memory-bytes", "2MiB")
    assert options is not None and options.memory_bytes == 2 << 20
    assert "1GiB" in call("--help")[1].output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["f", "--layers", "10"], "layers"),
        (["f", "--color", "green"], "green"),
        (["f", "--memory-bytes", "much"], "is not a size"),
        ([], "file"),
    ],
)
def test_a_wrong_option_ends_with_2_and_names_it(arguments: list[str], words: str) -> None:
    options, result = call(*arguments)
    assert (options, result.exit_code) == (None, 2)
    assert words in result.output


def test_help_says_what_the_function_and_the_options_say() -> None:
    told = call("--help")[1].output
    for words in ("Paint a file.", "Color of the paint.", "PAINT_LAYERS", "--no-dry"):
        assert words in told


VALUES = {
    "color": st.sampled_from(Color),
    "layers": st.integers(1, 9),
    "memory_bytes": st.integers(0, 1 << 40),
    "dry": st.booleans(),
    "tag": st.none() | st.lists(st.from_regex(r"[a-z]{1,5}", fullmatch=True), min_size=1),
}


@given(st.fixed_dictionaries(VALUES))
def test_a_command_line_of_options_gives_another_command_the_same_values(values: dict[str, Any]) -> None:
    options = PaintOptions(file=Path("f"), **values)
    assert call("f", *arguments_of(options, values))[0] == options


def test_only_the_named_options_are_put_on_a_command_line() -> None:
    options = PaintOptions(file=Path("f"), layers=3, dry=False)
    assert arguments_of(options, ["dry"]) == ["--no-dry"]


def test_every_option_of_an_engine_has_a_variable_of_its_own() -> None:
    variables = [one.env for one in declared_options(EngineOptions).values()]
    assert variables == [f"MOIETY_ENGINE_{one.name.upper()}" for one in fields(EngineOptions)]
