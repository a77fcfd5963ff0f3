"""Supervisor of the parts: start them together, report and restart a part that ends, drain them at the end.

A part that ends before the first readiness ends serve, since a restart would end the same way. After that a part is
restarted without limit, with exponential backoff.
"""

from __future__ import annotations

import asyncio
import signal
import time
from dataclasses import dataclass

from moiety_platform.supervisor.console import Console
from moiety_platform.supervisor.errors import ComponentFailed
from moiety_platform.supervisor.hang_watch import HangWatch
from moiety_platform.supervisor.ports import ask_readiness
from moiety_platform.supervisor.process import ComponentProcess, ProcessSpec, describe_exit
from moiety_platform.supervisor.process_logs import ProcessLogs
from moiety_platform.supervisor_status import EXIT, HANG, SupervisorStatus

FIRST_BACKOFF_S = 0.25
LONGEST_BACKOFF_S = 15.0
HEALTHY_AFTER_S = 30.0  # a run of this length resets the backoff
READY_POLL_S = 0.03
PROGRESS_EVERY_S = 5.0
KILL_GRACE_S = 2.0
HEARTBEATS_PER_TIMEOUT = 8
STOP_TIMEOUT_S = 5.0  # for a part that has nothing to drain


@dataclass(slots=True)
class SupervisedProcess:
    """Process specification and its current run; owned by the Supervisor."""

    part: ProcessSpec
    run: ComponentProcess
    task: asyncio.Task[None] | None = None


