"""One local serve from start to end: its data directory, its parts, its signals and its messages to the user."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from moiety_platform.disk_full import is_disk_full
from moiety_platform.supervisor.console import Console
from moiety_platform.supervisor.data_dir import DataDir, FirstKeys, read_first_keys
from moiety_platform.supervisor.errors import SupervisorError
from moiety_platform.supervisor.plan import (
    ServeOptions,
    announcement,
    dashboard_process,
    engine_process,
    gateway_process,
    traces_process,
)
from moiety_platform.supervisor.process_logs import ProcessLogs
from moiety_platform.supervisor.supervisor import Supervisor
from moiety_platform.supervisor_status import SupervisorStatus

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
TERMINAL = "/dev/tty"  # of this process, whichever it is


class StopRequest:
    """Counter of the user's stop signals.

    The first drains. The second ends everything at once; only the gateway gets a short time to write down usage. The
    third does not wait for that either. SIGHUP stops only if it says that the terminal was closed; otherwise it opens
    the logs again, as programs that rotate logs expect.
    """

    def __init__(self, supervisor: Supervisor, console: Console, reopen_logs: Callable[[], None]) -> None:
        self._supervisor = supervisor
        self._console = console
        self._reopen_logs = reopen_logs
        self._requested = asyncio.Event()
        is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # by nohup
        self._ends_with_terminal = has_terminal() and not is_ignored
        loop = asyncio.get_running_loop()
        for signal_number in STOP_SIGNALS:
            loop.add_signal_handler(signal_number, self._receive)
        loop.add_signal_handler(signal.SIGHUP, self._hang_up)

    def _hang_up(self) -> None:
        if self._ends_with_terminal and not has_terminal():
            self._receive()
            return
        self._reopen_logs()
        self._console.print_line("the log files are opened again")

    def _receive(self) -> None:
        if self._requested.is_set():
            self._console.print_line("stopping at once")
            self._supervisor.kill("gateway")
        self._requested.set()

    async def wait(self) -> None:
        await self._requested.wait()


def has_terminal() -> bool:
    """Return whether this process has a controlling terminal."""
    try:
        os.close(os.open(TERMINAL, os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


async def serve(options: ServeOptions, data_dir: DataDir, console: Console) -> None:
    """Run until a signal requests a stop. Raises ComponentFailed when a part cannot start."""
    keys_before = read_first_keys(data_dir.path)
    socket = data_dir.engine_socket()
    socket.unlink(missing_ok=True)
    status = SupervisorStatus(data_dir.status_path)
    logs = ProcessLogs(data_dir.logs_path, options.log_rotation, console, status)
    supervisor = Supervisor(console, logs, status, options.operations_address, hang_timeout_s=options.hang_timeout_s)
    stop = StopRequest(supervisor, console, logs.reopen)
    supervisor.start(engine_process(options, data_dir, socket))  # first, since it takes longest
    supervisor.start(gateway_process(options, data_dir, socket))
    console.print_line(f"starting {options.name}; data and logs are in {data_dir.path}")
    try:
        if await wait_for_first(supervisor.wait_until_ready(), stop.wait()):
            announce(supervisor, options, data_dir, console, keys_before)
            if options.traces_port is not None:  # the gateway buffers spans until then
                supervisor.start(traces_process(options, data_dir))
            await stop.wait()
        console.print_line(f"draining: running requests have {options.drain_s} s; Ctrl-C again stops at once")
        await supervisor.drain("gateway", options.drain_s + 1)
    finally:
        await supervisor.stop()
        remove_socket(socket, data_dir)
        await asyncio.to_thread(logs.close)
    console.print_line("stopped")


def announce(
    supervisor: Supervisor, options: ServeOptions, data_dir: DataDir, console: Console, keys_before: FirstKeys | None
) -> None:
    """Print how to use the gateway, then start the dashboard, which would have slowed the start of the other parts."""
    keys = read_first_keys(data_dir.path)
    if keys is None:
        raise SupervisorError(f"the gateway wrote no keys to {data_dir.keys_path}; read its log in the same folder")
    try:
        data_dir.write_url(options.url)
    except OSError as exc:
        advice = "free some space on its disk" if is_disk_full(exc) else "correct that"
        console.print_line(f"{data_dir.path} cannot be written ({exc.strerror}); {advice}, and commands need --url")
    console.write(announcement(options, keys, keys != keys_before))
    console.print_ready(options.url)
    if options.dashboard_port is not None:
        supervisor.start(dashboard_process(options))


async def wait_for_first(wanted: Coroutine[Any, Any, None], other: Coroutine[Any, Any, None]) -> bool:
    """Wait for either coroutine; return whether `wanted` ended first. Exceptions of `wanted` are raised here."""
    tasks = [asyncio.ensure_future(wanted), asyncio.ensure_future(other)]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
    if tasks[0].cancelled():
        return False
    tasks[0].result()
    return True


def remove_socket(socket: Path, data_dir: DataDir) -> None:
    socket.unlink(missing_ok=True)
    if not socket.is_relative_to(data_dir.path):
        socket.parent.rmdir()
