"""One request's spending: its prompt and a little of its output reserved under every limit, then more, ahead of what is
generated, so that no token is generated that no limit has room for."""

from __future__ import annotations

import asyncio

import msgspec

from moiety_platform.auth.principal import Principal
from moiety_platform.errors import Forbidden, Unavailable
from moiety_platform.inference.tariffs import FREE, NO_TARIFF, Tariff
from moiety_platform.prices.terms import MILLION, Price
from moiety_platform.quota.errors import QuotaExceeded
from moiety_platform.quota.keeper import LEASE_S, QuotaKeeper
from moiety_platform.quota.kinds import LimitLevel, Meter, Scope, Unit
from moiety_platform.quota.lease import Charge, Hold, WindowId
from moiety_platform.quota.standing import headers

PAUSE_S = 0.5
THROTTLED_S = 120.0  # for how long a sequence waits until a rate has room again, before it ends


class Throttled(Exception):
    """A rate has no room just now; asked again later it may have."""


class UsedTokens(msgspec.Struct, frozen=True):
    """What a request came to."""

    service_class: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


def scopes_of(principal: Principal) -> tuple[Scope, ...]:
    """Whose limits hold for a caller."""
    return (
        Scope(LimitLevel.TENANT, principal.tenant_id),
        Scope(LimitLevel.PROJECT, principal.project_id),
        Scope(LimitLevel.KEY, principal.root_key_id),
    )


class QuotaReservation:
    """Opened empty; nothing is reserved until `begin`. Settled once, when its request's record is closed."""

    def __init__(self, keeper: QuotaKeeper, principal: Principal) -> None:
        self._keeper = keeper
        self._scopes = scopes_of(principal)
        self._hold: Hold | None = None
        self._tariff = NO_TARIFF
        self._dearest = FREE
        self._prompt_tokens = 0
        self._reserved = self._reserved_cost = 0  # tokens, and the most that they cost
        self.refusal_code = QuotaExceeded.default_code  # why it could not be extended, if it could not

    async def begin(self, num_prompt_tokens: int, num_sequences: int, credit_tokens: int, tariff: Tariff) -> int:
        """Reserve the prompt, and output for each sequence: as much as was asked for or, where a limit has not so much
        left, a part of it. The credit of each sequence. Raises QuotaExceeded, RequestExceedsQuota,
        Forbidden or Unavailable."""
        self._prompt_tokens, self._tariff, self._dearest = num_prompt_tokens, tariff, tariff.dearest
        least = self._amounts(num_prompt_tokens + num_sequences * min(1, credit_tokens))
        while True:
            tokens = num_prompt_tokens + num_sequences * credit_tokens
            amounts = self._amounts(tokens)
            try:
                self._hold = await self._keeper.hold(self._scopes, amounts, least)
            except QuotaExceeded as refusal:
                affordable = self._affordable(refusal.unit, 0, refusal.room) - num_prompt_tokens
                credit_tokens = min(credit_tokens - 1, affordable // num_sequences)
                if credit_tokens < 1:
                    raise
            else:
                self._reserved, self._reserved_cost = tokens, amounts[Unit.MONEY]
                self._require_price()
                return credit_tokens

    def require_current(self) -> None:
        """Raises Unavailable where what was reserved is not leased any more."""
        if self._hold is not None:
            self._keeper.require_current(self._hold)

    async def extend(self, tokens: int, more: int) -> int:
        """Reserve so much more than `tokens` in all, or a part of it; how much more. 0: a limit has nothing left.
        Raises Throttled where it will have again, or Unavailable."""
        assert self._hold is not None, "begun before it is extended"
        while more > 0:
            amounts = self._amounts(tokens + more)
            refusal = await self._keeper.extend(self._hold, amounts)
            if refusal is None:
                self._reserved = max(self._reserved, tokens + more)
                self._reserved_cost = max(self._reserved_cost, amounts[Unit.MONEY])
                return more
            more = min(more - 1, self._affordable(refusal.limit.kind.unit, self._reserved, refusal.room) - tokens)
            if more <= 0 and refusal.limit.kind.meter is Meter.RATE:
                raise Throttled
        return 0

    async def extend_patiently(self, tokens: int, more: int) -> int:
        """The same for a sequence that has nothing left: an outage is waited for as long as leases last, and a rate
        until it has room, for a while."""
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
        """What that costs in the class that served it, nano-dollars."""
        price = self._tariff.prices.get(used.service_class, FREE)
        return price.cost(used.prompt_tokens, used.cached_tokens, used.output_tokens)

    def charges(self, used: UsedTokens, cost: int) -> tuple[Charge, ...]:
        """How that, at that cost, would be charged."""
        return self._hold.charges(self._spent(used, cost)) if self._hold is not None else ()

    def settle(self, used: UsedTokens, cost: int) -> tuple[Charge, ...]:
        """The end: so much was used, at that cost, of what was reserved."""
        return self._hold.settle(self._spent(used, cost)) if self._hold is not None else ()

    @property
    def prices(self) -> dict[str, Price]:
        """By class, of those that it may be served in."""
        return self._tariff.prices

    @property
    def stocks(self) -> list[tuple[WindowId, Unit]]:
        """The windows that are charged for what is used, and in what."""
        if self._hold is None:
            return []
        return [(lease.window, lease.unit) for lease in self._hold.leases if lease.meter is Meter.STOCK]

    def headers(self) -> dict[str, str]:
        """Where its limits stand."""
        return headers(self._keeper.standings(self._hold)) if self._hold is not None else {}

    def _amounts(self, tokens: int) -> dict[Unit, int]:
        """What a request of so many tokens needs of everything."""
        return {Unit.TOKENS: tokens, Unit.REQUESTS: 1, Unit.SLOTS: 1, Unit.MONEY: self._most_cost(tokens)}

    def _most_cost(self, tokens: int) -> int:
        """Of so many, prompt included."""
        return self._dearest.cost(self._prompt_tokens, 0, tokens - self._prompt_tokens)

    def _spent(self, used: UsedTokens, cost: int) -> dict[Unit, int]:
        """A request of which nothing is billed does not count as one either."""
        tokens = min(used.prompt_tokens + used.output_tokens, self._reserved)
        return {Unit.TOKENS: tokens, Unit.REQUESTS: min(1, tokens), Unit.MONEY: min(cost, self._reserved_cost)}

    def _affordable(self, unit: Unit, reserved: int, room: int) -> int:
        """How many tokens the request can have in all, with `reserved` of them reserved and `room` more of a unit."""
        if unit is Unit.TOKENS:
            return reserved + room
        if unit is not Unit.MONEY or self._dearest.output == 0:
            return 0
        budget = room + (self._most_cost(reserved) if reserved else 0)
        left = budget * MILLION - self._prompt_tokens * self._dearest.input
        return self._prompt_tokens + left // self._dearest.output

    def _require_price(self) -> None:
        """A limit on money cannot be kept for what has no price, so nothing is served then."""
        assert self._hold is not None
        if not self._tariff.is_complete and any(lease.unit is Unit.MONEY for lease in self._hold.leases):
            self._hold.settle(dict.fromkeys(Unit, 0))
            self._hold = None
            raise Forbidden(
                "A limit on money stands, and this model has no price; an administrator sets one with "
                "`moiety price set MODEL --input … --output …`.",
                code="model_without_price",
            )
