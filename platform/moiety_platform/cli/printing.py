"""Output of command lines on the terminal."""

from __future__ import annotations

import typer

from moiety_platform.printable import printable_lines


def print_line(text: object, *, err: bool = False, nl: bool = True) -> None:
    """Write lines; terminal escape sequences in foreign text are made harmless."""
    typer.echo(printable_lines(str(text)), err=err, nl=nl)
