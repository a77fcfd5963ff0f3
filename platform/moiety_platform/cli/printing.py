"""Output of command lines on the terminal."""

from __future__ import annotations

import shutil
import sys
import textwrap

import typer

from moiety_platform.printable import printable_lines


def print_line(text: object, *, err: bool = False, nl: bool = True) -> None:
    """Write lines; terminal escape sequences in foreign text are made harmless."""
    typer.echo(printable_lines(str(text)), err=err, nl=nl)


def print_prose(text: object) -> None:
    """Write lines to standard error, as `print_line` does; a terminal gets them broken between words at its width."""
    shown = str(text)
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns
        lines = (
            textwrap.wrap(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
            for line in shown.splitlines()
        )
        shown = "\n".join("\n".join(line) for line in lines)
    print_line(shown, err=True)
