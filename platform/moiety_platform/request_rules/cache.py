"""Cached snapshot of prices, routes, guardrails and content logging, for the requests of one gateway process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.clock import Clock
from moiety_platform.db.session import Database
from moiety_platform.db.snapshot import TTL_S, Snapshot
from moiety_platform.guardrails.service import load_guardrails
from moiety_platform.guardrails.terms import ALL_TENANTS, Guardrail, by_tenant
from moiety_platform.model_routes.service import load_routes
from moiety_platform.model_routes.terms import ModelRoute
from moiety_platform.prices.service import load_prices
from moiety_platform.prices.token_cost import PriceList
from moiety_platform.request_contents.opted_in import load_terms
from moiety_platform.request_contents.terms import ContentTerms

TextRule = Guardrail | ContentTerms
"""What is done with the text of a request: a check, or the logging of it."""


@dataclass(frozen=True, slots=True)
class RequestRules:
    """All prices, routes, guardrails and opt-ins to content logging at one moment.

    Routes are by the names that clients send, guardrails as `by_tenant` says. A tenant that opted in has its terms
    after its guardrails.
    """

    prices: PriceList
    routes: Mapping[str, ModelRoute]
    guardrails: Mapping[str, tuple[TextRule, ...]]


async def load_rules(session: AsyncSession) -> RequestRules:
    """Return all rules."""
    rules: dict[str, tuple[TextRule, ...]] = {**by_tenant(await load_guardrails(session))}
    for terms in await load_terms(session):
        rules[terms.tenant_id] = (*rules.get(terms.tenant_id, rules[ALL_TENANTS]), terms)
    return RequestRules(await load_prices(session), await load_routes(session), rules)


class RequestRulesCache(Snapshot[RequestRules]):
    """Snapshot of the rules that expires after `ttl_s` seconds. Owned by the entry point; for one event loop."""

    def __init__(self, database: Database, clock: Clock, *, ttl_s: float = TTL_S) -> None:
        super().__init__("rules of requests", load_rules, database, clock, ttl_s=ttl_s)
