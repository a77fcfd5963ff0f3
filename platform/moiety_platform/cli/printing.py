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


def print_prose(text: object, *, err: bool = True) -> None:
    """Write lines as `print_line` does; a terminal gets them broken between words at its width."""
    shown = str(text)
    if (sys.stderr if err else sys.stdout).isatty():
        width = shutil.get_terminal_size().columns
        shown = "\n".join(_break_line(line, width) for line in shown.splitlines())
    print_line(shown, err=err)


def _break_line(line: str, width: int) -> str:
    """Break a line between words; its further lines are indented more than itself."""
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    lines = textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines)
