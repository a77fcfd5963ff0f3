"""Options that several commands have are the same everywhere, and serve passes those of its engine on."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from pydantic_settings import BaseSettings
from typer.testing import CliRunner

from moiety_engine.bench.cli import bench_engine
from moiety_engine.cli import engine
from moiety_engine.in_process.cli import batch_run
from moiety_options.commands import arguments_of, command_of
from moiety_options.declaration import DeclaredOption, declared_options
from moiety_options.engine_options import EngineOptions, ServingOptions
from moiety_options.model_options import ModelOptions, ServedModelOptions
from moiety_platform.cli.config_file import with_file
from moiety_platform.cli.gateway import gateway
from moiety_platform.cli.lazy import as_command
from moiety_platform.cli.main import main
from moiety_platform.cli.serve import engine_arguments, serve
from moiety_platform.cli.serve_options import ServeArguments
from moiety_platform.cli.traces import traces
from moiety_platform.settings import GatewaySettings
from moiety_platform.trace_receiver.settings import TraceSettings

SHARING = {
    "serve": (serve, ServingOptions),
    "bench engine": (bench_engine, ModelOptions),
    "batch run": (batch_run, ServedModelOptions),
}
FORWARDED = [one for one in declared_options(ServingOptions).values() if one.name not in ("model", "name")]


def options_of(function: Callable[..., Any]) -> dict[str, tuple[Any, ...]]:
    """Return all that a user sees of each option of a command, by its name."""
    params = as_command(function, "command").params
    return {
        str(one.name): (*one.opts, *one.secondary_opts, one.default, one.envvar, getattr(one, "help", None))
        for one in params
    }


@pytest.mark.parametrize("name", SHARING)
def test_a_command_has_the_engines_options_with_the_same_name_default_variable_and_help(name: str) -> None:
    function, declaration = SHARING[name]
    shared, of_engine = options_of(function), options_of(engine)
    for option in declared_options(declaration):
        assert shared[option] == of_engine[option]


@pytest.mark.parametrize("function", [serve, bench_engine, batch_run], ids=SHARING)
def test_no_command_has_an_option_of_the_engines_name_with_other_values(function: Callable[..., Any]) -> None:
    hints, of_engine = inspect.signature(function).parameters, inspect.signature(engine).parameters
    for name in set(hints) & set(of_engine):
        assert hints[name].annotation.__origin__ == of_engine[name].annotation.__origin__, name
        assert hints[name].default == of_engine[name].default, name


def some_value(one: DeclaredOption) -> Any:
    """Return a value that the option accepts and that is not its default."""
    if one.type is bool:
        return not one.default
    if one.option.is_size:
        return 3 << 20
    if one.type in (int, float):
        return one.type((one.option.min or 0) + 5)
    if issubclass(one.type, str) and one.type is not str:
        return next(choice for choice in one.type if choice != one.default)
    return ["a=b"] if one.is_list else one.type("some/text")


def given_to_serve(*words: str, table: dict[str, Any] | None = None, **variables: str) -> list[str]:
    """Return what serve puts on its engine's command line."""
    found: list[list[str]] = []

    def run(arguments: ServeArguments) -> None:
        found.append(engine_arguments(arguments))

    app = typer.Typer()
    app.command()(command_of(ServeArguments, run))
    result = CliRunner().invoke(app, list(words), env=variables, default_map=table)
    assert result.exit_code == 0, result.output
    return found[0]


@given(st.lists(st.sampled_from(FORWARDED), unique_by=lambda one: one.name))
def test_the_engine_gets_exactly_the_options_that_serve_was_given(chosen: list[DeclaredOption]) -> None:
    options = EngineOptions(**{one.name: some_value(one) for one in chosen})
    words = arguments_of(options, [one.name for one in chosen])
    assert sorted(given_to_serve(*words)) == sorted(words)


@pytest.mark.parametrize("one", FORWARDED, ids=lambda one: one.name)
def test_the_engine_gets_an_option_that_serves_table_of_a_file_sets(one: DeclaredOption) -> None:
    value = some_value(one)
    words = arguments_of(EngineOptions(**{one.name: value}), [one.name])
    assert given_to_serve(table={one.name: value}) == words


def test_an_option_that_is_given_its_default_reaches_the_engine_too() -> None:
    assert given_to_serve("--dtype", "auto", MOIETY_ENGINE_DTYPE="float32") == ["--dtype", "auto"]


def test_an_option_of_the_environment_is_left_to_the_engine_which_reads_the_same_variable() -> None:
    assert given_to_serve(MOIETY_ENGINE_DTYPE="float32", MOIETY_ENGINE_MAX_RUNNING="7") == []


@dataclass(frozen=True)
class Section:
    """A table of a configuration file and the declaration of its engine's options."""

    name: str
    function: Callable[..., Any]
    declaration: type


@pytest.mark.parametrize(
    "section",
    [Section("serve", serve, ServingOptions), Section("engine", with_file(engine), EngineOptions)],
    ids=lambda section: section.name,
)
def test_config_check_knows_every_option_as_a_key(section: Section, tmp_path: Any, capsys: Any) -> None:
    path, values = tmp_path / "moiety.yaml", {}
    for one in declared_options(section.declaration).values():
        value = some_value(one)
        values[one.name] = value if isinstance(value, bool | int | float | list) else str(value)
    path.write_text(f"{section.name}: {values!r}".replace("True", "true").replace("False", "false"))
    with pytest.raises(SystemExit) as ended:
        main(["config", "check", str(path)])
    assert ended.value.code == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("function", "model", "prefix"),
    [(gateway, GatewaySettings, ""), (traces, TraceSettings, "traces_")],
    ids=["gateway", "traces"],
)
def test_an_option_that_is_a_setting_says_what_the_setting_says(
    function: Callable[..., Any], model: type[BaseSettings], prefix: str
) -> None:
    shown = {str(one.name): getattr(one, "help", "") for one in as_command(function, "command").params}
    fields = {name: model.model_fields.get(name) or model.model_fields.get(prefix + name) for name in shown}
    settings = {name: field for name, field in fields.items() if field is not None}
    assert len(settings) > 5
    for name, field in settings.items():
        assert shown[name].startswith(field.description)
