"""Runs the simulation that this gateway has claimed, in the background.

It reads the traffic, simulates it twice, and stores the result. Any gateway can cancel a simulation, which ends at its
own gateway within a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import structlog

from moiety_platform.db.session import Database
from moiety_platform.errors import Unavailable
from moiety_platform.simulations import store
from moiety_platform.simulations.child import SimulatedLoad, SimulationVariant, simulate
from moiety_platform.simulations.problems import SimulationProblem
from moiety_platform.simulations.schemas import Compared, NewSimulation
from moiety_platform.simulations.traffic import Traffic, weights_of, write_traffic
from moiety_platform.tenants.checks import new_id

BEAT_S = 1.0
DRAWN_S = 600  # seconds of generated arrivals

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Plan:
    """Parameters of a simulation. `device` is a preset's name, or the contents of a device file of the simulator."""

    request: NewSimulation
    device: str | Mapping[str, Any]
    now: SimulationVariant
    then: SimulationVariant


class Simulations:
    """Runner of simulations. Owned by the entry point; for one event loop."""

    def __init__(self, database: Database, *, limit_s: float, niceness: int, beat_s: float = BEAT_S) -> None:
        """`niceness` is the scheduling niceness of the simulator's process."""
        self._database = database
        self.limit_s, self.niceness = limit_s, niceness  # can be changed, for simulations to come
        self._beat_s = beat_s
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, plan: Plan) -> str:
        """Start a simulation and return its id. Raises Conflict while one runs, and Unavailable."""
        simulation_id = new_id("sim")
        async with self._database.write() as session:
            began_ms = await store.claim(session, simulation_id, msgspec.to_builtins(plan.request))
        task = asyncio.create_task(self._run(simulation_id, plan, datetime.fromtimestamp(began_ms / 1000, UTC)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return simulation_id

    async def stop(self) -> None:
        """Cancel the running simulation. Idempotent."""
        for task in (tasks := set(self._tasks)):
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _run(self, simulation_id: str, plan: Plan, began: datetime) -> None:
        work = asyncio.create_task(self._compare(plan, began))
        try:
            await self._watch(simulation_id, work)
            result = await work
        except SimulationProblem as problem:
            await self._finish(simulation_id, "failed", problem=str(problem))
        except Unavailable:
            await self._finish(
                simulation_id, "failed", problem="the database became unavailable; start the simulation again"
            )
        except asyncio.CancelledError:
            if not work.cancelled():
                raise
        except Exception:  # top level of a task
            log.exception("simulation_failed", simulation_id=simulation_id)
            await self._finish(simulation_id, "failed", problem="of a defect; see the gateway's log")
        else:
            await self._finish(simulation_id, "done", result=result)
        finally:
            if not work.done():
                work.cancel()
                await asyncio.wait({work})
                await self._finish(simulation_id, "failed", problem="the gateway that ran it was stopped")

    async def _watch(self, simulation_id: str, work: asyncio.Task[Compared]) -> None:
        """Wait until it is done or cancelled. Raises SimulationProblem when it exceeds the time limit."""
        limit_s = self.limit_s
        ends_at = asyncio.get_running_loop().time() + limit_s
        while not (await asyncio.wait({work}, timeout=self._beat_s))[0]:
            if asyncio.get_running_loop().time() > ends_at:
                work.cancel()
                await asyncio.wait({work})
                raise SimulationProblem(f"it took more than {limit_s:.0f} s; choose fewer minutes")
            with contextlib.suppress(Unavailable):  # may be temporary
                async with self._database.write() as session:
                    if not await store.beat(session, simulation_id):
                        work.cancel()

    async def _compare(self, plan: Plan, until: datetime) -> Compared:
        with tempfile.TemporaryDirectory(prefix="moiety-simulation-") as name:
            folder = Path(name)
            traffic, arrivals = await self._arrivals(plan, until, folder)
            device = plan.device
            if not isinstance(device, str):
                (folder / "device.json").write_bytes(msgspec.json.encode(device))
            option = device if isinstance(device, str) else str(folder / "device.json")
            offer = SimulatedLoad(folder, arrivals, option, await weights_of(self._database, traffic.tenants))
            now, then = [await simulate(offer, side, niceness=self.niceness) for side in (plan.now, plan.then)]
        device_name = device if isinstance(device, str) else str(device["name"])
        num_requests = traffic.num_requests or now.num_requests
        return Compared(device_name, num_requests, traffic.num_unserved, now, then)

    async def _arrivals(self, plan: Plan, until: datetime, folder: Path) -> tuple[Traffic, list[str]]:
        """Return the traffic, and the simulator's options for it."""
        request = plan.request
        if request.generate is not None:
            return Traffic(), [
                f"--generate={request.generate}",
                "--duration-s",
                str(min(DRAWN_S, 60 * request.minutes)),
            ]
        trace = folder / "traffic.csv"
        since = until - timedelta(minutes=request.minutes)
        traffic = await write_traffic(self._database, since, until, request.model, trace)
        if unknown := traffic.classes - plan.now.classes.keys():
            raise SimulationProblem(f"there are requests of classes that no longer exist: {', '.join(sorted(unknown))}")
        return traffic, ["--trace", str(trace)]

    async def _finish(self, simulation_id: str, state: str, **fields: Any) -> None:
        with contextlib.suppress(Unavailable):  # then it counts as dead
            async with self._database.write() as session:
                await store.finish(session, simulation_id, state, **fields)
