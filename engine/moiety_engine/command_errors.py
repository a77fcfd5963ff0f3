"""Errors of commands on the terminal. Their text may contain names from a checkpoint, a trace or a batch file."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text


def print_error(command: str, error: Exception) -> None:
    """Write one error to standard error, without rich markup or terminal escape sequences in its text."""
    message = "".join(one if one.isprintable() or one in "\n\t" else f"\\u{ord(one):04x}" for one in str(error))
    Console(stderr=True).print(Text.assemble((f"{command}:", "red"), " ", message), highlight=False, soft_wrap=True)
