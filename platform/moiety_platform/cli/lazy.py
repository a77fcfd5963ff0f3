"""Lazy commands, imported only when they are called, so that `moiety --help` imports nothing that it does not show.

A target is `module:attribute`, or a function that returns the attribute; this is a Typer application (a group of
commands) or a plain function (one command). Targets in other packages come through entry points, so this package never
imports them.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.metadata import EntryPoints
from types import MappingProxyType
from typing import Any, cast

import typer
from typer.core import TyperCommand, TyperGroup

from moiety_platform.cli.errors import CommandError

EXTRA_OF_PACKAGE = {
    "torch": "engine",
    "numpy": "engine",
    "numba": "engine",
    "safetensors": "engine",
    "huggingface_hub": "engine",
    "litestar": "gateway",
    "uvicorn": "gateway",
    "sqlalchemy": "gateway",
    "aiosqlite": "gateway",
    "alembic": "gateway",
    "streamlit": "dashboard",
    "altair": "dashboard",
    "pandas": "dashboard",
    "vl_convert": "plot",
    "grpc": "endpoint-picker",
}
Target = str | Callable[[], Any]
COMPLETION = ("install_completion", "show_completion")  # shell completion calls `moiety`, not a subcommand


def explain_missing_package(exc: ModuleNotFoundError) -> CommandError | None:
    """Return the error for an optional part that is not installed; None if the missing module belongs to none."""
    package = (exc.name or "").partition(".")[0]
    extra = EXTRA_OF_PACKAGE.get(package)
    if extra is None:
        return None
    return CommandError(f'this command needs {package}, which is not installed; run: pip install "moiety[{extra}]"')


class LazyCommand(TyperCommand):
    """Placeholder with a command's name and help, which loads the real command when it is called."""

    def __init__(
        self, name: str, summary: str, load: Callable[[], Any], grow: Callable[[TyperGroup], None] | None = None
    ) -> None:
        """Create the placeholder; `grow` adds commands of other packages to a group."""
        super().__init__(name=name, help=summary)
        self._load = load
        self._grow = grow

    # The signature is that of the command-line library, old (click) and new (its own copy).
    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        return self.load().make_context(info_name, args, parent=parent, **extra)

    def load(self) -> TyperCommand | TyperGroup:
        """Import the command. Raises CommandError with the extra to install if a part is missing."""
        try:
            with _without_garbage_collection():
                loaded = self._load()
        except ModuleNotFoundError as exc:
            explained = explain_missing_package(exc)
            if explained is None:
                raise
            raise explained from exc
        command = as_command(loaded, self.name or "")
        if self._grow is not None and isinstance(command, TyperGroup):
            self._grow(command)
        return command


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Collect no garbage in the block, and exclude all objects that exist at its end from later collections.

    Imports create hundreds of thousands of objects that live as long as the process; scanning them again and again
    takes a sixth of the time of the imports.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()


def load_target(target: str) -> Any:
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _loader_of(target: Target) -> Callable[[], Any]:
    return partial(load_target, target) if isinstance(target, str) else target


def as_command(target: Any, name: str) -> TyperCommand | TyperGroup:
    """Return a Typer application unchanged; a plain function as an application of one command."""
    app = target
    if not isinstance(target, typer.Typer):
        app = typer.Typer(add_completion=False)
        app.command(name)(target)
    command = typer.main.get_command(app)
    command.name = name
    command.params = [one for one in command.params if one.name not in COMPLETION]
    return cast("TyperCommand | TyperGroup", command)


def add_lazy_commands(
    group: TyperGroup,
    own: Mapping[str, tuple[Target, str]],
    points: EntryPoints,
    summaries: Mapping[str, str],
    grow: Mapping[str, Callable[[TyperGroup], None]] = MappingProxyType({}),
    change: Mapping[str, Callable[[Any], Any]] = MappingProxyType({}),
) -> None:
    """Add our own commands (name → target, summary), then those of the entry points.

    An entry point whose name is in `summaries` is listed with that line, any other with the name of its module. A
    loaded group of our own is passed to the function of its name in `grow`; the target of an entry point is transformed
    by the function of its name in `change`.
    """
    for name, (target, summary) in own.items():
        group.add_command(LazyCommand(name, summary, _loader_of(target), grow.get(name)))
    for point in points:
        if point.name not in own:
            summary = summaries.get(point.name, f"Provided by {point.module}.")
            load = partial(_load_changed, point.load, change.get(point.name, _as_it_is))
            group.add_command(LazyCommand(point.name, summary, load))


def _load_changed(load: Callable[[], Any], change: Callable[[Any], Any]) -> Any:
    return change(load())


def _as_it_is(loaded: Any) -> Any:
    return loaded
