"""One request's spending: its prompt and a little of its output reserved under every limit, then more, ahead of what is
generated, so that no token is generated that no limit has room for."""

from __future__ import annotations

import asyncio

from moiety_platform.auth.principal import Principal
from moiety_platform.errors import Unavailable
from moiety_platform.quota.errors import QuotaExceeded
from moiety_platform.quota.keeper import LEASE_S, QuotaKeeper
from moiety_platform.quota.kinds import Level, Scope, Unit
from moiety_platform.quota.lease import Charge, Hold

PAUSE_S = 0.5


class Spending:
    """Opened empty; nothing is reserved until `begin`. Settled once, when its request's record is closed."""

    def __init__(self, keeper: QuotaKeeper, principal: Principal) -> None:
        self._keeper = keeper
        self._scopes = (
            Scope(Level.TENANT, principal.tenant_id),
            Scope(Level.PROJECT, principal.project_id),
            Scope(Level.KEY, principal.root_key_id),
        )
        self._hold: Hold | None = None
        self._reserved = 0
        self.refusal_code = QuotaExceeded.default_code  # why it could not be extended, if it could not

    async def begin(self, num_prompt_tokens: int, num_sequences: int, credit_tokens: int) -> int:
        """Reserve the prompt, and output for each sequence: as much as was asked for or, where a limit has not so much
        left, a part of it. The credit of each sequence. Raises QuotaExceeded, or Unavailable."""
        while True:
            tokens = num_prompt_tokens + num_sequences * credit_tokens
            try:
                self._hold = await self._keeper.hold(self._scopes, {Unit.TOKENS: tokens})
            except QuotaExceeded as refusal:
                credit_tokens = min(credit_tokens - 1, (refusal.room - num_prompt_tokens) // num_sequences)
                if credit_tokens < 1:
                    raise
            else:
                self._reserved = tokens
                return credit_tokens

    async def extend(self, tokens: int, more: int) -> int:
        """Reserve so much more than `tokens` in all, or a part of it; how much more. 0: a limit has nothing left.
        Raises Unavailable."""
        assert self._hold is not None, "begun before it is extended"
        while more > 0:
            refusal = await self._keeper.extend(self._hold, {Unit.TOKENS: tokens + more})
            if refusal is None:
                self._reserved = max(self._reserved, tokens + more)
                return more
            more = min(more - 1, self._reserved + refusal.room - tokens)
        return 0

    async def extend_patiently(self, tokens: int, more: int) -> int:
        """The same for a sequence that has nothing left: an outage is waited for as long as leases last."""
        for _ in range(round(LEASE_S / PAUSE_S)):
            try:
                return await self.extend(tokens, more)
            except Unavailable as error:
                self.refusal_code = error.code
                await asyncio.sleep(PAUSE_S)
        return 0

    def charges(self, tokens: int) -> tuple[Charge, ...]:
        """How so many tokens would be charged."""
        return self._hold.charges({Unit.TOKENS: tokens}) if self._hold is not None else ()

    def settle(self, tokens: int) -> tuple[Charge, ...]:
        """The end: so much was used, of what was reserved."""
        if self._hold is None:
            return ()
        return self._hold.settle({Unit.TOKENS: min(tokens, self._reserved)})
