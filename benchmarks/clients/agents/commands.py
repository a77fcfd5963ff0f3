"""Runner of an agent's command in a new repository, without a terminal."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

AGENT_TIMEOUT_S = 120.0
FILE = "@FILE@"  # in a command, the absolute path of the repository's file
_REFUSAL = re.compile(r"(?:API Error:|status|code:?) 400\b.{0,240}")


class RefusedRequest(Exception):
    """The agent reported that the server answered 400."""

    status = 400


@dataclass(frozen=True, slots=True)
class PreparedCommand:
    """Command of an agent, to be run in a new repository with one file, a.txt."""

    arguments: list[str]
    folder: Path
    environment: dict[str, str]


def prepared_command(command: Sequence[str], settings: Mapping[str, str]) -> PreparedCommand:
    """Return the command in a new repository."""
    commands = Path(os.environ["MOIETY_CLIENT_COMMANDS"])
    folder = Path(tempfile.mkdtemp(dir=Path.cwd()))
    (folder / "a.txt").write_text("hello\n")
    places = {"PATH": f"{commands}:{os.environ['PATH']}", "PWD": str(folder)}
    environment = os.environ | dict(settings) | places
    author = ["-c", "user.name=moiety", "-c", "user.email=moiety@localhost"]
    for git in (["init", "-q"], ["add", "-A"], [*author, "commit", "-qm", "a"]):
        subprocess.run(["git", *git], cwd=folder, check=True)
    arguments = [part.replace(FILE, str(folder / "a.txt")) for part in command[1:]]
    return PreparedCommand([str(commands / command[0]), *arguments], folder, environment)


def run_agent(
    command: Sequence[str], settings: Mapping[str, str], written: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Return the ended command, which ran in a new repository with one file, a.txt. Raises RefusedRequest.

    `written` is its standard input.
    """
    prepared = prepared_command(command, settings)
    made = subprocess.run(
        prepared.arguments,
        cwd=prepared.folder,
        env=prepared.environment,
        input=(written or "").replace(FILE, str(prepared.folder / "a.txt")),
        capture_output=True,
        text=True,
        timeout=AGENT_TIMEOUT_S,
        check=False,
    )
    refusal = _REFUSAL.search(made.stdout + made.stderr)
    if made.returncode != 0 and refusal is not None:
        raise RefusedRequest(refusal[0])
    return made
