"""The owner's side of processes with limits: start the template, fork children, and read how they ended."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from enum import Enum, auto
from types import TracebackType
from typing import TYPE_CHECKING, Generic, TypeVar

import structlog

from moiety_limited_processes.errors import WorkerFailed
from moiety_limited_processes.frames import EXIT_OUT_OF_MEMORY, ChildExit, receive_frame, send_frame

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

log = structlog.get_logger()

_Ready = TypeVar("_Ready")

START_S = 120.0  # enough for the largest tokenizers on a slow disk
END_S = 2.0  # time for the template to end
REPORT_S = 15.0  # time for the template to report a child's end, on a busy machine; it does so at once otherwise
# Signals that a process causes by its own operations or by reaching a limit.
OWN_SIGNALS = frozenset(
    {
        signal.SIGSEGV,
        signal.SIGABRT,
        signal.SIGBUS,
        signal.SIGILL,
        signal.SIGFPE,
        signal.SIGTRAP,
        signal.SIGSYS,
        signal.SIGPROF,
        signal.SIGXCPU,
    }
)


class WorkerChild:
    """One forked process. Closing it ends the process."""

    def __init__(self, link: socket.socket, status_link: socket.socket) -> None:
        self.link, self._status_link = link, status_link

    def __enter__(self) -> WorkerChild:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def wait_readable(self, timeout_s: float) -> bool:
        """Return whether the child answers or ends within the timeout.

        Raises OSError where another thread closed it.
        """
        poll = select.poll()
        try:
            poll.register(self.link, select.POLLIN)
        except ValueError as exc:
            raise OSError("the link is closed") from exc
        return bool(poll.poll(timeout_s * 1000))

    def end(self, report_s: float = REPORT_S) -> ChildExit | None:
        """Return how the child ended; None if it has not, or its template does not report it within `report_s`."""
        try:
            self._status_link.settimeout(report_s)
            return receive_frame(self._status_link, ChildExit)
        except (EOFError, OSError):
            return None

    def kill(self, report_s: float = REPORT_S) -> ChildExit | None:
        """Kill the child and return how it ended; None if its template does not report it within `report_s`."""
        with contextlib.suppress(OSError):
            self._status_link.sendall(b"K")
        return self.end(report_s)

    def close(self) -> None:
        """Close the links; the template then kills the child if it still runs."""
        self.link.close()
        self._status_link.close()


class ForkTemplate(Generic[_Ready]):
    """Process from which processes with limits are forked. Restarted when it is gone. Thread-safe."""

    def __init__(
        self,
        command: list[str],
        ready_kind: type[_Ready],
        check: Callable[[_Ready], None],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start the process and wait until it can fork.

        `command`: arguments of Python; the descriptor of the process's socket is added. `check` is called with the
        first frame, of `ready_kind`, and may raise ValueError. `environment`: variables of the process; None: those of
        this process.

        Raises that ValueError, and WorkerFailed where the process does not start.
        """
        self._command, self._ready_kind, self._check = command, ready_kind, check
        self._environment = environment
        self._lock = threading.Lock()
        self._is_closed = False
        self.restarts_total = 0
        self._start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def fork(self) -> WorkerChild:
        """Return a new process, which waits for its role. Raises WorkerFailed."""
        with self._lock:
            for is_last in (False, True):
                if self._is_closed:
                    raise WorkerFailed("the server is shutting down")
                try:
                    return self._fork()
                except OSError:
                    if is_last:
                        raise WorkerFailed("the template of worker processes does not answer") from None
                    self._restart()
        raise AssertionError("one of the loop's branches returns or raises")

    def restart(self, seen_pid: int) -> None:
        """Replace a hanging process, unless another thread has done so since `seen_pid` was read."""
        with self._lock:
            if self._process.pid == seen_pid and not self._is_closed:
                self._restart()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._end()

    def _start(self) -> None:
        environment = os.environ if self._environment is None else self._environment
        own, its = socket.socketpair()
        with its:
            self._process = subprocess.Popen(
                [sys.executable, *self._command, str(its.fileno())],
                pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**environment, "TOKENIZERS_PARALLELISM": "false"},  # its threads would not survive a fork
            )
        self._control = own
        own.settimeout(START_S)
        try:
            ready = receive_frame(own, self._ready_kind)
        except (EOFError, OSError) as exc:
            self._end()
            raise WorkerFailed(f"the template of worker processes does not start: {exc}") from exc
        try:
            self._check(ready)
        except ValueError:
            self._end()
            raise

    def _fork(self) -> WorkerChild:
        link, child_link = socket.socketpair()
        status_link, child_status_link = socket.socketpair()
        try:
            with child_link, child_status_link:
                send_frame(self._control, None, (child_link.fileno(), child_status_link.fileno()))
        except OSError:
            link.close()
            status_link.close()
            raise
        return WorkerChild(link, status_link)

    def _restart(self) -> None:
        log.warning("worker_template_restarted", pid=self._process.pid)
        self.restarts_total += 1
        self._process.kill()
        self._end()
        self._start()

    def _end(self) -> None:
        self._control.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def name_of(end: ChildExit) -> str:
    """Return a readable description of how a process ended."""
    if os.WIFSIGNALED(end.status):
        number = os.WTERMSIG(end.status)
        return f"signal {number}, {signal.Signals(number).name}"
    return f"exit code {os.waitstatus_to_exitcode(end.status)}"


class ProcessLimit(Enum):
    """Limit that a process has reached."""

    CPU_TIME = auto()
    WALL_TIME = auto()
    MEMORY = auto()


def reached_limit(end: ChildExit) -> ProcessLimit | None:
    """Return the limit by which a process ended; None for another end."""
    number = os.WTERMSIG(end.status) if os.WIFSIGNALED(end.status) else 0
    if number == signal.SIGALRM:
        return ProcessLimit.WALL_TIME
    if number in (signal.SIGPROF, signal.SIGXCPU):
        return ProcessLimit.CPU_TIME
    if number == signal.SIGABRT or os.waitstatus_to_exitcode(end.status) == EXIT_OUT_OF_MEMORY:
        return ProcessLimit.MEMORY
    return None


def describe_end(end: ChildExit, *, cpu_time: str, memory: str, crash: str) -> str:
    """Return the text for the way in which a process ended: at its limit of CPU time or memory, or by a crash."""
    limit = reached_limit(end)
    if limit is ProcessLimit.CPU_TIME:
        return cpu_time
    return memory if limit is ProcessLimit.MEMORY else crash


def is_own_fault(end: ChildExit) -> bool:
    """Return whether a process ended by its own fault, and was not killed from outside."""
    if os.WIFSIGNALED(end.status):
        return os.WTERMSIG(end.status) in OWN_SIGNALS
    return os.waitstatus_to_exitcode(end.status) != 0
