"""One run of one part as a process in its own process group; its output goes to the console and to its log file."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from moiety_platform.supervisor.background_writer import BackgroundWriter
from moiety_platform.supervisor.console import Console
from moiety_wire.heartbeat import heartbeat_variable

READ_BYTES = 65536
MAX_LINE_BYTES = 65536
KEPT_LINES = 20
PUMP_GRACE_S = 1.0


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """Command of a part: the arguments of `moiety`, and environment variables added to ours."""

    name: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)  # holds secrets
    health: tuple[str, int, str] | None = None  # host, port and path of a health probe; None: it sends heartbeats
    serves_requests: bool = True  # if False, the end of this part does not affect the gateway's readiness


class ComponentProcess:
    """Process of a part, started once and awaited once. When it ends, the rest of its process group is killed.

    Its output is read whatever happens to the log and to the console, so that it never waits for them.
    """

    def __init__(
        self, part: ProcessSpec, log_path: Path, log: BackgroundWriter, console: Console, heartbeat_s: float
    ) -> None:
        """`log` writes to `log_path`. The process is asked for a heartbeat every `heartbeat_s`; 0: for none."""
        self.part = part
        self.last_lines: deque[str] = deque(maxlen=KEPT_LINES)
        self.log_path = log_path
        self._log = log
        self._console = console
        self._heartbeat_s = heartbeat_s
        self._num_heartbeats = 0
        self._heartbeats: _Pipe | None = None
        self._rest = b""  # of the output: an incomplete line
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def num_heartbeats(self) -> int:
        """Number of heartbeats that the process has sent; 0 until it runs an event loop."""
        return self._num_heartbeats

    @property
    def has_ended_heartbeats(self) -> bool:
        """Return whether the process has said that it sends none any more, as at its end."""
        return self._heartbeats is not None and self._heartbeats.has_ended

    async def run(self) -> int:
        """Start the process, relay its output, and return the exit status (negative: the signal that ended it).

        Raises OSError if the process cannot be started.
        """
        with _Pipe(self._take_output) as output, _Pipe(self._take_heartbeats) as heartbeats:
            self._heartbeats = heartbeats
            environment = heartbeat_variable(heartbeats.write_fd, self._heartbeat_s) if self._heartbeat_s else {}
            # -P: a file in the user's directory must not shadow a module. The module `child` ties the child to this
            # process. asyncio gets no pipe of it: a process would count as running while anything holds its pipe.
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "moiety_platform.supervisor.child", str(os.getpid()), *self.part.arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output.write_fd,
                stderr=output.write_fd,
                pass_fds=[heartbeats.write_fd],
                env={**os.environ, "PYTHONUNBUFFERED": "1", **environment, **self.part.environment},
                start_new_session=True,
            )  # fmt: skip
            output.close_write_end()
            heartbeats.close_write_end()
            try:
                return await self._process.wait()
            finally:
                self.signal_group(signal.SIGKILL)
                await output.wait_for_end(PUMP_GRACE_S)
                if self._rest:
                    self._relay(self._rest)

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

    def _take_output(self, chunk: bytes) -> None:
        self._log.put(chunk)
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            self._relay(line)

    def _take_heartbeats(self, chunk: bytes) -> None:
        self._num_heartbeats += len(chunk)

    def _relay(self, line: bytes) -> None:
        text = line.decode("utf-8", errors="replace").rstrip("\r")
        self.last_lines.append(text)
        self._console.relay(self.part.name, text)


class _Pipe:
    """Pipe from a process, read by the event loop as soon as there is something. Closed at the end of the block."""

    def __init__(self, on_data: Callable[[bytes], None]) -> None:
        self._on_data = on_data
        self._ended = asyncio.Event()
        self._read_fd = self.write_fd = -1

    def __enter__(self) -> Self:
        self._read_fd, self.write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        asyncio.get_running_loop().add_reader(self._read_fd, self._read)
        return self

    def __exit__(self, *_exc: object) -> None:
        asyncio.get_running_loop().remove_reader(self._read_fd)
        self.close_write_end()
        os.close(self._read_fd)

    @property
    def has_ended(self) -> bool:
        """Return whether every process has closed its end."""
        return self._ended.is_set()

    def close_write_end(self) -> None:
        """Close our end, once the process has its own. Idempotent."""
        if self.write_fd >= 0:
            os.close(self.write_fd)
            self.write_fd = -1

    async def wait_for_end(self, timeout_s: float) -> None:
        """Wait until every process has closed its end, up to the timeout."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), timeout_s)

    def _read(self) -> None:
        try:
            chunk = os.read(self._read_fd, READ_BYTES)
        except BlockingIOError:
            return
        if chunk:
            self._on_data(chunk)
            return
        asyncio.get_running_loop().remove_reader(self._read_fd)
        self._ended.set()


def describe_exit(status: int) -> str:
    """Return a description of an exit status."""
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return f"exit status {status}"
