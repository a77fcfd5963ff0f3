"""Cached snapshot of prices, routes and guardrails, for the requests of one gateway process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.clock import Clock
from moiety_platform.db.session import Database
from moiety_platform.db.snapshot import TTL_S, Snapshot
from moiety_platform.guardrails.service import load_guardrails
from moiety_platform.guardrails.terms import Guardrail, by_tenant
from moiety_platform.model_routes.service import load_routes
from moiety_platform.model_routes.terms import ModelRoute
from moiety_platform.prices.service import load_prices
from moiety_platform.prices.token_cost import PriceList


@dataclass(frozen=True, slots=True)
class RequestRules:
    """All prices, routes and guardrails at one moment.

    Routes are by the names that clients send, guardrails as `by_tenant` says.
    """

    prices: PriceList
    routes: Mapping[str, ModelRoute]
    guardrails: Mapping[str, tuple[Guardrail, ...]]


async def load_rules(session: AsyncSession) -> RequestRules:
    """Return all rules."""
    guardrails = by_tenant(await load_guardrails(session))
    return RequestRules(await load_prices(session), await load_routes(session), guardrails)


class RequestRulesCache(Snapshot[RequestRules]):
    """Snapshot of the rules that expires after `ttl_s` seconds. Owned by the entry point; for one event loop."""

    def __init__(self, database: Database, clock: Clock, *, ttl_s: float = TTL_S) -> None:
        super().__init__("rules of requests", load_rules, database, clock, ttl_s=ttl_s)
