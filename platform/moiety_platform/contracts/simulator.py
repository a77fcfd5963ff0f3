"""Simulation of arrivals by the engine's simulator, in a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from moiety_platform.contracts.arrivals import CONTRACT, Arrival, to_csv
from moiety_platform.contracts.errors import ContractProblem
from moiety_platform.simulations.child import SimulatedLoad, SimulationVariant, simulate
from moiety_platform.simulations.problems import SimulationProblem
from moiety_wire.classes import ServiceClass
from moiety_workload.simulations import POLICIES

NICENESS = 10


class ContractSimulator:
    """Runs simulations on one device. `device` is a preset's name or a device file; files go into `folder`."""

    def __init__(self, folder: Path, device: str, weight: float, *, niceness: int = NICENESS) -> None:
        self._folder, self._device, self._niceness = folder, device, niceness
        self._weights = {} if weight == 1 else {CONTRACT: weight}

    async def __call__(
        self, arrivals: Sequence[Arrival], classes: Mapping[str, ServiceClass], replicas: int
    ) -> dict[str, float]:
        """Return the attainment of each class. Raises ContractProblem."""
        trace = self._folder / "contract.csv"
        await asyncio.to_thread(_write_csv, trace, arrivals)
        has_tenant = any(one.tenant == CONTRACT for one in arrivals)
        load = SimulatedLoad(self._folder, ["--trace", str(trace)], self._device, self._weights if has_tenant else {})
        try:
            found = await simulate(
                load, SimulationVariant(classes, POLICIES[0], 1.0, replicas), niceness=self._niceness
            )
        except SimulationProblem as exc:
            raise ContractProblem(str(exc)) from exc
        return {name: one.attainment for name, one in found.classes.items()}


def _write_csv(path: Path, arrivals: Sequence[Arrival]) -> None:
    path.write_text(to_csv(arrivals), encoding="utf-8")
