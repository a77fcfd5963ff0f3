"""Builds the catalogue from the engines' states and the store. Within the caller's transaction."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import Text, cast, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.adapters.models import Adapter, AdapterState
from moiety_platform.adapters.schemas import served_name
from moiety_platform.classes.service import load_classes
from moiety_platform.engine_client.base import EngineState
from moiety_platform.model_catalog.features import features_of
from moiety_platform.model_catalog.schemas import ModelEntry, ModelReplicaLoad, ModelStatus, ModelUser, TokenPrices
from moiety_platform.model_routes.service import load_routes
from moiety_platform.prices.service import load_prices
from moiety_platform.routing.choose import cards_of
from moiety_platform.tenants.models import ApiKey, Project, Tenant, TenantStatus
from moiety_wire.engine_load import SleepState

MAX_TENANTS = 50  # listed per model


async def list_models(
    session: AsyncSession, states: Sequence[EngineState], now: datetime, *, shows_load: bool
) -> list[ModelEntry]:
    """Return all models by name, with the tenants and adapters that the session may read."""
    classes, prices, routes = await load_classes(session), await load_prices(session), await load_routes(session)
    adapters, users = await _adapters_by_model(session), await _users(session, now)
    entries = []
    for model, card in sorted(cards_of(states).items()):
        replicas = [one for one in states if one.card is not None and one.card.model == model]
        priced = {name: prices.of(model, name, terms.price_factor) for name, terms in classes.items()}
        may_use = [user for user, names in users if names is None or names & {model, *adapters[model]}]
        entry = ModelEntry(
            model=model,
            family=card.family,
            status=_status_of(replicas),
            max_context_tokens=max(one.card.max_context_tokens for one in replicas if one.card is not None),
            max_output_tokens=card.max_output_tokens,
            embedding_width=card.embedding_width,
            features=features_of(card),
            prices={name: TokenPrices.of(price) for name, price in priced.items() if price is not None},
            load=_load_of(replicas) if shows_load else None,
            routes=sorted(name for name, route in routes.items() if model in route.models()),
            adapters=adapters[model],
            tenants=may_use[:MAX_TENANTS],
            num_tenants=len(may_use),
        )
        entries.append(entry)
    return entries


def _status_of(replicas: Sequence[EngineState]) -> ModelStatus:
    if any(one.can_take for one in replicas):
        return ModelStatus.READY
    healthy = [one for one in replicas if one.healthy]
    sleeps = bool(healthy) and all(one.sleep is not SleepState.AWAKE for one in healthy)
    return ModelStatus.ASLEEP if sleeps else ModelStatus.UNAVAILABLE


def _load_of(replicas: Sequence[EngineState]) -> ModelReplicaLoad:
    loads = [one.load for one in replicas if one.healthy and one.load is not None]
    return ModelReplicaLoad(
        num_ready=sum(one.can_take for one in replicas),
        num_replicas=len(replicas),
        num_running=sum(load.num_running for load in loads),
        num_waiting=sum(load.num_waiting for load in loads),
        prompt_tokens_total=sum(load.prompt_tokens_total for load in loads),
        output_tokens_total=sum(load.output_tokens_total for load in loads),
    )


async def _adapters_by_model(session: AsyncSession) -> defaultdict[str, list[str]]:
    """Return the names under which clients use each model with an adapter."""
    ready = select(Adapter.model, Adapter.name).where(Adapter.state == AdapterState.READY)
    found: defaultdict[str, list[str]] = defaultdict(list)
    for model, name in await session.execute(ready.distinct().order_by(Adapter.model, Adapter.name)):
        found[model].append(served_name(model, name))
    return found


async def _users(session: AsyncSession, now: datetime) -> list[tuple[ModelUser, set[str] | None]]:
    """Return the active tenants with a valid key by name, and the models of their keys; None: all models."""
    statement = (
        select(Tenant.id, Tenant.name, Tenant.service_class, cast(ApiKey.allowed_models, Text))
        .join(Project, Project.tenant_id == Tenant.id)
        .join(ApiKey, ApiKey.project_id == Project.id)
        .where(Tenant.status == TenantStatus.ACTIVE, ApiKey.revoked_at.is_(None))
        .where(or_(ApiKey.expires_at.is_(None), ApiKey.expires_at > now))
        .distinct()
    )
    users: dict[str, ModelUser] = {}
    models: dict[str, set[str] | None] = {}
    for tenant_id, name, service_class, listed in await session.execute(statement):
        users[tenant_id] = ModelUser(tenant_id, name, service_class)
        before = models.get(tenant_id, set())
        models[tenant_id] = None if before is None or listed is None else before | set(json.loads(listed))
    ordered = sorted(users.values(), key=lambda user: (user.name, user.tenant_id))
    return [(user, models[user.tenant_id]) for user in ordered]
