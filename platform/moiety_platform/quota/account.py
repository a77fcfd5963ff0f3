"""Account of one limit in one window in one gateway process: its lease, its rate of use, and the waiting requests."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from moiety_platform.db.failures import RETRY_AFTER_S
from moiety_platform.errors import Unavailable
from moiety_platform.quota.errors import store_unavailable
from moiety_platform.quota.kinds import Limit, Meter
from moiety_platform.quota.lease import Lease
from moiety_platform.quota.slices import ahead_of_peak, ahead_of_use, surplus
from moiety_platform.quota.store import Grant, LeaseAmounts

MINIMUM_PARTS, PLENTY = 512, 4  # parts of a limit: see `_minimum_ahead` and `balance`
IDLE_S = 30.0  # an unused account gives back all of its free part after this time
FULL_S = 0.5  # how long the store's statement that nothing more is left is trusted
FETCHED_S = 1.0  # time for a waiting request to use what was granted for it


@dataclass(slots=True, eq=False)
class Account:
    """Lease with what this process knows about its use. Times are of the process's monotonic clock."""

    lease: Lease
    limit: Limit
    ends_unix_s: float = math.inf  # end of the window, for a stock
    counted: int = 0  # settled and held amounts at the last check
    use_per_s: float = 0.0
    peak: float = 0.0  # of held amounts; decays
    used_s: float = 0.0
    granted_s: float = float("-inf")  # last grant to a waiting request
    cap_fell: bool = False  # the free part was granted under a higher cap
    full_until_s: float = float("-inf")  # until when `remaining` is trusted
    remaining: int | None = None  # left in the store; None before the store was queried
    requested_s: float = float("-inf")  # when `remaining` was read
    is_new: bool = True  # the store has not reported this lease yet
    # the amount that each waiting request lacks
    waiters: dict[asyncio.Future[Grant], int] = field(default_factory=dict)

    @property
    def ahead(self) -> int:
        """Return the amount to keep free beyond current use."""
        if self.lease.meter is Meter.SLOTS:
            return max(ahead_of_peak(self.peak, self.limit.cap), self._minimum_ahead)
        return max(ahead_of_use(self.use_per_s), self._minimum_ahead)

    def balance(self, now_s: float) -> int:
        """Return the amount to request before requests lack it, while much of the limit is left.

        Requests then do not wait for the store, nor notice an outage of some seconds. A negative value is the part of
        the free amount to give back. Runs for every account every second, so it is one function.
        """
        lease = self.lease
        free = lease.granted - lease.settled - lease.held
        if self.cap_fell:
            self.cap_fell = False
            return min(0, -free)
        is_idle = now_s - self.used_s >= IDLE_S
        ahead = 0 if is_idle else self.ahead
        if free >= ahead:  # do not give back a grant whose request may not have used it yet
            return 0 if now_s - self.granted_s < FETCHED_S else -surplus(free, ahead)
        has_plenty = self.remaining is not None and self.remaining >= self.limit.cap // PLENTY
        if is_idle or not has_plenty or lease.meter is Meter.SLOTS:
            return 0
        return ahead + ahead // 2 - free  # below the amount that would be given back

    @property
    def _minimum_ahead(self) -> int:
        """Return a part of the limit that is small enough to keep while much is left.

        It spares occasional requests a round trip to the store.
        """
        cap = self.limit.cap
        return cap // MINIMUM_PARTS if self.remaining is None or self.remaining >= cap // PLENTY else 0

    def learn(self, stored: LeaseAmounts) -> None:
        """Apply the store's state of the lease.

        The settled amount counts only the first time, because booking lags behind. The store keeps no lease of a rate.
        """
        if self.lease.meter is not Meter.RATE:
            self.lease.granted = stored.granted
            if self.is_new:
                self.lease.settled = self.counted = stored.settled
        self.is_new = False

    def learn_limit(self, limit: Limit) -> None:
        """Apply a read limit. With a larger cap, a request is no longer refused for what the store reported before."""
        if limit.cap > self.limit.cap:
            self.full_until_s = float("-inf")
        self.cap_fell |= limit.cap < self.limit.cap
        self.limit = limit

    def take(self, grant: Grant | None, now_s: float) -> None:
        """Record a grant to waiting requests. If little is left, larger amounts are not requested for FULL_S."""
        self.granted_s = now_s
        if grant is not None:
            self.remaining, self.requested_s, self.full_until_s = grant.remaining, now_s, now_s + FULL_S
            if self.lease.meter is Meter.RATE:
                self.lease.granted += grant.amount

    def take_waiters(self) -> dict[asyncio.Future[Grant], int]:
        """Remove and return the requests that still wait, with what each lacks; the caller takes them over."""
        waiters, self.waiters = self.waiters, {}
        return {future: lacking for future, lacking in waiters.items() if not future.done()}

    def count_use(self, passed_s: float, share: float) -> None:
        """Update the running means; `share` is the weight of the last `passed_s` seconds."""
        lease = self.lease
        spent = lease.settled + lease.held
        self.use_per_s += share * (max(0, spent - self.counted) / passed_s - self.use_per_s)
        self.peak = max(lease.held, self.peak + share * (lease.held - self.peak))
        self.counted = spent

    def in_use(self, stored: LeaseAmounts) -> bool:
        """Return whether forgetting this account would lose something that the store does not know."""
        lease = self.lease
        booked = lease.meter is not Meter.STOCK or lease.settled == stored.settled
        return bool(self.waiters or lease.num_holds or lease.free > 0 or not booked)

    def available(self, now_s: float) -> int | None:
        """Return the approximate amount of the limit that is left for all; None before the store was queried."""
        left, lease, cap = self.remaining, self.lease, self.limit.cap
        if left is None:
            return None
        free = lease.granted - lease.settled - lease.held
        if free > 0:
            left += free
        if lease.meter is Meter.RATE:
            left += int((now_s - self.requested_s) * cap / 60)
        return left if left < cap else cap


def most_used_percent(accounts: Iterable[Account], now_s: float) -> float:
    """Return the largest used percentage of the stocks among the accounts, as far as it is known; 0 without one."""
    most = 0.0
    for account in accounts:
        left, cap = account.available(now_s), account.limit.cap
        if account.lease.meter is Meter.STOCK and left is not None:
            most = max(most, 100.0 * (cap - left) / cap if cap else 100.0)
    return most


@dataclass(slots=True)
class KnownScope:
    """Cached limits of one scope."""

    limits: list[Limit]
    read_s: float
    used_s: float
    accounts: list[Account] | None = None  # of its limits in the windows of `day`; None: look them up again
    day: int | None = None  # days since 1970, in UTC


def fail(waiters: Iterable[asyncio.Future[Grant]], error: BaseException) -> None:
    """Fail the waiting requests with Unavailable."""
    told = store_unavailable()
    if isinstance(error, Unavailable):
        told = Unavailable(error.message, code=error.code, retry_after_s=RETRY_AFTER_S)
    for future in waiters:
        if not future.done():
            future.set_exception(told)
