"""Owner of the processes of a gateway's Python guardrails: a template for each entry point, a process for each text."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor

import msgspec
import structlog

from moiety_limited_processes.errors import WorkerFailed
from moiety_limited_processes.frames import receive_frame, send_frame
from moiety_limited_processes.processes import ForkTemplate, ProcessLimit, is_own_fault, reached_limit
from moiety_platform.guardrails.entry_point_frames import CheckOrder, CheckReport, GuardrailTemplateReady

log = structlog.get_logger(__name__)

WORKER = ("-m", "moiety_platform.guardrails.entry_point_worker")
MAX_ATTEMPTS = 2  # a process that was killed from outside does not count against its text
MAX_PROCESSES = 8  # at once; further texts wait within their time
MAX_OF_TENANT = 6  # of these, so that slow texts of one tenant leave some to the others
GRACE_S = 1.0  # beyond the time of a process, in which the kernel ends it
MAX_REPORT_BYTES = 4096
_PASSED_ON = ("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "PYTHONHOME", "PYTHONPATH", "TMPDIR", "VIRTUAL_ENV")
OWN_VARIABLES = "MOIETY_GUARDRAIL_"  # beginning of the environment variables that checks get; others may be secrets
_REASONS = {
    ProcessLimit.CPU_TIME: "timeout",
    ProcessLimit.WALL_TIME: "timeout",
    ProcessLimit.MEMORY: "out_of_memory",
}


class EntryPointFailed(Exception):
    """A check did not come to a result. The message is a short reason without any of the text."""


class FairSlots:
    """Slots that tenants share: a free one goes to the waiting tenant that has the fewest. For one event loop."""

    def __init__(self, num_slots: int, most_of_tenant: int) -> None:
        self._num_free, self._most_of_tenant = num_slots, most_of_tenant
        self._num_taken: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def take(self, tenant_id: str) -> None:
        """Return once the tenant has a slot more. The caller gives it back with `give_back`."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant_id, deque()).append(waiter)
        self._grant()
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():  # granted meanwhile
                self.give_back(tenant_id)
            raise

    def give_back(self, tenant_id: str) -> None:
        self._num_free += 1
        self._num_taken[tenant_id] -= 1
        if not self._num_taken[tenant_id]:
            del self._num_taken[tenant_id]
        self._grant()

    def _grant(self) -> None:
        for tenant_id, waiters in list(self._waiting.items()):
            while waiters and waiters[0].done():  # cancelled
                waiters.popleft()
            if not waiters:
                del self._waiting[tenant_id]
        while self._num_free:
            able = [one for one in self._waiting if self._num_taken[one] < self._most_of_tenant]
            if not able:
                return
            tenant_id = min(able, key=lambda one: self._num_taken[one])
            waiter = self._waiting[tenant_id].popleft()
            if not self._waiting[tenant_id]:
                del self._waiting[tenant_id]
            if not waiter.done():
                self._num_free -= 1
                self._num_taken[tenant_id] += 1
                waiter.set_result(None)


class EntryPointChecks:
    """Checks by entry points. The template process of an entry point starts with its first text."""

    def __init__(self) -> None:
        self._templates: dict[str, ForkTemplate[GuardrailTemplateReady]] = {}
        self._locks: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()
        self._is_closed = False
        self._threads = ThreadPoolExecutor(MAX_PROCESSES, "guardrail")
        self._slots = FairSlots(MAX_PROCESSES, MAX_OF_TENANT)

    async def allows(self, name: str, request: bytes, timeout_s: float, memory_bytes: int, tenant_id: str = "") -> bool:
        """Return whether the check of the entry point `name` lets a text pass. Raises EntryPointFailed.

        The kernel ends the process after `timeout_s`, or if it takes `memory_bytes` more than its template.
        """
        loop = asyncio.get_running_loop()
        until_s = time.monotonic() + timeout_s
        try:
            async with asyncio.timeout(timeout_s + GRACE_S):
                await self._slots.take(tenant_id)
                try:
                    started = self._threads.submit(self._run, name, request, until_s, memory_bytes)
                except RuntimeError as exc:  # shutting down
                    self._slots.give_back(tenant_id)
                    raise EntryPointFailed("no_process") from exc
                # not when the caller leaves: the thread is busy until its process has ended
                started.add_done_callback(lambda _: loop.call_soon_threadsafe(self._slots.give_back, tenant_id))
                return await asyncio.wrap_future(started)
        except TimeoutError as exc:
            raise EntryPointFailed("timeout") from exc

    def close(self) -> None:
        """End all processes; none starts again. May block."""
        with self._lock:
            self._is_closed = True
            templates = list(self._templates.values())
        for template in templates:
            template.close()
        self._threads.shutdown(cancel_futures=True)

    def _run(self, name: str, request: bytes, until_s: float, memory_bytes: int) -> bool:
        """Check one text. Blocks; for threads. Raises EntryPointFailed."""
        try:
            for _ in range(MAX_ATTEMPTS):
                report = self._run_order(name, request, until_s, memory_bytes)
                if report is not None:
                    break
            else:
                raise EntryPointFailed("killed")
        except WorkerFailed as exc:
            raise EntryPointFailed("no_process") from exc
        if report.error:
            raise EntryPointFailed(f"exception: {report.error}")
        return report.allow

    def _run_order(self, name: str, request: bytes, until_s: float, memory_bytes: int) -> CheckReport | None:
        """Return the report of one process, None if it was killed from outside.

        Raises EntryPointFailed and WorkerFailed.
        """
        template = self._started(name)
        template_pid, wall_s = template.pid, until_s - time.monotonic()
        if wall_s <= 0:
            raise EntryPointFailed("timeout")
        with template.fork() as child:
            child.link.settimeout(wall_s + GRACE_S)
            try:
                send_frame(child.link, CheckOrder(request, wall_s, memory_bytes))
                deadline_s = until_s + GRACE_S
                return receive_frame(child.link, CheckReport, deadline_s=deadline_s, max_bytes=MAX_REPORT_BYTES)
            except msgspec.MsgspecError as exc:
                raise EntryPointFailed("invalid_report") from exc
            except (EOFError, OSError):  # including TimeoutError
                end = child.kill()
        if end is None:
            template.restart(template_pid)
            return None
        limit = reached_limit(end)
        if limit is None and not is_own_fault(end):
            return None
        raise EntryPointFailed("crash" if limit is None else _REASONS[limit])

    def _started(self, name: str) -> ForkTemplate[GuardrailTemplateReady]:
        """Return the template of an entry point. Raises EntryPointFailed and WorkerFailed."""
        with self._lock:
            lock = self._locks.setdefault(name, threading.Lock())
        with lock:
            if self._is_closed:
                raise WorkerFailed("the server is shutting down")
            if name not in self._templates:
                environment = {
                    key: value
                    for key, value in os.environ.items()
                    if key in _PASSED_ON or key.startswith(OWN_VARIABLES)
                }
                try:
                    self._templates[name] = ForkTemplate([*WORKER, name], GuardrailTemplateReady, _check, environment)
                except ValueError as exc:
                    log.warning("guardrail_not_loaded", entry_point=name, reason=str(exc))
                    raise EntryPointFailed("not_loaded") from exc
            return self._templates[name]


def _check(ready: GuardrailTemplateReady) -> None:
    if ready.error:
        raise ValueError(ready.error)
