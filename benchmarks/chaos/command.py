"""Shared parts of the commands: where they run, and their reports."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
from collections.abc import Awaitable, Callable
from datetime import date
from pathlib import Path
from typing import Any

from chaos.places import CannotStage, enter
from moiety_platform.bench.environment import describe_environment

RESULTS = Path(__file__).parents[1] / "results"


def add_places(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the options for the folders of reports, logs and data."""
    parser.add_argument("--output", type=lambda text: Path(text).resolve(), default=RESULTS / name, metavar="FILE")
    message = "an empty one for logs and data, which are otherwise not kept"
    parser.add_argument("--folder", type=lambda text: Path(text).resolve(), help=message)


def perform(
    module: str, options: argparse.Namespace, act: Callable[[Path], Awaitable[dict[str, Any]]]
) -> dict[str, Any]:
    """Run this command again in its own namespaces, and write the report.

    Ends the process with 2 if the machine lacks something that the run needs.
    """
    try:
        enter(module)
        with contextlib.ExitStack() as stack:
            folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moiety-chaos-")))
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o755)  # PostgreSQL may run as a user of its own
            found = asyncio.run(_run(act, folder))
    except CannotStage as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    places = ("output", "folder")
    settings = {
        name: value.name if isinstance(value, Path) else value
        for name, value in vars(options).items()
        if name not in places
    }
    command = " ".join([f"python -m {module}", *sys.argv[1:]])
    head = {"date": date.today().isoformat(), "command": command, "environment": describe_environment()}
    report = {**head, "settings": settings, **found}
    options.output.write_text(json.dumps(report, indent=2) + "\n")
    return report


async def _run(act: Callable[[Path], Awaitable[dict[str, Any]]], folder: Path) -> dict[str, Any]:
    return await act(folder)
