"""Lines of commands on the terminal."""

from __future__ import annotations

import typer

from moiety_platform.printable import printable_lines


def say(text: object, *, err: bool = False, nl: bool = True) -> None:
    """Write lines, in which nothing that others wrote is an escape sequence of the terminal."""
    typer.echo(printable_lines(str(text)), err=err, nl=nl)
