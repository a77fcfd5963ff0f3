"""Errors of commands on the terminal. Their text may contain names from a checkpoint, a trace or a batch file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.text import Text

from moiety_engine.errors import EngineError


def print_error(command: str, error: Exception) -> None:
    """Write one error to standard error, without rich markup or terminal escape sequences in its text."""
    message = "".join(one if one.isprintable() or one in "\n\t" else f"\\u{ord(one):04x}" for one in str(error))
    Console(stderr=True).print(Text.assemble((f"{command}:", "red"), " ", message), highlight=False, soft_wrap=True)


@contextmanager
def exit_on_error(command: str, *further: type[Exception]) -> Iterator[None]:
    """Print an EngineError, or an error of the `further` types, and exit with code 1."""
    kinds: tuple[type[Exception], ...] = (EngineError, *further)
    try:
        yield
    except kinds as exc:
        print_error(command, exc)
        raise typer.Exit(1) from exc
