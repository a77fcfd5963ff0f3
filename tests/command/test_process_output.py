"""Output of the parts of a serve: read whatever happens to the log, the console and the process's children."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import wait_for

from moiety_platform.supervisor.background_writer import BackgroundWriter
from moiety_platform.supervisor.console import Console
from moiety_platform.supervisor.log_file import LogFile, LogRotation
from moiety_platform.supervisor.process import ComponentProcess, ProcessSpec
from moiety_platform.supervisor.process_logs import ProcessLogs
from moiety_platform.supervisor_status import EXIT, HANG, SupervisorStatus, read_status

DEADLINE_S = 60
PIPE_BYTES = 65_536  # that the kernel holds for a process that nobody reads
LINES = 20_000
LONG_OUTPUT = f"for index in range({LINES}): print('line', index)\nprint('the last line')\n"
LEAVES_A_CHILD = """
import os, signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("child", child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
PYTHON = sys.executable
RunPart = Callable[[ProcessLogs, Console, str], Awaitable[int]]


class Printed:
    """A console into a file, and what it has written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("w")
        self.console = Console(self._file)

    @property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    def close(self) -> None:
        self.console.close()
        self._file.close()


@pytest.fixture
def printed(tmp_path: Path) -> Printed:
    return Printed(tmp_path / "console")


def logs_in(folder: Path, printed: Printed) -> tuple[ProcessLogs, SupervisorStatus]:
    status = SupervisorStatus(folder / "status")
    return ProcessLogs(folder, LogRotation(), printed.console, status), status


@pytest.fixture
def run_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPart:
    """Run a script as the process of a part; return its exit status."""

    async def run(logs: ProcessLogs, console: Console, script: str) -> int:
        file, program = tmp_path / "part.py", tmp_path / "python"
        file.write_text(script)
        program.write_text(f"#!/bin/sh\nexec {PYTHON} {file}\n")  # whatever it is asked to run
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))
        started = ComponentProcess(
            ProcessSpec("engine", ()), logs.path("engine"), logs.writer("engine"), console, heartbeat_s=0.0
        )
        async with asyncio.timeout(DEADLINE_S):
            return await started.run()

    return run


async def test_a_full_disk_stops_no_process_and_is_named(tmp_path: Path, printed: Printed, run_part: RunPart) -> None:
    (tmp_path / "engine.log").symlink_to("/dev/full")
    logs, _ = logs_in(tmp_path, printed)
    assert await run_part(logs, printed.console, LONG_OUTPUT) == 0
    logs.close()
    printed.close()
    assert "the disk is full" in printed.text
    assert "engine.log: No space left on device" in printed.text
    assert "engine    | the last line" in printed.text
    ((_, lost),) = read_status(tmp_path / "status")[1]
    assert lost > PIPE_BYTES


async def test_a_console_that_nobody_reads_stops_no_process(tmp_path: Path, run_part: RunPart) -> None:
    read_fd, write_fd = os.pipe()
    with os.fdopen(write_fd, "w") as stream:
        console = Console(stream)
        logs = ProcessLogs(tmp_path, LogRotation(), console, SupervisorStatus(tmp_path / "status"))
        assert await run_part(logs, console, LONG_OUTPUT) == 0
        logs.close()
        assert (tmp_path / "engine.log").read_text().endswith("the last line\n")
        os.close(read_fd)  # the thread that writes gets a broken pipe, and ends
        console.close()


async def test_the_end_of_a_process_is_noticed_although_a_child_holds_its_output(
    tmp_path: Path, printed: Printed, run_part: RunPart
) -> None:
    """A core that has left its group, such as an engine's, keeps the pipe open after the part was killed."""
    logs, _ = logs_in(tmp_path, printed)
    try:
        assert await run_part(logs, printed.console, LEAVES_A_CHILD) == -signal.SIGKILL
    finally:
        logs.close()
        printed.close()
        os.kill(int((tmp_path / "engine.log").read_text().split()[1]), signal.SIGKILL)


def test_a_writer_goes_on_after_a_failure_and_reports_each_loss() -> None:
    written: list[bytes] = []
    lost: list[tuple[int, int | None]] = []
    again: list[int] = []
    is_full = True

    def write(block: bytes) -> None:
        if is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(block)

    writer = BackgroundWriter("test", write, lambda count, why: lost.append((count, why.errno)), again.append)
    writer.put(b"one")
    writer.put(b"four")
    assert writer.flush(DEADLINE_S)
    is_full = False
    writer.put(b"six")
    writer.close(DEADLINE_S)
    assert (written, lost, again) == ([b"six"], [(3, errno.ENOSPC), (4, errno.ENOSPC)], [7])


def test_a_writer_that_is_not_read_holds_no_more_than_its_bound() -> None:
    may_write, written, lost = threading.Event(), [], []

    def write(block: bytes) -> None:
        may_write.wait(DEADLINE_S)
        written.append(block)

    writer = BackgroundWriter("test", write, lambda count, _: lost.append(count), lambda _: None, max_waiting_bytes=100)
    for _ in range(50):
        writer.put(b"x" * 10)
    may_write.set()
    assert writer.flush(DEADLINE_S)
    assert len(written) <= 11
    writer.put(b"last")
    writer.close(DEADLINE_S)
    assert sum(map(len, written)) - len(b"last") + sum(lost) == 500


class Hours:
    """Time in seconds since the epoch."""

    def __init__(self) -> None:
        self.now_s = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now_s


def test_a_log_is_rotated_by_size_and_keeps_so_many_files(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "engine.log", LogRotation(max_bytes=10, num_kept=2))
    for index in range(5):
        log.write(b"%d" % index * 10)
    log.close()
    kept = {path.name: path.read_bytes()[:1] for path in tmp_path.iterdir()}
    assert kept == {"engine.log": b"4", "engine.log.1": b"3", "engine.log.2": b"2"}


def test_a_log_that_cannot_be_created_anew_keeps_the_rotated_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = LogFile(tmp_path / "engine.log", LogRotation(max_bytes=10, num_kept=2))
    for index in range(3):
        log.write(b"%d" % index * 10)
    open_file = os.open

    def full(path: str, flags: int, *more: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return open_file(path, flags, *more)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", full)
        for _ in range(6):
            with contextlib.suppress(OSError):
                log.write(b"more of it")
    log.write(b"9" * 10)
    log.close()
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == ["engine.log", "engine.log.1", "engine.log.2"]
    assert (tmp_path / "engine.log.2").read_bytes()[:1] in (b"1", b"2")


def test_a_log_is_rotated_by_age_also_after_a_restart(tmp_path: Path) -> None:
    now = Hours()
    rotation = LogRotation(max_age_s=3600)
    first = LogFile(tmp_path / "engine.log", rotation, now)
    first.write(b'{"timestamp":"2023-11-14T22:13:20Z"}\n')
    first.close()
    now.now_s += 3599
    again = LogFile(tmp_path / "engine.log", rotation, now)
    again.write(b"young\n")
    now.now_s += 1
    again.write(b"old\n")
    again.close()
    assert (tmp_path / "engine.log").read_bytes() == b"old\n"
    assert (tmp_path / "engine.log.1").read_bytes().endswith(b"young\n")


def test_a_log_that_was_renamed_is_made_again_on_request(tmp_path: Path, printed: Printed) -> None:
    logs, _ = logs_in(tmp_path, printed)
    writer = logs.writer("engine")
    writer.put(b"one\n")
    assert writer.flush(DEADLINE_S)
    logs.path("engine").rename(tmp_path / "engine.log.old")
    logs.reopen()
    wait_for(logs.path("engine").exists, "the new file")
    writer.put(b"two\n")
    logs.close()
    printed.close()
    assert logs.path("engine").read_bytes() == b"two\n"


def test_a_log_says_how_much_is_missing_once_there_is_space(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    path.symlink_to("/dev/full")
    log = LogFile(path, LogRotation())
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            log.write(b"12345")
    path.unlink()
    log.reopen()
    log.write(b"again\n")
    log.close()
    told, again = path.read_bytes().strip().splitlines()
    event = json.loads(told)
    assert (event["event"], event["bytes"], event["reason"]) == ("output_lost", 10, "No space left on device")
    assert again == b"again"


def test_the_counts_of_the_supervisor_survive_a_full_disk(tmp_path: Path) -> None:
    path = tmp_path / "status"
    status = SupervisorStatus(path)
    size = path.stat().st_size
    status.count_restart("gateway", HANG)
    status.count_restart("gateway", HANG)
    status.count_restart("engine", EXIT)
    status.count_lost("engine", 7)
    assert read_status(path) == ([("engine", "exit", 1), ("gateway", "hang", 2)], [("engine", 7)])
    assert path.stat().st_size == size  # it is overwritten, and needs no further space
    path.unlink()
    path.symlink_to("/dev/full")
    status.count_lost("engine", 1)
    assert "No space left" in status.problem
