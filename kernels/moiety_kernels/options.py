"""Shared parts of the kernel commands: options with lists, and errors that state the accepted values."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import typer

FAILED = 1


def parse_names(option: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    """Return the comma-separated names in `text`. Raises typer.BadParameter for an unknown name."""
    asked = tuple(part.strip() for part in text.split(",") if part.strip())
    check_known(option, asked, known)
    return asked


def check_known(option: str, names: Sequence[str], known: Sequence[str]) -> None:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise typer.BadParameter(f"{option}: {', '.join(unknown)} is not known; choose from {', '.join(known)}")


def parse_numbers(option: str, text: str) -> tuple[int, ...]:
    """Return comma-separated positive numbers. Raises typer.BadParameter."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise typer.BadParameter(f"{option} {text!r}: write positive numbers with commas between them, as in 1,64,4096")
    return tuple(int(part) for part in parts)


def require_package(command: str, package: str) -> None:
    """End the command with instructions if the package is not installed."""
    if importlib.util.find_spec(package) is None:
        raise failure(command, f"this needs {package}, which is not installed; run: pip install {package}")


def failure(command: str, message: str) -> typer.Exit:
    """Print the message to standard error and return the exception to raise."""
    typer.echo(f"moiety {command}: {message}", err=True)
    return typer.Exit(FAILED)
