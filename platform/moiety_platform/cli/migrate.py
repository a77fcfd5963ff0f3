"""Command `moiety migrate`: executes the program of the migrations, which this package does not import."""

from __future__ import annotations

import os
import sys

import typer

migrate = typer.Typer(add_completion=False)


@migrate.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True}, add_help_option=False)
def run_migrations(context: typer.Context) -> None:
    """Migrate the database's tables (`upgrade`, the default), downgrade them, or show their revision (`current`)."""
    arguments = list(context.args)
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help")):
        arguments.insert(0, "upgrade")
    os.execv(sys.executable, [sys.executable, "-P", "-m", "moiety_migrations", *arguments])