class Supervisor:
    """Owner of the parts' processes from `start` to `stop`."""

    def __init__(
        self,
        console: Console,
        logs: ProcessLogs,
        status: SupervisorStatus,
        address: tuple[str, int],
        *,
        hang_timeout_s: float = 0.0,
    ) -> None:
        """`address` is the gateway's, for its readiness.

        A part that has responded once, and then not for `hang_timeout_s`, is killed and started again; 0: never.
        """
        self._console = console
        self._logs = logs
        self._status = status
        self._address = address
        self._hang_timeout_s = hang_timeout_s
        self._kept: dict[str, SupervisedProcess] = {}
        self._stopping = False
        self._was_ready = False
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._killing: asyncio.Task[None] | None = None

    def start(self, part: ProcessSpec) -> None:
        """Start a part and keep it running."""
        kept = SupervisedProcess(part, self._new_run(part))
        kept.task = asyncio.create_task(self._keep(kept), name=f"keep {part.name}")
        self._kept[part.name] = kept

    def _new_run(self, part: ProcessSpec) -> ComponentProcess:
        heartbeat_s = self._hang_timeout_s / HEARTBEATS_PER_TIMEOUT if part.health is None else 0.0
        logs = self._logs
        return ComponentProcess(part, logs.path(part.name), logs.writer(part.name), self._console, heartbeat_s)

    async def wait_until_ready(self) -> None:
        """Wait until the gateway reports that it is ready. Raises ComponentFailed if a part ends before that."""
        started, next_report = time.monotonic(), time.monotonic() + PROGRESS_EVERY_S
        while True:
            if self._failed.done():
                self._failed.result()
            readiness = await ask_readiness(*self._address)
            if readiness.ready:
                self._was_ready = True
                return
            if time.monotonic() >= next_report:
                next_report += PROGRESS_EVERY_S
                reason = f": {readiness.reason}" if readiness.reason else ""
                self._console.print_line(f"still starting after {time.monotonic() - started:.0f} s{reason}")
            await asyncio.wait([self._failed], timeout=READY_POLL_S)

    async def drain(self, first: str, timeout_s: float) -> None:
        """Terminate one part, and give it time to finish its running work."""
        self._stopping = True
        await self._end(first, timeout_s)

    async def stop(self) -> None:
        """End every part; kill those that do not end in time."""
        self._stopping = True
        for watcher in self._watchers.values():
            watcher.cancel()
        await asyncio.gather(*(self._end(name, STOP_TIMEOUT_S) for name in self._kept))
        if self._killing is not None:
            await self._killing

    def kill(self, first: str) -> None:
        """End every part at once: give `first` KILL_GRACE_S to write down its work, then kill all parts.

        A second call kills all parts immediately.
        """
        self._stopping = True
        if self._killing is None:
            self._killing = asyncio.create_task(self._kill_after(first), name="kill")
        else:
            self._kill_all()

    async def _kill_after(self, first: str) -> None:
        kept = self._kept.get(first)
        if kept is not None and kept.task is not None and not kept.task.done():
            kept.run.terminate()
            await asyncio.wait([kept.task], timeout=KILL_GRACE_S)
        self._kill_all()

    def _kill_all(self) -> None:
        for kept in self._kept.values():
            kept.run.signal_group(signal.SIGKILL)

    async def _end(self, name: str, timeout_s: float) -> None:
        kept = self._kept.get(name)
        if kept is None or kept.task is None or kept.task.done():
            return
        kept.run.terminate()
        _, pending = await asyncio.wait([kept.task], timeout=timeout_s)
        if pending and kept.run.pid is None:  # between two runs: nothing to kill
            kept.task.cancel()
        elif pending:
            self._console.print_line(f"the {name} did not end within {timeout_s:g} s; killing it")
            kept.run.signal_group(signal.SIGKILL)
        await asyncio.wait([kept.task], timeout=STOP_TIMEOUT_S)

    async def _keep(self, kept: SupervisedProcess) -> None:
        backoff_s = FIRST_BACKOFF_S
        while not self._stopping:
            started = time.monotonic()
            ending, was_hanging = await self._run_once(kept.run)
            if self._stopping:
                return
            name = kept.part.name
            if not self._was_ready:
                self._fail(kept.run, ending)
                return
            if time.monotonic() - started >= HEALTHY_AFTER_S:
                backoff_s = FIRST_BACKOFF_S
            self._status.count_restart(name, HANG if was_hanging else EXIT)
            self._console.print_line(f"the {name} ended ({ending}); starting it again in {backoff_s:g} s")
            kept.run = self._new_run(kept.part)
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, LONGEST_BACKOFF_S)
            self._console.print_line(f"starting the {name} again")
            if kept.part.serves_requests:
                self._watch_return(name)

    async def _run_once(self, run: ComponentProcess) -> tuple[str, bool]:
        """Run a part until it ends; return how it ended, and whether it was killed because it hung."""
        watch = HangWatch(run, self._hang_timeout_s, self._kill_hanging)
        watching = asyncio.create_task(watch.watch(), name=f"watch {run.part.name}")
        try:
            return describe_exit(await run.run()), watch.has_found_hang
        except OSError as exc:  # such as no memory, or no free descriptor: may pass
            return f"cannot be started: {exc.strerror or exc}", False
        finally:
            watching.cancel()

    def _kill_hanging(self, run: ComponentProcess) -> None:
        name, log = run.part.name, run.log_path
        self._console.print_line(
            f"the {name} has not responded for {self._hang_timeout_s:g} s; killing it (its last output is in {log})"
        )
        run.signal_group(signal.SIGKILL)

    def _fail(self, run: ComponentProcess, ending: str) -> None:
        if self._failed.done():
            return
        name = run.part.name
        said = next((line.strip() for line in reversed(run.last_lines) if line.strip()), "it printed nothing")
        self._failed.set_exception(
            ComponentFailed(f"the {name} ended before it was ready ({ending}): {said}\n  log: {run.log_path}")
        )

    def _watch_return(self, name: str) -> None:
        """Report when the gateway is ready again; only once, even if the part ended again meanwhile."""
        if name in self._watchers:
            self._watchers[name].cancel()
        self._watchers[name] = asyncio.create_task(self._print_when_ready(name))

    async def _print_when_ready(self, name: str) -> None:
        started = time.monotonic()
        was_away = False
        while not self._stopping:
            ready = (await ask_readiness(*self._address)).ready
            was_away = was_away or not ready
            # a gateway that has not yet noticed the loss still reports that it is ready
            if ready and (was_away or time.monotonic() - started > HEALTHY_AFTER_S):
                self._console.print_line(f"the {name} is back; requests are served again")
                return
            await asyncio.sleep(READY_POLL_S)
