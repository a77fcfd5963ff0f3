"""Limits of requests that count tokens or convert them, without an answer of an engine.

Coding agents count tokens before most requests, so these requests have limits of their own: a number of open ones for
each tenant at this gateway, and the quota `token_counts_per_minute`. They count under no other quota.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from moiety_platform.admission.gate import OpenCounts
from moiety_platform.auth.principal import Principal
from moiety_platform.errors import RateLimited
from moiety_platform.inference.quota_reservation import scopes_of
from moiety_platform.quota.enforcer import QuotaEnforcer
from moiety_platform.quota.kinds import Unit

TOO_MANY_TOKEN_COUNTS = "too_many_token_counts"  # an error code
RETRY_AFTER_S = 1.0
_ONE = {Unit.TOKEN_COUNTS: 1}


class TokenCountLimits:
    """Limits of token counts in one gateway process. `max_open_per_tenant` can be changed, for later requests."""

    def __init__(self, quotas: QuotaEnforcer, max_open_per_tenant: int) -> None:
        self.max_open_per_tenant = max_open_per_tenant
        self._quotas = quotas
        self._open = OpenCounts()

    @asynccontextmanager
    async def counted(self, principal: Principal) -> AsyncIterator[None]:
        """Count a request under the limits: as open until the context ends, and once per minute.

        Raises RateLimited, RequestExceedsQuota, or Unavailable while quotas cannot be read.
        """
        most = self.max_open_per_tenant
        with self._open.counted(principal.tenant_id, most, lambda: _refusal_of(most)):
            await self._count_under_quotas(principal)
            yield

    async def _count_under_quotas(self, principal: Principal) -> None:
        """Count the request under the quotas on token counts, and under no other one."""
        hold = await self._quotas.hold(scopes_of(principal), _ONE)
        hold.settle(_ONE)


def _refusal_of(most: int) -> RateLimited:
    return RateLimited(
        f"{most} requests of this tenant that count tokens are open at this gateway, and no more are allowed; try "
        "again when one has ended",
        code=TOO_MANY_TOKEN_COUNTS,
        retry_after_s=RETRY_AFTER_S,
    )
