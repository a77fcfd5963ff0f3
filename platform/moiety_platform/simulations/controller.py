"""`/admin/v1/simulations`: effect of other settings on the last hour's traffic. The admin router authenticates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from litestar import Controller, delete, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody, SkipValidation

from moiety_platform.access.actions import needs
from moiety_platform.access.views import SIMULATE
from moiety_platform.classes.checks import check_terms
from moiety_platform.classes.service import apply_change, load_classes
from moiety_platform.classes.terms import ClassTerms
from moiety_platform.db.session import Database
from moiety_platform.engine_client.base import EngineState
from moiety_platform.errors import BadRequest
from moiety_platform.openapi.described import fails
from moiety_platform.simulations import store
from moiety_platform.simulations.child import SimulationVariant
from moiety_platform.simulations.learned_device import device_of_engine
from moiety_platform.simulations.runner import Plan, Simulations
from moiety_platform.simulations.schemas import (
    MAX_MINUTES,
    MAX_REPLICAS,
    MAX_SPEC_LENGTH,
    MAX_TIMES,
    MIN_TIMES,
    NewSimulation,
    SimulationView,
    SimulationViews,
)
from moiety_wire.classes import ServiceClass
from moiety_workload.simulations import DEVICES, POLICIES

_BOUNDS = {
    "minutes": (1, MAX_MINUTES),
    "times": (MIN_TIMES, MAX_TIMES),
    "replicas": (1, MAX_REPLICAS),
    "replicas_now": (1, MAX_REPLICAS),
}


EngineStates = Callable[[], Sequence[EngineState]]


class SimulationController(Controller):
    """Routes of simulations. `engines` returns the states of the engines that this gateway knows."""

    path = "/simulations"
    tags = ("simulations",)

    @post(status_code=202, opt=needs(SIMULATE) | fails(404, 409))
    async def start_simulation(
        self,
        database: NamedDependency[Database],
        simulations: NamedDependency[Simulations],
        engines: NamedDependency[SkipValidation[EngineStates]],
        data: JSONBody[NewSimulation],
    ) -> SimulationView:
        """Simulate the traffic of the last minutes twice: with the current settings and with the requested ones.

        The engine's simulator runs in a process of its own, one simulation at a time; the result is kept for a day.
        """
        check(data)
        async with database.read() as session:
            now = await load_classes(session)
        then = changed(now, data)
        device = data.device or device_of_engine(engines(), data.engine_id or "")
        plan = Plan(
            data,
            device,
            SimulationVariant(services(now.values()), POLICIES[0], 1.0, data.replicas_now),
            SimulationVariant(services(then.values()), data.policy, data.times, data.replicas),
        )
        simulation_id = await simulations.start(plan)
        async with database.read() as session:
            return await store.find(session, simulation_id)

    @get(opt=needs(SIMULATE))
    async def list_simulations(self, database: NamedDependency[Database]) -> SimulationViews:
        """List the last simulations, newest first."""
        async with database.read() as session:
            return SimulationViews(await store.find_last(session), list(DEVICES), list(POLICIES))

    @get("/{simulation_id:str}", opt=needs(SIMULATE))
    async def get_simulation(self, database: NamedDependency[Database], simulation_id: FromPath[str]) -> SimulationView:
        """Return one simulation and its result."""
        async with database.read() as session:
            return await store.find(session, simulation_id)

    @delete("/{simulation_id:str}", status_code=200, opt=needs(SIMULATE))
    async def cancel_simulation(
        self, database: NamedDependency[Database], simulation_id: FromPath[str]
    ) -> SimulationView:
        """Cancel a simulation, on whichever gateway it runs; no effect on one that has ended."""
        async with database.write() as session:
            await store.find(session, simulation_id)
            await store.finish(session, simulation_id, "cancelled")
            return await store.find(session, simulation_id)


def check(request: NewSimulation) -> None:
    """Check the request. Raises BadRequest."""
    for name, (low, high) in _BOUNDS.items():
        if not low <= getattr(request, name) <= high:
            raise BadRequest(f"'{name}' must be from {low:g} to {high:g}.", param=name)
    if request.policy not in POLICIES:
        raise BadRequest(f"'policy' must be one of: {', '.join(POLICIES)}.", param="policy")
    if (request.device is None) == (request.engine_id is None):
        raise BadRequest(
            "Give either 'device' or 'engine_id': the simulation uses the step times of one of them.", param="device"
        )
    if request.device is not None and request.device not in DEVICES:
        raise BadRequest(f"'device' must be one of: {', '.join(DEVICES)}.", param="device")
    spec = request.generate
    if spec is not None and not (spec.isprintable() and 0 < len(spec) <= MAX_SPEC_LENGTH):
        raise BadRequest(f"'generate' must have 1 to {MAX_SPEC_LENGTH} printable characters.", param="generate")


def changed(now: Mapping[str, ClassTerms], request: NewSimulation) -> dict[str, ClassTerms]:
    """Return the classes with the requested changes. Raises BadRequest like the change itself."""
    then = dict(now)
    for name, change in request.classes.items():
        if name not in now:
            raise BadRequest(f"There is no class {name[:32]!r}; there are: {', '.join(sorted(now))}.", param="classes")
        then[name] = apply_change(now[name], change)
    for terms in then.values():
        check_terms(terms, then)
    return then


def services(terms: Iterable[ClassTerms]) -> dict[str, ServiceClass]:
    return {one.service.name: one.service for one in terms}
