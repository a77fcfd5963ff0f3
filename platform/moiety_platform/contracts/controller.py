"""`/admin/v1/contract-checks`: whether a new tenant can be served. The admin router authenticates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from litestar import Controller, post
from litestar.di import NamedDependency
from litestar.params import JSONBody, SkipValidation
from litestar.response import Stream
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.access.actions import needs
from moiety_platform.access.views import CHECK_CONTRACTS
from moiety_platform.classes.service import load_classes, require_class
from moiety_platform.contracts import schemas
from moiety_platform.contracts.arrivals import CONTRACT, ContractTerms
from moiety_platform.contracts.runner import ContractChecks, ContractPlan
from moiety_platform.contracts.schemas import ContractCheckView, NewContractCheck
from moiety_platform.db.session import Database
from moiety_platform.engine_client.base import EngineState
from moiety_platform.errors import BadRequest, Conflict
from moiety_platform.openapi.described import JSON, Described, describes
from moiety_platform.quota.kinds import LimitKind, LimitLevel
from moiety_platform.quota.models import Quota
from moiety_platform.simulations.learned_device import device_of_engine
from moiety_platform.tenants.admin_resource import TENANTS
from moiety_platform.tenants.models import Tenant
from moiety_platform.tenants.rows import require_row
from moiety_workload.simulations import DEVICES

_BOUNDS = {
    "requests_per_minute": (schemas.MIN_AMOUNT, schemas.MAX_RATE),
    "tokens_per_minute": (1, schemas.MAX_TOKENS),
    "input_tokens": (1, schemas.MAX_LENGTH),
    "output_tokens": (1, schemas.MAX_LENGTH),
    "weight": (schemas.MIN_AMOUNT, schemas.MAX_WEIGHT),
    "hours": (schemas.MIN_HOURS, schemas.MAX_HOURS),
    "window_s": (schemas.MIN_WINDOW_S, schemas.MAX_WINDOW_S),
    "replicas": (1, schemas.MAX_REPLICAS),
    "max_replicas": (1, schemas.MAX_REPLICAS),
    "required": (0, 1),
    "burst_factor": (1, schemas.MAX_BURST_FACTOR),
}
_LIMITS = LimitKind.REQUESTS_PER_MINUTE, LimitKind.TOKENS_PER_MINUTE

EngineStates = Callable[[], Sequence[EngineState]]


class ContractCheckController(Controller):
    """Route of contract checks. `engines` returns the states of the engines that this gateway knows."""

    path = "/contract-checks"
    tags = ("contract checks",)

    @post(
        status_code=200,
        opt=needs(CHECK_CONTRACTS) | describes(Described(answers={200: {JSON: ContractCheckView}}, errors=(404, 409))),
    )
    async def check_contract(
        self,
        database: NamedDependency[Database],
        contract_checks: NamedDependency[ContractChecks],
        engines: NamedDependency[SkipValidation[EngineStates]],
        data: JSONBody[NewContractCheck],
    ) -> Stream:
        """Simulate a new tenant at its limits beside the recent traffic: accepted, refused, or what to add.

        The answer begins at once, and has blanks before its JSON until the check is done. The check ends when the
        client closes the connection. A gateway runs one check at a time.
        """
        check_request(data)
        async with database.read() as session:
            classes = {name: terms.service for name, terms in (await load_classes(session)).items()}
            await require_class(session, data.service_class)
            terms = await contract_terms(session, data)
        if CONTRACT in classes:
            raise Conflict(f"The name {CONTRACT!r} is reserved in the simulation; rename that class.")
        healthy = [one for one in engines() if one.healthy and serves(one, data.model)]
        plan = ContractPlan(
            data, terms, classes, device_of(healthy, engines(), data), data.replicas or max(1, len(healthy))
        )
        answer = contract_checks.stream(contract_checks.start(plan))
        return Stream(answer, media_type=JSON, headers={"x-accel-buffering": "no"})


def check_request(request: NewContractCheck) -> None:
    """Check the request. Raises BadRequest."""
    for name, (low, high) in _BOUNDS.items():
        value = getattr(request, name)
        if value is not None and not low <= value <= high:
            raise BadRequest(f"'{name}' must be from {low:,g} to {high:,g}.", param=name)
    if request.device is not None and request.engine_id is not None:
        raise BadRequest(
            "Give 'device' or 'engine_id', not both: the simulation uses the step times of one of them.", param="device"
        )
    if request.device is not None and request.device not in DEVICES:
        raise BadRequest(f"'device' must be one of: {', '.join(DEVICES)}.", param="device")


async def contract_terms(session: AsyncSession, request: NewContractCheck) -> ContractTerms:
    """Return the contract, completed by that of the copied tenant. Raises BadRequest, or NotFound for the tenant."""
    weight, limits = 1.0, dict.fromkeys(_LIMITS, None)
    if request.copy_tenant_id is not None:
        weight = (await require_row(session, Tenant, request.copy_tenant_id, TENANTS)).weight
        scope = Quota.level == LimitLevel.TENANT, Quota.scope_id == request.copy_tenant_id
        found: Any = await session.execute(select(Quota.kind, Quota.cap).where(*scope, Quota.kind.in_(_LIMITS)))
        limits |= {LimitKind(kind): cap for kind, cap in found}
    requests_per_minute = request.requests_per_minute or limits[LimitKind.REQUESTS_PER_MINUTE]
    if not requests_per_minute:
        copied = "" if request.copy_tenant_id is None else ": the tenant to copy has no such limit"
        raise BadRequest(f"Give 'requests_per_minute'{copied}.", param="requests_per_minute")
    return ContractTerms(
        request.service_class,
        requests_per_minute,
        request.tokens_per_minute or limits[LimitKind.TOKENS_PER_MINUTE],
        request.input_tokens,
        request.output_tokens,
        weight if request.weight is None else request.weight,
    )


def serves(engine: EngineState, model: str | None) -> bool:
    return engine.card is not None and (model is None or engine.card.model == model)


def device_of(healthy: Sequence[EngineState], engines: Sequence[EngineState], request: NewContractCheck) -> Any:
    """Return the requested device of the simulator, or that of a healthy engine. Raises NotFound, Conflict."""
    if request.device is not None:
        return request.device
    if request.engine_id is not None:
        return device_of_engine(engines, request.engine_id)
    loads = [one.load for one in healthy if one.load is not None and one.load.step_costs is not None]
    if not loads:
        raise Conflict(
            "No engine has learned its step times yet: let one serve some requests, or give 'device'.",
            code="no_step_time_model",
        )
    return device_of_engine(healthy, loads[0].engine_id)
