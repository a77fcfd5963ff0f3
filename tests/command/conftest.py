"""The command, run in this process: a new process would spend a second on imports for a call of milliseconds."""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
from tests.conftest import Serve, StartServe

from moiety_platform.cli.main import main

STYLES = re.compile(r"\x1b\[[0-9;]*m")  # colours and bold text
TERMINAL_COLUMNS = 100


class TerminalText(io.StringIO):
    """What a terminal was sent."""

    def isatty(self) -> bool:
        return True


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """`called(argument, …, NAME=value, …)`: `moiety` with these arguments and such an environment."""

    def run(*arguments: str, **environment: str) -> Ended:
        with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
            for name, value in environment.items():
                patch.setenv(name, value)
            main(list(arguments))
        printed = capsys.readouterr()
        return Ended(int(ended.value.code or 0), printed.out, printed.err)

    return run


@dataclass(frozen=True)
class Screen:
    """What a command showed on a terminal of TERMINAL_COLUMNS columns, without colours."""

    returncode: int
    text: str


@pytest.fixture
def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Screen]:
    """`on_terminal(argument, …, NAME=value, …)`: `moiety` on a terminal, with such an environment."""

    def run(*arguments: str, **environment: str) -> Screen:
        shown = TerminalText()
        with (
            monkeypatch.context() as patch,
            contextlib.redirect_stdout(shown),
            contextlib.redirect_stderr(shown),
            pytest.raises(SystemExit) as ended,
        ):
            for name, value in {**environment, "COLUMNS": str(TERMINAL_COLUMNS), "TERM": "xterm"}.items():
                patch.setenv(name, value)
            main(list(arguments))
        return Screen(int(ended.value.code or 0), STYLES.sub("", shown.getvalue()))

    return run


@pytest.fixture(scope="module")
def serve(start_serve: StartServe) -> Serve:
    """A `moiety serve` without a dashboard that is ready."""
    running = start_serve("--no-dashboard")
    running.wait_for_line("moiety is ready at")
    return running


@pytest.fixture
def moiety(serve: Serve, called: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ended]:
    """`moiety(argument, …, NAME=value, …)`: the command on the data directory of `serve`, without other settings."""
    for name in [name for name in os.environ if name.startswith("MOIETY_")]:
        monkeypatch.delenv(name)
    return partial(called, MOIETY_DATA_DIR=str(serve.data_dir))
