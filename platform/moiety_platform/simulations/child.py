"""One run of the simulator, as a `moiety simulate` process with lower priority and bounded memory.

The process ends with this one. The gateway itself knows nothing of the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from moiety_platform.simulations.problems import SimulationProblem
from moiety_platform.simulations.schemas import VariantMetrics
from moiety_wire.classes import ServiceClass

MEMORY_BYTES = 4 * 2**30  # of address space, most of which is never used
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "COLUMNS": "1000", "NO_COLOR": "1"}


@dataclass(frozen=True, slots=True)
class SimulationVariant:
    """Parameters of one of the two runs."""

    classes: Mapping[str, ServiceClass]
    policy: str
    times: float
    replicas: int


@dataclass(frozen=True, slots=True)
class SimulatedLoad:
    """Parameters of both runs. `arrivals` and `device` are options of the command; files go into `folder`."""

    folder: Path
    arrivals: list[str]
    device: str
    weights: Mapping[str, float]


async def simulate(offer: SimulatedLoad, side: SimulationVariant, *, niceness: int) -> VariantMetrics:
    """Run the simulator. Raises SimulationProblem. Cancellation kills the process."""
    classes = offer.folder / "classes.json"
    classes.write_bytes(msgspec.json.encode({name: _table(service) for name, service in side.classes.items()}))
    arguments = ["simulate", "--json", *offer.arrivals, "--device", offer.device, "--class-targets", str(classes)]
    arguments += ["--policy", side.policy, "--times", str(side.times), "--replicas", str(side.replicas)]
    if offer.weights:
        arguments += ["--weights", ",".join(f"{tenant}={weight}" for tenant, weight in offer.weights.items())]
    report = await _run(arguments, niceness)
    try:
        return msgspec.convert(report["policies"][side.policy], VariantMetrics)
    except (KeyError, TypeError, msgspec.ValidationError) as exc:
        raise SimulationProblem(f"the simulator and this gateway are of different releases ({exc})") from exc


def _table(service: ServiceClass) -> dict[str, Any]:
    """Return all fields but the name, including empty SLO fields."""
    return {name: value for name, value in msgspec.structs.asdict(service).items() if name != "name"}


async def _run(arguments: list[str], niceness: int) -> Any:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "moiety_platform.supervisor.child", str(os.getpid()), *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **_ENVIRONMENT},
    )  # fmt: skip
    try:
        _bound(process.pid, niceness)
        output, complaint = await process.communicate()
        status = await process.wait()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.communicate()
    if status != 0:
        raise SimulationProblem(_reason(status, complaint.decode(errors="replace")))
    return json.loads(output)


def _bound(pid: int, niceness: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.setpriority(os.PRIO_PROCESS, pid, niceness)
        if sys.platform == "linux":
            resource.prlimit(pid, resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))


def _reason(status: int, complaint: str) -> str:
    """Return the cause of a failure, in the simulator's words if it printed any."""
    if status < 0:
        return f"the simulator was ended by {signal.Signals(-status).name}; choose fewer minutes"
    if "MemoryError" in complaint:
        return f"the simulator needs more than {MEMORY_BYTES // 2**30} GiB of memory; choose fewer minutes"
    lines = [line for line in complaint.splitlines() if line.strip()]
    return lines[-1].removeprefix("moiety simulate: ") if lines else f"the simulator ended with status {status}"
