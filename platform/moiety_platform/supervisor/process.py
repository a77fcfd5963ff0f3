"""One run of one part as a process in its own process group; its output goes to the console and to its log file."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from moiety_platform.supervisor.console import Console

READ_BYTES = 65536
MAX_LINE_BYTES = 65536
KEPT_LINES = 20
PUMP_GRACE_S = 1.0
LOG_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """Command of a part: the arguments of `moiety`, and environment variables added to ours."""

    name: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)  # holds secrets
    serves_requests: bool = True  # if False, the end of this part does not affect the gateway's readiness


class ComponentProcess:
    """Process of a part, started once and awaited once. When it ends, the rest of its process group is killed."""

    def __init__(self, part: ProcessSpec, log_path: Path, console: Console) -> None:
        self.part = part
        self.last_lines: deque[str] = deque(maxlen=KEPT_LINES)
        self.log_path = log_path
        self._console = console
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def run(self) -> int:
        """Start the process, relay its output, and return the exit status (negative: the signal that ended it)."""
        # -P: a file in the user's directory must not shadow a module. The module `child` ties the child to this
        # process.
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "moiety_platform.supervisor.child", str(os.getpid()), *self.part.arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **self.part.environment},
            start_new_session=True,
        )  # fmt: skip
        pump = asyncio.create_task(self._pump(self._process))
        try:
            status = await self._process.wait()
        finally:
            self.signal_group(signal.SIGKILL)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(pump, PUMP_GRACE_S)
        return status

    def terminate(self) -> None:
        """Send SIGTERM to the process itself, not to its children.

        The rest of its group is killed only after the process has ended.
        """
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()

    def signal_group(self, signal_number: signal.Signals) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal_number)

    async def _pump(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        rest = b""
        with os.fdopen(os.open(self.log_path, LOG_FLAGS, 0o600), "ab") as log:
            while chunk := await process.stdout.read(READ_BYTES):
                log.write(chunk)
                log.flush()
                *lines, rest = (rest + chunk).split(b"\n")
                if len(rest) > MAX_LINE_BYTES:
                    lines, rest = [*lines, rest], b""
                for line in lines:
                    self._relay(line)
        if rest:
            self._relay(rest)

    def _relay(self, line: bytes) -> None:
        text = line.decode("utf-8", errors="replace").rstrip("\r")
        self.last_lines.append(text)
        self._console.relay(self.part.name, text)


def describe_exit(status: int) -> str:
    """Return a description of an exit status."""
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return f"exit status {status}"
