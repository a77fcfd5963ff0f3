"""The command, run in this process: a new process would spend a second on imports for a call of milliseconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from moiety_platform.cli.main import main


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
