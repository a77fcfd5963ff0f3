"""Runner of one stage of `make bench-gpu`: a process with a time limit, and its outcome.

It uses only the standard library, since a machine that is lent for minutes may lack other packages.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SOURCE_ROOTS = ("platform", "engine", "kernels", "dashboard", "migrations", "benchmarks")
KILL_AFTER_S = 5.0
TAIL_LINES = 25


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage.

    `command` is the interpreter's command line, and `before` precedes the interpreter. `result` is the JSON file that
    it writes, which is read whatever its exit code. The stage is skipped if a package that it `needs` is missing, or if
    it `lacks` something else.
    """

    name: str
    command: list[str]
    limit_s: float
    result: Path | None = None
    before: list[str] = field(default_factory=list)
    needs: tuple[str, ...] = ()
    lacks: str = ""

    def obstacle(self) -> str:
        """Return why the stage cannot run here; empty if it can."""
        missing = [name for name in self.needs if importlib.util.find_spec(name) is None]
        if missing:
            return f"{', '.join(missing)} is not installed"
        if self.command[0].endswith(".py") and not Path(self.command[0]).exists():
            return f"{self.command[0]} is not there"
        return self.lacks


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a stage. `code` is None after a timeout or if it was not run, and `why` is the reason."""

    name: str
    command: str
    code: int | None
    seconds: float
    why: str
    tail: list[str]

    was_run: bool = True

    @property
    def passed(self) -> bool:
        return self.code == 0


def environment_of(scratch: Path) -> dict[str, str]:
    """Return the environment of every stage: our sources first, and this run's own tuned kernel choices."""
    paths = [str(ROOT / one) for one in SOURCE_ROOTS] + os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "MOIETY_TUNING_DIR": str(scratch / "tuning"),
        "PYTHONUNBUFFERED": "1",
        "COLUMNS": "200",
    }


def pytest_command(scratch: Path, *arguments: str) -> list[str]:
    """Return the pytest command without the project's settings, which need plugins of the development environment."""
    settings = scratch / "pytest.ini"
    settings.write_text("[pytest]\nmarkers =\n    slow: takes more than ten seconds\n", encoding="utf-8")
    where = ["-c", str(settings), "--rootdir", str(ROOT), "--confcutdir", str(ROOT)]
    without = ["-p", "no:cacheprovider", "-p", "no:schemathesis"]
    return ["-m", "pytest", "-q", *where, *without, "--import-mode=importlib", *arguments]


def run_stage(stage: Stage, *, python: str, limit_s: float, environment: dict[str, str], log: Path) -> Outcome:
    """Run the stage for at most `limit_s` in a process group that is ended completely; its output goes to `log`."""
    command = [*stage.before, python, *stage.command]
    begin = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | None = process.wait(max(limit_s, 0.0))
            why = "" if code == 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            code, why = None, f"stopped after {limit_s:.0f} s"
        finally:
            _end(process)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    seconds = time.monotonic() - begin
    return Outcome(stage.name, " ".join(command), code, round(seconds, 1), why, lines[-TAIL_LINES:])


def not_run(stage: Stage, why: str) -> Outcome:
    return Outcome(stage.name, " ".join(stage.command), None, 0.0, f"not run: {why}", [], was_run=False)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Terminate the whole process group, then kill it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(KILL_AFTER_S)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def read_result(path: Path | None) -> dict[str, Any]:
    """Return the contents of a stage's result file, if it was written."""
    if path is None or not path.exists():
        return {}
    text = path.read_text(encoding="utf-8").strip()
    try:
        found = json.loads(text)
    except ValueError:
        return {"unreadable": text[:500]}
    return found if isinstance(found, dict) else {"rows": found}
