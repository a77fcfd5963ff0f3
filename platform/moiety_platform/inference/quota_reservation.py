"""Quota reservation of one request.

The prompt and a part of the output are reserved under every quota first, and more output ahead of generation. So no
token is generated without quota.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping

import msgspec

from moiety_platform.auth.principal import Principal
from moiety_platform.classes.terms import Catalogue, ChosenClass
from moiety_platform.errors import Forbidden, Unavailable
from moiety_platform.prices.token_cost import FREE, MILLION, Price, PriceList
from moiety_platform.quota.account import most_used_percent
from moiety_platform.quota.enforcer import LEASE_S, QuotaEnforcer
from moiety_platform.quota.errors import QuotaExceeded
from moiety_platform.quota.kinds import LimitLevel, Meter, Scope, Unit
from moiety_platform.quota.lease import Charge, Hold, WindowId
from moiety_platform.quota.rate_limit_headers import headers

MAX_TARIFFS = 1024  # each adapter has its own tariff
PAUSE_S = 0.5
THROTTLED_S = 120.0  # how long a sequence waits for a rate limit before it ends


class Tariff:
    """Prices of the classes that may serve a request. Shared by many requests. Immutable."""

    __slots__ = ("is_complete", "most_expensive", "prices")

    def __init__(self, by_class: Mapping[str, Price | None]) -> None:
        """Create a tariff. The price None means that the model has no price."""
        self.prices = {name: price for name, price in by_class.items() if price is not None}
        self.is_complete = len(self.prices) == len(by_class)
        self.most_expensive = functools.reduce(Price.most, self.prices.values()) if self.prices else FREE
        """Upper bound of the price, whichever class serves."""


NO_TARIFF = Tariff({})


class Tariffs:
    """Cache of tariffs, cleared when prices or classes change. For one event loop."""

    def __init__(self) -> None:
        self._prices: PriceList | None = None
        self._catalogue: Catalogue | None = None
        self._made: dict[tuple[str, str, str, str | None], Tariff] = {}

    def of(self, prices: PriceList, catalogue: Catalogue, chosen: ChosenClass, model: str, base: str) -> Tariff:
        """Return the tariff with the model's own prices, or those of its base model for an adapter."""
        if prices is not self._prices or catalogue is not self._catalogue or len(self._made) >= MAX_TARIFFS:
            self._prices, self._catalogue, self._made = prices, catalogue, {}
        key = (model, base, chosen.service.name, None if chosen.fallback is None else chosen.fallback.name)
        tariff = self._made.get(key)
        if tariff is None:
            tariff = self._made[key] = tariff_of(prices, catalogue, chosen, model, base)
        return tariff


def tariff_of(prices: PriceList, catalogue: Catalogue, chosen: ChosenClass, model: str, base: str) -> Tariff:
    """Return the tariff of the classes that may serve a request, with the model's own prices or its base model's."""
    by_class = {}
    for service in (chosen.service, chosen.fallback):
        if service is not None:
            name, factor = service.name, catalogue[service.name].price_factor
            by_class[name] = prices.of(model, name, factor) or prices.of(base, name, factor)
    return Tariff(by_class)


class Throttled(Exception):
    """A rate limit is exhausted for now. A later attempt may succeed."""


class UsedTokens(msgspec.Struct, frozen=True):
    """Tokens used by a request."""

    service_class: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


NOTHING_USED = UsedTokens("", 0, 0, 0)


def scopes_of(principal: Principal) -> tuple[Scope, ...]:
    """Return the scopes whose quotas apply to a caller."""
    return (
        Scope(LimitLevel.TENANT, principal.tenant_id),
        Scope(LimitLevel.PROJECT, principal.project_id),
        Scope(LimitLevel.KEY, principal.root_key_id),
    )


