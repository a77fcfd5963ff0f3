"""Runs contract checks of this gateway, one at a time, in a process of lower priority and for a limited time.

A check belongs to the request that asked for it, and ends when its client leaves.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import structlog

from moiety_platform.contracts.arrivals import Arrival, ContractTerms, burst_of, busiest_window, contract_arrivals
from moiety_platform.contracts.check import ContractCheck, ContractReport, ContractRun
from moiety_platform.contracts.errors import ContractProblem
from moiety_platform.contracts.schemas import ContractCheckView, NewContractCheck
from moiety_platform.contracts.simulator import ContractSimulator
from moiety_platform.contracts.traffic import busiest_hours, hourly_work, read_arrivals, read_lengths
from moiety_platform.db.session import Database
from moiety_platform.errors import Conflict, Unavailable
from moiety_wire.classes import ServiceClass

BEAT_S = 1.0  # between two blanks of a response that waits
BUSY = "This gateway runs another contract check, and only one can run at a time: wait for its end."
STOPPED = "the gateway was stopped; start the check again"

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ContractPlan:
    """Parameters of a check. `device` is a preset's name, or the contents of a device file of the simulator."""

    request: NewContractCheck
    terms: ContractTerms
    classes: Mapping[str, ServiceClass]
    device: str | Mapping[str, Any]
    replicas: int


@dataclass(slots=True)
class _CheckProgress:
    """Results of a check so far."""

    since: datetime | None = None
    num_recent: int = 0
    num_own: int = 0
    runs: list[ContractRun] = field(default_factory=list)


class ContractChecks:
    """Runner of contract checks. Owned by the entry point; for one event loop."""

    def __init__(self, database: Database, *, limit_s: float, niceness: int, beat_s: float = BEAT_S) -> None:
        """`niceness` is the scheduling niceness of the simulator's process."""
        self._database = database
        self.limit_s, self.niceness = limit_s, niceness  # can be changed, for checks to come
        self._beat_s = beat_s
        self._task: asyncio.Task[ContractCheckView] | None = None

    @property
    def is_running(self) -> bool:
        return self._task is not None and not self._task.done()

    def start(self, plan: ContractPlan) -> asyncio.Task[ContractCheckView]:
        """Start a check, which never fails: its result says why there is none. Raises Conflict while another runs."""
        if self.is_running:
            raise Conflict(BUSY, code="contract_check_running")
        self._task = asyncio.create_task(self._run(plan))
        return self._task

    async def stream(self, task: asyncio.Task[ContractCheckView]) -> AsyncIterator[bytes]:
        """Yield the result as JSON, and blanks before it while the check runs. Ends the check if it is closed before.

        The blanks keep the connection open, and show that the client is still there.
        """
        try:
            while not (await asyncio.wait({task}, timeout=self._beat_s))[0]:
                yield b" "
            yield msgspec.json.encode(await task)
        finally:
            task.cancel()

    async def stop(self) -> None:
        """Cancel the running check. Idempotent."""
        if (task := self._task) is not None:
            task.cancel()
            await asyncio.wait({task})

    async def _run(self, plan: ContractPlan) -> ContractCheckView:
        progress = _CheckProgress()
        limit_s = self.limit_s
        try:
            async with asyncio.timeout(limit_s):
                report = await self._check(plan, progress)
        except TimeoutError:
            problem = f"it took more than {limit_s:.0f} s; choose a shorter window or fewer replicas to try"
        except ContractProblem as exc:
            problem = str(exc)
        except asyncio.CancelledError:  # the root of a task: the client has left, or the gateway stops
            problem = STOPPED
        except Unavailable:
            problem = "the database became unavailable; start the check again"
        except Exception:  # top level of a task
            log.exception("contract_check_failed")
            problem = "of a defect; see the gateway's log"
        else:
            return _view(plan, progress, report, None)
        return _view(plan, progress, None, problem)

    async def _check(self, plan: ContractPlan, progress: _CheckProgress) -> ContractReport:
        request = plan.request
        recent = await self._recent(plan, progress)
        lengths = recent
        if request.copy_tenant_id is not None and None in (request.input_tokens, request.output_tokens):
            since = datetime.now(UTC) - timedelta(hours=request.hours)
            lengths = await read_lengths(self._database, request.copy_tenant_id, since, request.model)
        own = await asyncio.to_thread(contract_arrivals, plan.terms, lengths, request.window_s, request.seed)
        progress.num_recent, progress.num_own = len(recent), len(own)
        with tempfile.TemporaryDirectory(prefix="moiety-contract-") as name:
            folder, device = Path(name), plan.device
            if not isinstance(device, str):
                (folder / "device.json").write_bytes(msgspec.json.encode(device))
                device = str(folder / "device.json")
            simulator = ContractSimulator(folder, device, plan.terms.weight, niceness=self.niceness)
            burst = partial(burst_of, recent, request.burst_factor, request.window_s, request.seed)
            checking = ContractCheck(
                plan.terms, recent, own, plan.classes, simulator, required=request.required, make_burst=burst
            )
            progress.runs = checking.runs
            return await checking.run(plan.replicas, max(plan.replicas, request.max_replicas))

    async def _recent(self, plan: ContractPlan, progress: _CheckProgress) -> list[Arrival]:
        """Return the busiest window of the recent traffic."""
        request, until = plan.request, datetime.now(UTC)
        since = until - timedelta(hours=request.hours)
        only = request.model, plan.classes.keys()
        hours = busiest_hours(await hourly_work(self._database, since, until, *only), request.window_s)
        if hours is None:
            return []
        start = max(since, hours[0])
        arrivals = await read_arrivals(self._database, start, min(until, hours[1]), *only)
        if not arrivals:
            return []
        first_s, window = await asyncio.to_thread(busiest_window, arrivals, request.window_s)
        progress.since = start + timedelta(seconds=first_s)
        return window


def _view(
    plan: ContractPlan, progress: _CheckProgress, report: ContractReport | None, problem: str | None
) -> ContractCheckView:
    return ContractCheckView(
        state="failed" if report is None else "done",
        problem=problem,
        verdict=None if report is None else report.verdict,
        terms=plan.terms,
        device=plan.device if isinstance(plan.device, str) else str(plan.device["name"]),
        required=plan.request.required,
        window_s=plan.request.window_s,
        window_since=progress.since,
        num_requests=progress.num_recent,
        num_contract_requests=progress.num_own,
        replicas=plan.replicas,
        replicas_needed=None if report is None else report.replicas_needed,
        classes=[] if report is None else report.classes,
        before={} if report is None else report.before,
        runs=list(progress.runs),
        burst_factor=plan.request.burst_factor,
        burst=None if report is None else report.burst,
    )
