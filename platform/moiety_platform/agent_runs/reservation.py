"""Quota reservation of a request of a run: under the quotas first, then under the budget of its run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from moiety_platform.agent_runs.terms import RUN_BUDGET_EXHAUSTED, budget_exhausted, model_without_price
from moiety_platform.auth.principal import Principal
from moiety_platform.inference.quota_reservation import QuotaReservation, Tariff
from moiety_platform.prices.token_cost import FREE, MILLION, Price
from moiety_platform.quota.enforcer import QuotaEnforcer

AHEAD_TOKENS = 4096  # of output, reserved together, so that few transactions are needed

ReserveTokens = Callable[[Callable[[int | None, int | None], int], Callable[[int], int]], Awaitable[int]]
"""Reserves tokens of a run: gets a function from what is left of the budgets (tokens, nano-dollars) to the tokens to
reserve, and a function from these to their cost; returns the tokens. 0 tokens are not reserved."""


class RunReservation(QuotaReservation):
    """The reservation of one request of a run, whose budget may leave it less output than the quotas do."""

    def __init__(self, enforcer: QuotaEnforcer, principal: Principal, name: str, reserve: ReserveTokens) -> None:
        super().__init__(enforcer, principal)
        self._run_name = name
        self._reserve = reserve
        self._run_tokens = 0  # reserved of the run
        self._num_sequences = 1

    async def begin(self, num_prompt_tokens: int, num_sequences: int, credit_tokens: int, tariff: Tariff) -> int:
        credit_tokens = await super().begin(num_prompt_tokens, num_sequences, credit_tokens, tariff)
        self._num_sequences = num_sequences
        least = num_prompt_tokens + num_sequences * min(1, credit_tokens)
        granted = await self._reserve_of_run(least, num_prompt_tokens + num_sequences * credit_tokens, 0)
        if granted < least:
            raise budget_exhausted(self._run_name)
        return min(credit_tokens, (granted - num_prompt_tokens) // num_sequences)

    async def extend(self, tokens: int, more: int) -> int:
        more = await super().extend(tokens, more)
        if more and tokens + more > self._run_tokens:
            granted = await self._reserve_of_run(tokens + 1, tokens + more, self._num_sequences * AHEAD_TOKENS)
            if granted <= tokens:
                self.refusal_code = RUN_BUDGET_EXHAUSTED
                return 0
            more = min(more, granted - tokens)
        return more

    async def _reserve_of_run(self, least: int, wanted: int, ahead: int) -> int:
        """Return the tokens of the request that are reserved of its run: `wanted` or fewer, 0 for less than `least`.

        `ahead` more are reserved if the budget has them.
        """
        prompt, price = self._prompt_tokens, self._most_expensive

        def affordable(left_tokens: int | None, left_nano: int | None) -> int:
            tokens = wanted + ahead
            tokens = tokens if left_tokens is None else min(tokens, left_tokens)
            if left_nano is not None:
                if not self._tariff.is_complete:
                    raise model_without_price(self._run_name)
                tokens = min(tokens, affordable_tokens(left_nano, prompt, tokens, price))
            return tokens if tokens >= least else 0

        self._run_tokens = await self._reserve(affordable, self._cost_of)
        return min(wanted, self._run_tokens)

    def _cost_of(self, tokens: int) -> int:
        return 0 if self._most_expensive is FREE else self._most_cost(tokens)


def affordable_tokens(left_nano: int, prompt_tokens: int, wanted: int, price: Price) -> int:
    """Return how many of the wanted tokens, of which some are the prompt's, cost at most `left_nano`."""
    if price is FREE or price.cost(prompt_tokens, 0, max(0, wanted - prompt_tokens)) <= left_nano:
        return wanted
    if price.output == 0:
        return 0
    return prompt_tokens + (left_nano * MILLION - prompt_tokens * price.input) // price.output
