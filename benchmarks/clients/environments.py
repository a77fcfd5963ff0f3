"""Environments of the clients: a virtual environment for each requirements file, and folders of Node packages.

Each is made once and again when its requirements change. Packages never reach the environment that runs Moiety.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from clients.catalog import HERE, Client

NODE = "node"
INHERITING = frozenset({"evaluation"})  # its packages want torch, which Moiety's own environment has
INSTALL_TIMEOUT_S = 1800.0


class CannotInstall(Exception):
    """Packages could not be installed; the message holds the end of the installer's output."""


class Environments:
    """Owner of the folder with all environments."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()
        self._failures: dict[str, CannotInstall] = {}

    def command(self, client: Client) -> list[str]:
        """Return the command that runs the client's script; makes its environment. Raises CannotInstall."""
        folder = self._prepared(client.environment)
        script = HERE / client.script
        if script.suffix == ".mjs":  # Node looks for packages beside the script
            shutil.copy(HERE / NODE / "tasks.mjs", folder)
            copied = shutil.copy(script, folder)
            return [NODE, str(copied)]
        python = sys.executable if _node_files(client.environment) else str(folder / "bin" / "python")
        return [python, str(script)]

    def variables(self, client: Client) -> dict[str, str]:
        """Return the environment variables that tell a script where its packages' commands are."""
        folder = self._folder / client.environment
        commands = folder / "node_modules" / ".bin" if _node_files(client.environment) else folder / "bin"
        return {"MOIETY_CLIENT_COMMANDS": str(commands), "PYTHONPATH": str(HERE / "python")}

    def version(self, client: Client) -> str:
        """Return the installed version of the client's package."""
        folder = self._folder / client.environment
        if _node_files(client.environment):
            return str(json.loads((folder / "node_modules" / client.package / "package.json").read_text())["version"])
        asked = f"from importlib.metadata import version; print(version({client.package!r}))"
        return subprocess.check_output([folder / "bin" / "python", "-c", asked], text=True).strip()

    def _prepared(self, name: str) -> Path:
        if name in self._failures:
            raise self._failures[name]
        folder, stamp = self._folder / name, self._folder / f"{name}.made"
        node_files = _node_files(name)
        sources = node_files or [HERE / "requirements" / f"{name}.txt"]
        digest = hashlib.sha256(b"".join(file.read_bytes() for file in sources)).hexdigest()
        if stamp.exists() and stamp.read_text() == digest:
            return folder
        print(f"installing the packages of {name} …", file=sys.stderr)
        try:
            (_install_node if node_files else _install_python)(folder, name, sources)
        except CannotInstall as exc:
            self._failures[name] = exc
            raise
        stamp.write_text(digest)
        return folder


def _node_files(name: str) -> list[Path]:
    """Return the files that declare the Node packages of an environment; none for one of Python."""
    return [file for file in (HERE / name / "package.json", HERE / name / "package-lock.json") if file.exists()]


def _install_node(folder: Path, _name: str, sources: list[Path]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for file in sources:
        shutil.copy(file, folder)
    # not `npm ci`: it wants packages of every platform in the lock, which not every registry has
    _install(["npm", "install", "--no-audit", "--no-fund", "--loglevel=error"], folder)


def _install_python(folder: Path, name: str, sources: list[Path]) -> None:
    venv.create(folder, with_pip=True, clear=True)
    if name in INHERITING:
        (packages,) = folder.glob("lib/python*/site-packages")
        ours = [path for path in sys.path if path.endswith("site-packages")]
        (packages / "moiety.pth").write_text("\n".join(ours) + "\n")
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "-qq"]
    _install([*pip, "-r", str(sources[0])], folder)


def _install(command: list[str], folder: Path) -> None:
    try:
        made = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise CannotInstall(f"{command[0]} did not run to its end: {exc}") from exc
    if made.returncode != 0:
        raise CannotInstall((made.stderr or made.stdout)[-600:])