class QuotaReservation:
    """The reservation of one request.

    Nothing is reserved until `begin`. It is settled once, when the request's record is closed.
    """

    def __init__(
        self,
        enforcer: QuotaEnforcer,
        principal: Principal,
        scopes: tuple[Scope, ...] | None = None,
        num_slots: int = 1,
    ) -> None:
        """Create the reservation under the quotas of the caller's scopes, or of those that are given.

        `num_slots`: how many open requests it counts as; 0 for a request that is only quoted.
        """
        self._num_slots = num_slots
        self._enforcer = enforcer
        self._scopes = scopes_of(principal) if scopes is None else scopes
        self._hold: Hold | None = None
        self._tariff = NO_TARIFF
        self._most_expensive = FREE
        self._prompt_tokens = 0
        self._reserved = self._reserved_cost = 0  # tokens, and their maximum cost
        self.refusal_code = QuotaExceeded.default_code  # reason of a refused extension

    async def begin_least(self, num_prompt_tokens: int, num_sequences: int, tariff: Tariff) -> None:
        """Reserve a lower bound of a request whose prompt is not known yet: one token of output for each sequence.

        `begin` raises the reservation to the whole request. Raises the errors of `begin`.
        """
        await self.begin(num_prompt_tokens, num_sequences, 1, tariff)

    async def check_least(self, num_sequences: int, tariff: Tariff) -> None:
        """Check that the quotas allow a lower bound of the request, and keep no reservation.

        No effect while the request has a reservation. Raises the errors of `begin`.
        """
        if self._hold is not None:
            return
        await self.begin_least(0, num_sequences, tariff)
        hold, self._hold = self._hold, None
        assert hold is not None, "begun"
        hold.settle(dict.fromkeys(Unit, 0))
        self._reserved = self._reserved_cost = 0

    async def begin(self, num_prompt_tokens: int, num_sequences: int, credit_tokens: int, tariff: Tariff) -> int:
        """Reserve the prompt and output for each sequence, and return the credit of each sequence.

        A quota with less available than requested reduces the credit. Raises QuotaExceeded, RequestExceedsQuota,
        Forbidden or Unavailable.
        """
        self._prompt_tokens, self._tariff, self._most_expensive = num_prompt_tokens, tariff, tariff.most_expensive
        least = self._amounts(num_prompt_tokens + num_sequences * min(1, credit_tokens))
        while True:
            tokens = num_prompt_tokens + num_sequences * credit_tokens
            amounts = self._amounts(tokens)
            try:
                self._hold = await self._enforcer.hold(self._scopes, amounts, least, self._hold)
            except QuotaExceeded as refusal:
                affordable = self._affordable(refusal.unit, refusal.available) - num_prompt_tokens
                credit_tokens = min(credit_tokens - 1, affordable // num_sequences)
                if credit_tokens < 1:
                    raise
            else:
                self._reserved = max(self._reserved, tokens)
                self._reserved_cost = max(self._reserved_cost, amounts[Unit.MONEY])
                if not tariff.is_complete and self._hold.leases:
                    self._require_price()
                return credit_tokens

    async def most_used_percent(self) -> float:
        """Return the largest used percentage of the quotas of the request, 0 without one. Raises Unavailable.

        Quotas are those per day or month, in tokens or money, as far as this process knows them.
        """
        accounts = await self._enforcer.accounts_of(self._scopes)
        return most_used_percent(accounts, self._enforcer.clock.monotonic())

    def require_current(self) -> None:
        """Raise Unavailable if the lease of the reservation has expired."""
        if self._hold is not None and self._hold.leases:
            self._enforcer.require_current(self._hold)

    async def extend(self, tokens: int, more: int) -> int:
        """Reserve up to `more` tokens beyond `tokens` in total, and return how many.

        0 means that a quota is exhausted. Raises Throttled for a rate limit, which recovers, or
        Unavailable.
        """
        assert self._hold is not None, "begun before it is extended"
        while more > 0:
            amounts = self._amounts(tokens + more)
            refusal = await self._enforcer.extend(self._hold, amounts)
            if refusal is None:
                self._reserved = max(self._reserved, tokens + more)
                self._reserved_cost = max(self._reserved_cost, amounts[Unit.MONEY])
                return more
            more = min(more - 1, self._affordable(refusal.limit.kind.unit, refusal.available) - tokens)
            if more <= 0 and refusal.limit.kind.meter is Meter.RATE:
                raise Throttled
        return 0

    async def extend_or_wait(self, tokens: int, more: int) -> int:
        """Extend the reservation of a sequence without remaining credit.

        Waits during an outage for as long as leases last, and for a rate limit for at most THROTTLED_S.
        """
        num_outages = num_throttled = 0
        while num_outages * PAUSE_S < LEASE_S and num_throttled * PAUSE_S < THROTTLED_S:
            try:
                return await self.extend(tokens, more)
            except Unavailable as error:
                self.refusal_code = error.code
                num_outages += 1
            except Throttled:
                self.refusal_code = "rate_limit_exceeded"
                num_throttled += 1
            await asyncio.sleep(PAUSE_S)
        return 0

    def cost(self, used: UsedTokens) -> int:
        """Return the cost in the class that served the request, in nano-dollars."""
        price = self._tariff.prices.get(used.service_class, FREE)
        return 0 if price is FREE else price.cost(used.prompt_tokens, used.cached_tokens, used.output_tokens)

    def charges(self, used: UsedTokens, cost: int) -> tuple[Charge, ...]:
        """Return the charges for the used tokens and cost, without settling."""
        if self._hold is None or not self._hold.leases:
            return ()
        return self._hold.charges(self._spent(used, cost))

    def settle(self, used: UsedTokens, cost: int) -> tuple[Charge, ...]:
        """Settle the reservation with the used tokens and cost, and return the charges."""
        return self._hold.settle(self._spent(used, cost)) if self._hold is not None else ()

    @property
    def prices(self) -> dict[str, Price]:
        """Prices by service class, for the classes that may serve the request."""
        return self._tariff.prices

    @property
    def stocks(self) -> list[tuple[WindowId, Unit]]:
        """Quota windows that are charged for usage, each with its unit."""
        if self._hold is None or not self._hold.stocks:
            return []
        return [(lease.window, lease.unit) for lease in self._hold.stocks]

    def headers(self) -> dict[str, str]:
        """Return the rate limit headers."""
        if self._hold is None or not self._hold.leases:
            return {}
        return headers(self._enforcer.limit_statuses(self._hold))

    def _amounts(self, tokens: int) -> dict[Unit, int]:
        """Return the amounts that a request of `tokens` tokens needs, by unit."""
        cost = self._most_cost(tokens) if self._most_expensive is not FREE else 0
        return {Unit.TOKENS: tokens, Unit.REQUESTS: 1, Unit.SLOTS: self._num_slots, Unit.MONEY: cost}

    def _most_cost(self, tokens: int) -> int:
        """Return the maximum cost of `tokens` tokens, including the prompt."""
        return self._most_expensive.cost(self._prompt_tokens, 0, tokens - self._prompt_tokens)

    def _spent(self, used: UsedTokens, cost: int) -> dict[Unit, int]:
        """Return the amounts to settle. A request without billed tokens does not count as a request."""
        tokens = min(used.prompt_tokens + used.output_tokens, self._reserved)
        return {Unit.TOKENS: tokens, Unit.REQUESTS: min(1, tokens), Unit.MONEY: min(cost, self._reserved_cost)}

    def _affordable(self, unit: Unit, available: int) -> int:
        """Return the total number of tokens that the request can have with `available` more of the unit."""
        if unit is Unit.TOKENS:
            return self._reserved + available
        if unit is not Unit.MONEY or self._most_expensive.output == 0:
            return 0
        left = (available + self._reserved_cost) * MILLION - self._prompt_tokens * self._most_expensive.input
        return self._prompt_tokens + left // self._most_expensive.output

    def _require_price(self) -> None:
        """Refuse a model without a price under a money quota, which could not be enforced."""
        assert self._hold is not None
        if not self._tariff.is_complete and any(lease.unit is Unit.MONEY for lease in self._hold.leases):
            self._hold.settle(dict.fromkeys(Unit, 0))
            self._hold = None
            raise Forbidden(
                "A limit on money applies, but this model has no price; an administrator can set one with "
                "`moiety price set MODEL --input … --output …`.",
                code="model_without_price",
            )
