"""What one gateway process knows of one limit in one window: its lease, how fast it is spent, who waits for more."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from moiety_platform.db.failures import RETRY_AFTER_S
from moiety_platform.errors import Unavailable
from moiety_platform.quota.errors import store_unavailable
from moiety_platform.quota.kinds import Meter
from moiety_platform.quota.lease import Lease
from moiety_platform.quota.limits import Limit
from moiety_platform.quota.slices import ahead_of_peak, ahead_of_use, surplus
from moiety_platform.quota.store import Grant, Stored

TRIFLE, PLENTY = 512, 4  # parts of a limit
IDLE_S = 30.0  # what nobody has used for so long goes back whole
FULL_S = 0.5  # for how long a window is believed to have no more than the store said
FETCHED_S = 1.0  # by when a request has taken what was granted for it


@dataclass(slots=True, eq=False)
class Account:
    """A lease with what this process knows about its use. Moments are of its monotonic clock."""

    lease: Lease
    limit: Limit
    ends_unix_s: float = math.inf  # when its window does, of a stock
    counted: int = 0  # of what was settled and held, when last looked at
    use_per_s: float = 0.0
    peak: float = 0.0  # of what was held, wearing off
    used_s: float = 0.0
    granted_s: float = float("-inf")  # when last for a request that waited
    cap_fell: bool = False  # what is free was granted under a higher cap
    full_until_s: float = float("-inf")  # until when what the store said was left is believed
    remaining: int | None = None  # that; None before the store was asked
    asked_s: float = float("-inf")  # when
    is_new: bool = True  # whether the store has not been heard of it yet
    waiters: dict[asyncio.Future[Grant], int] = field(default_factory=dict)  # what waiting requests lack, each

    @property
    def ahead(self) -> int:
        """How much to have beyond what is in use."""
        if self.lease.meter is Meter.SLOTS:
            return max(ahead_of_peak(self.peak, self.limit.cap), self._trifle)
        return max(ahead_of_use(self.use_per_s), self._trifle)

    def balance(self, now_s: float) -> int:
        """How much to ask for before a request lacks it, while there is plenty of the limit: then nobody waits for the
        store, nor notices for some seconds that it is away. Below zero, what of the free part should go back. Asked of
        every account every second, so in one piece."""
        lease = self.lease
        free = lease.granted - lease.settled - lease.held
        if self.cap_fell:
            self.cap_fell = False
            return min(0, -free)
        is_idle = now_s - self.used_s >= IDLE_S
        ahead = 0 if is_idle else self.ahead
        if free >= ahead:  # what was granted for a request that may not have come to take it yet does not go back
            return 0 if now_s - self.granted_s < FETCHED_S else -surplus(free, ahead)
        has_plenty = self.remaining is not None and self.remaining >= self.limit.cap // PLENTY
        if is_idle or not has_plenty or lease.meter is Meter.SLOTS:
            return 0
        return ahead + ahead // 2 - free  # less than would be given back

    @property
    def _trifle(self) -> int:
        """So little of the limit that it does no harm to keep it, while there is plenty: it spares requests that come
        now and then the way to the store."""
        cap = self.limit.cap
        return cap // TRIFLE if self.remaining is None or self.remaining >= cap // PLENTY else 0

    def learn(self, stored: Stored) -> None:
        """What the store says counts; of what was settled, only at first, since booking lags behind. Of a rate the
        store keeps nothing for one process."""
        if self.lease.meter is not Meter.RATE:
            self.lease.granted = stored.granted
            if self.is_new:
                self.lease.settled = self.counted = stored.settled
        self.is_new = False

    def learn_limit(self, limit: Limit) -> None:
        self.cap_fell |= limit.cap < self.limit.cap
        self.limit = limit

    def take(self, grant: Grant | None, now_s: float) -> None:
        """What waiting requests were granted. Where little is left, nobody asks for more than that for a while."""
        self.granted_s = now_s
        if grant is not None:
            self.remaining, self.asked_s, self.full_until_s = grant.remaining, now_s, now_s + FULL_S
            if self.lease.meter is Meter.RATE:
                self.lease.granted += grant.amount

    def take_waiters(self) -> dict[asyncio.Future[Grant], int]:
        """Those who wait still, with what each lacks; they are the caller's from now on."""
        waiters, self.waiters = self.waiters, {}
        return {future: lacking for future, lacking in waiters.items() if not future.done()}

    def count_use(self, passed_s: float, share: float) -> None:
        """Keep the running means; `share` is the weight of the last `passed_s` seconds."""
        lease = self.lease
        spent = lease.settled + lease.held
        self.use_per_s += share * (max(0, spent - self.counted) / passed_s - self.use_per_s)
        self.peak = max(lease.held, self.peak + share * (lease.held - self.peak))
        self.counted = spent

    def in_use(self, stored: Stored) -> bool:
        """Whether forgetting it would lose something that the store does not know."""
        lease = self.lease
        booked = lease.meter is not Meter.STOCK or lease.settled == stored.settled
        return bool(self.waiters or lease.num_holds or lease.free > 0 or not booked)

    def left(self, now_s: float) -> int | None:
        """About how much of the limit is left for all; None before the store was asked."""
        left, lease, cap = self.remaining, self.lease, self.limit.cap
        if left is None:
            return None
        free = lease.granted - lease.settled - lease.held
        if free > 0:
            left += free
        if lease.meter is Meter.RATE:
            left += int((now_s - self.asked_s) * cap / 60)
        return left if left < cap else cap


@dataclass(slots=True)
class KnownScope:
    """What is known of one scope's limits."""

    limits: list[Limit]
    read_s: float
    used_s: float
    accounts: list[Account] | None = None  # of its limits in the windows of `day`; None where they are to be found
    day: int | None = None  # since 1970, in UTC


def fail(waiters: Iterable[asyncio.Future[Grant]], error: BaseException) -> None:
    """Tell those who wait that there is no answer."""
    told = store_unavailable()
    if isinstance(error, Unavailable):
        told = Unavailable(error.message, code=error.code, retry_after_s=RETRY_AFTER_S)
    for future in waiters:
        if not future.done():
            future.set_exception(told)
