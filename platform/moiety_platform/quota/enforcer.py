"""Quota enforcer of one gateway process: limits are spent from memory and leased from the store.

A hold is taken from leases, without the database. One task requests the lacking amounts for all: each transaction
grants what is requested, for all scopes together; once a second it also requests what will be lacking soon and gives
back what is idle, and several times per lease lifetime it renews all leases. So the database gets a few statements per
second, not some for each request; near a cap, where only the lacking amount is leased, it gets about one transaction
per request.

When the database is away, or does not answer for `ANSWER_S`, the leases are spent until they expire there; then
requests under a limit are rejected (503), and streams that need more end. The code that stores the usage rows books the
use in the same transaction, so exactly once.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass

import structlog
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.clock import Clock
from moiety_platform.db.session import Database
from moiety_platform.edits import Edits
from moiety_platform.errors import Unavailable
from moiety_platform.periodic_task import PeriodicTask
from moiety_platform.quota.account import Account, KnownScope, fail
from moiety_platform.quota.account_map import AccountMap
from moiety_platform.quota.errors import LimitRefusal, never_fits, store_unavailable
from moiety_platform.quota.kinds import Limit, Meter, Scope, Unit, window_end, window_start
from moiety_platform.quota.lease import Hold, Lease, WindowId
from moiety_platform.quota.limits import load_limits
from moiety_platform.quota.quarantine import Quarantine
from moiety_platform.quota.rate_limit_headers import LimitStatus, headers
from moiety_platform.quota.rates import RateStore
from moiety_platform.quota.slices import slice_size
from moiety_platform.quota.store import Grant, LeaseAmounts, LeaseRequest, LeaseStore
from moiety_platform.shared_wake_ups import DUE_SHARE

LEASE_S = 20.0
TICK_S = 1.0
LIMITS_FRESH_S = 1.9
MARGIN = 0.25  # fraction of the time to live by which this process lets its leases end early
OUTAGE_PAUSE_S = 0.5
ANSWER_S = 4.0  # how long a request waits for the store
DAY_NS = 86_400 * 10**9
_RATE_MEAN_S = 5.0
_FORGET_AFTER_S = 60.0

_NO_AMOUNTS = LeaseAmounts()
_DELETED_LIMIT_GRANT = Grant(0, 0)  # for a window whose limit was deleted

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LeaseStats:
    """Lease figures of a enforcer, for metrics.

    `age_s` is the time since the store last answered; None without accounts, or before the first answer.
    """

    leases: int
    waiting: int  # requests that wait for the store
    age_s: float | None


@dataclass(eq=False)
class QuotaEnforcer:
    """Quota enforcer, owned by the entry point; one event loop.

    Call `start` before the first request, `stop` after the last.
    """

    database: Database
    store: LeaseStore
    clock: Clock
    _: KW_ONLY
    ttl_s: float = LEASE_S
    tick_s: float = TICK_S
    answer_s: float = ANSWER_S

    def __post_init__(self) -> None:
        self.replica_id = self.store.replica_id
        self.quarantine = Quarantine(self.database, self.store, self.clock, every_s=self.ttl_s / 4)
        self._rates = RateStore(now=self.store.now)
        self._scopes: dict[Scope, KnownScope] = {}
        self._accounts = AccountMap()
        self._edits = Edits()  # of scopes' limits, in this process
        self._asked: set[Account] = set()  # accounts with waiting requests
        pause_s = min(self.tick_s, OUTAGE_PAUSE_S)
        self._rounds = PeriodicTask("quota-leases", self._round, self.tick_s, pause_s=pause_s)
        self._counted_s = self.clock.monotonic()
        self._renewed_s = self._reached_s = float("-inf")
        self._sent_s: float | None = None  # start of the running round

    # ── a request ──

    async def hold(
        self,
        scopes: Sequence[Scope],
        amounts: Mapping[Unit, int],
        least: Mapping[Unit, int] | None = None,
        hold: Hold | None = None,
    ) -> Hold:
        """Reserve the amounts under every limit of their units, or raise their existing `hold` to them in total.

        On an error an existing hold is unchanged. Raises QuotaExceeded; RequestExceedsQuota if a whole cap is smaller
        than `least` (the smallest amounts that suffice for the caller, `amounts` by default); or Unavailable while the
        store is away and the leases do not suffice.
        """
        if hold is None:
            accounts = self._known_accounts(scopes)
            if accounts is None:
                accounts = await self.accounts_of(scopes)
            hold = Hold([account.lease for account in accounts if account.lease.unit in amounts])
        smallest = amounts if least is None else least
        for lease in hold.leases:
            limit, needed = self._accounts[lease.window].limit, smallest.get(lease.unit, 0)
            if needed > limit.cap:
                raise never_fits(limit, needed)
        refusal = None if self.extend_now(hold, amounts) else await self.extend(hold, amounts)
        if refusal is not None:
            error = refusal.error(self.clock.now())
            error.headers = headers(self.limit_statuses(hold))
            raise error
        return hold

    async def extend(self, hold: Hold, amounts: Mapping[Unit, int]) -> LimitRefusal | None:
        """Raise the hold to the amounts in total, or return the refusal; on a refusal nothing is reserved.

        Raises Unavailable.
        """
        while not self.extend_now(hold, amounts):
            lacking = hold.lacking(amounts)  # empty if leases only have to be renewed
            windows = {lease.window: lacking.get(lease, 0) for lease in lacking or hold.leases}
            try:
                async with asyncio.timeout(self.answer_s):
                    asked = [self._ask(self._accounts[window], amount) for window, amount in windows.items()]
                    grants = await asyncio.gather(*asked)
            except TimeoutError as error:
                raise store_unavailable() from error
            for (window, amount), grant in zip(windows.items(), grants, strict=True):
                if grant is _DELETED_LIMIT_GRANT:
                    hold.drop(window)
                elif amount > 0 and grant.amount == 0:
                    account = self._accounts[window]
                    available = max(0, account.lease.free) + grant.remaining
                    return LimitRefusal(account.limit, window, available, amount - grant.remaining)
        return None

    def require_current(self, hold: Hold) -> None:
        """Raise Unavailable if a lease of the hold has expired, because the process was suspended."""
        if not hold.is_good(self.clock.monotonic()):
            raise store_unavailable()

    def limit_statuses(self, hold: Hold) -> list[LimitStatus]:
        """Return the state of the limits of a request, as far as this process knows it."""
        unix_s, now_s, found = self.clock.unix_ns() / 1e9, self.clock.monotonic(), []
        accounts, stock, rate = self._accounts, Meter.STOCK, Meter.RATE
        for lease in hold.leases:
            account = accounts.get(lease.window)
            if account is None or (left := account.available(now_s)) is None:
                continue
            limit, meter, whole_in_s = account.limit, lease.meter, None
            if meter is stock:
                whole_in_s = account.ends_unix_s - unix_s
            elif meter is rate:
                whole_in_s = (limit.cap - left) * 60 / limit.cap if limit.cap else 60.0
            found.append(LimitStatus(limit.kind, limit.cap, left, whole_in_s))
        return found

    def extend_now(self, hold: Hold, amounts: Mapping[Unit, int]) -> bool:
        """Raise the hold from existing leases, without waiting; return whether that sufficed."""
        return hold.is_good(self.clock.monotonic()) and hold.reserve(amounts)

    def stats(self) -> LeaseStats:
        """Return the current lease figures."""
        waiting = sum(len(account.waiters) for account in self._accounts.values())
        age_s = self.clock.monotonic() - self._reached_s
        return LeaseStats(len(self._accounts), waiting, age_s if self._accounts and math.isfinite(age_s) else None)

    def forget(self, scope: Scope) -> None:
        """Forget the limits of a scope after an edit here: they are read again before its next request is served.

        The result of a read in progress may be older than the edit, and is discarded.
        """
        self._scopes.pop(scope, None)
        self._edits.note(scope)

    # ── lifecycle ──

    async def start(self) -> None:
        self._rounds.start()

    async def stop(self) -> None:
        """Return the free amounts to the store. Call it when every hold is settled. Idempotent."""
        if not await self._rounds.stop():
            return
        try:
            await self.transact(give_back=lambda account: account.lease.free)
        except Unavailable as error:
            log.warning(
                "quota_leases_not_returned",
                reason=str(error),
                replica=self.replica_id,
                advice="restore the connection to the database; the leases expire by themselves",
            )

    async def transact(
        self, *, give_back: Callable[[Account], int] | None = None, requested_only: bool = False, renew_all: bool = True
    ) -> None:
        """Run one round with the database.

        It grants what waiting requests lack; unless `requested_only`, it also requests what will be lacking soon, gives
        back what is idle (or what `give_back` returns) and reads limits again. It renews the leases that it touches, or
        all with `renew_all`. Raises Unavailable, also in the waiting requests.
        """
        asked, self._asked = self._asked, set()
        sent_s = self.clock.monotonic()
        returned, low = ({}, {}) if requested_only else self._collect_leases(sent_s, give_back)
        waiters = {account: waiting for account in asked if (waiting := account.take_waiters())}
        wants = [LeaseRequest(a.lease.window, min(w.values()), sum(w.values()), a.ahead) for a, w in waiters.items()]
        wants += [LeaseRequest(account.lease.window, 0, 0, more) for account, more in low.items()]
        waiters |= {account: {} for account in low}
        reached = list(self._accounts) if renew_all else [*returned, *(want.window for want in wants)]
        renewed = self._leased(reached)
        seen = self._edits.now
        stale = [] if requested_only else self._stale_scopes(sent_s)
        if not (wants or returned or renewed or stale):
            return
        begin = self.database.write if wants or returned or renewed else self.database.read_statements
        self._sent_s = sent_s
        try:
            async with begin() as session:
                grants, stored = await self._exchange(session, returned, wants)
                if others := [window for window in renewed if window not in stored]:
                    stored |= await self.store.renew(session, others)
                limits = await load_limits(session, stale)
        except BaseException as error:  # on any error, no request is left waiting
            for futures in waiters.values():
                fail(futures, error)
            raise
        finally:
            self._sent_s = None
        self._reached_s = sent_s
        self._learn(renewed, stored, reached, sent_s)
        self._learn_limits(limits, sent_s, seen)
        for account, futures in waiters.items():
            account.take(grants.get(account.lease.window), sent_s)
            for future in futures:
                if not future.done():
                    future.set_result(grants.get(account.lease.window, _DELETED_LIMIT_GRANT))
        if renew_all:
            self._renewed_s = sent_s
            self._forget(stored, sent_s)

    # ── internal ──

    async def _round(self) -> None:
        now_s = self.clock.monotonic()
        is_tick, is_due = now_s - self._counted_s >= DUE_SHARE * self.tick_s, now_s - self._renewed_s >= self.ttl_s / 4
        if is_tick:
            self._count_use(now_s)
        await self.transact(requested_only=not is_tick, renew_all=is_due)
        if self._accounts:
            await self.quarantine.sweep()

    async def _exchange(
        self, session: AsyncSession, returned: Mapping[WindowId, int], wants: Sequence[LeaseRequest]
    ) -> tuple[dict[WindowId, Grant], dict[WindowId, LeaseAmounts]]:
        """Return the grants of stocks, slots and rates, and the leases that were raised and thereby renewed."""
        leased, drawn = {*self._leased(returned)}, {*self._leased(want.window for want in wants)}
        grants, raised = await self.store.exchange(
            session,
            {window: amount for window, amount in returned.items() if window in leased},
            [want for want in wants if want.window in drawn],
            slice_size,
        )
        of_rates = await self._rates.exchange(
            session,
            {window: amount for window, amount in returned.items() if window not in leased},
            [want for want in wants if want.window not in drawn],
            slice_size,
        )
        return grants | of_rates, raised

    def _leased(self, windows: Iterable[WindowId]) -> list[WindowId]:
        """Return the windows with a lease in the store; rates have none."""
        return [window for window in windows if self._accounts[window].lease.meter is not Meter.RATE]

    def _learn(
        self,
        renewed: Sequence[WindowId],
        stored: Mapping[WindowId, LeaseAmounts],
        reached: Sequence[WindowId],
        sent_s: float,
    ) -> None:
        """Apply the renewed leases, and extend the validity of the reached accounts.

        It counts from the time of sending; a round that reaches all accounts extends rates as well.
        """
        good_until_s = sent_s + self.ttl_s * (1 - MARGIN)
        for window in renewed:
            self._accounts[window].learn(stored.get(window, _NO_AMOUNTS))
        for window in reached:
            self._accounts[window].lease.good_until_s = good_until_s

    def _stale_scopes(self, now_s: float) -> list[Scope]:
        return [scope for scope, known in self._scopes.items() if now_s - known.read_s >= LIMITS_FRESH_S]

    def _learn_limits(self, limits: Mapping[Scope, list[Limit]], now_s: float, seen: int) -> None:
        """Apply limits that were read at `now_s`, unless they were edited here after edit number `seen`."""
        for scope, of_scope in limits.items():
            for limit in of_scope:
                for account in self._accounts.of_limit(limit.quota_id):
                    account.learn_limit(limit)
            known = self._scopes.get(scope)
            if known is not None and not self._edits.since(seen, scope):
                if of_scope != known.limits:
                    known.accounts = None
                known.limits, known.read_s = of_scope, now_s

    def _ask(self, account: Account, lacking: int) -> asyncio.Future[Grant]:
        """Return a future for the grant of the lacking amount.

        The next round resolves it; it resolves at once if the store recently reported that less is left.
        """
        future: asyncio.Future[Grant] = asyncio.get_running_loop().create_future()
        if self._rounds.is_stopping:
            future.set_exception(Unavailable("the server is stopping", code="server_stopping", retry_after_s=1))
            return future
        if self.clock.monotonic() < account.full_until_s and lacking > (account.remaining or 0):
            future.set_result(Grant(0, account.remaining or 0))
            return future
        if self._sent_s is not None and self.clock.monotonic() - self._sent_s >= self.answer_s:
            future.set_exception(store_unavailable())
            return future
        account.waiters[future] = lacking
        self._asked.add(account)
        account.used_s = self.clock.monotonic()
        self._rounds.wake()
        return future

    def _known_accounts(self, scopes: Sequence[Scope]) -> list[Account] | None:
        """Return the accounts of all limits of the scopes without waiting.

        Returns None unless all are known for today's windows.
        """
        found: list[Account] = []
        today, now_s = self.clock.unix_ns() // DAY_NS, self.clock.monotonic()
        for scope in scopes:
            known = self._scopes.get(scope)
            if known is None or known.accounts is None or known.day != today:
                return None
            known.used_s = now_s
            found += known.accounts
        for account in found:
            account.used_s = now_s
        return found

    async def accounts_of(self, scopes: Sequence[Scope]) -> list[Account]:
        """Return the accounts of all limits of the scopes, in their current windows. Raises Unavailable."""
        found: list[Account] = []
        known = await self._known(scopes)
        today, now_s = self.clock.unix_ns() // DAY_NS, self.clock.monotonic()
        for known_scope in known:
            if known_scope.accounts is None or known_scope.day != today:
                known_scope.accounts, known_scope.day = [self._account(limit) for limit in known_scope.limits], today
            found += known_scope.accounts
        for account in found:
            account.used_s = now_s
        return found

    async def _known(self, scopes: Sequence[Scope]) -> list[KnownScope]:
        """Return the scopes with their limits; a new scope is read once, then every round keeps it fresh."""
        now_s, seen = self.clock.monotonic(), self._edits.now
        known = [known_scope for scope in scopes if (known_scope := self._scopes.get(scope)) is not None]
        if len(known) < len(scopes):
            unknown = [scope for scope in scopes if scope not in self._scopes]
            found = await self._read_limits(unknown)
            read = {scope: KnownScope(limits, now_s, now_s) for scope, limits in found.items()}
            known += read.values()
            for scope, known_scope in read.items():
                if not self._edits.since(seen, scope):
                    self._scopes.setdefault(scope, known_scope)
            self._learn_limits(found, now_s, seen)
        for known_scope in known:
            known_scope.used_s = now_s
        return known

    async def _read_limits(self, scopes: Sequence[Scope]) -> dict[Scope, list[Limit]]:
        try:
            async with asyncio.timeout(self.answer_s), self.database.read_statements() as session:
                return await load_limits(session, scopes)
        except TimeoutError as error:
            raise store_unavailable() from error

    def _account(self, limit: Limit) -> Account:
        window = WindowId(limit.quota_id, window_start(limit.kind.period, self.clock.now()))
        account = self._accounts.get(window)
        if account is None:
            lease = Lease(window, self.replica_id, limit.kind.unit, meter=limit.kind.meter)
            period = limit.kind.period
            ends_unix_s = math.inf if period is None else window_end(period, window.start).timestamp()
            account = Account(lease, limit, ends_unix_s)
            self._accounts.add(account)
        return account

    def _collect_leases(
        self, now_s: float, give_back: Callable[[Account], int] | None
    ) -> tuple[dict[WindowId, int], dict[Account, int]]:
        """Return what to give back, already out of reach of new holds, and what will be lacking soon.

        Accounts with waiting requests are skipped.
        """
        returned: dict[WindowId, int] = {}
        low: dict[Account, int] = {}
        for window, account in self._accounts.items():
            if account.waiters:
                continue
            more = account.balance(now_s) if give_back is None else -max(0, give_back(account))
            if more > 0:
                low[account] = more
            elif more < 0:
                account.lease.granted += more
                returned[window] = -more
        return returned, low

    def _count_use(self, now_s: float) -> None:
        """Update the running means of each lease's use."""
        passed_s = now_s - self._counted_s
        self._counted_s = now_s
        share = 1 - math.exp(-passed_s / _RATE_MEAN_S)
        for account in self._accounts.values():
            account.count_use(passed_s, share)

    def _forget(self, stored: Mapping[WindowId, LeaseAmounts], now_s: float) -> None:
        """Drop leases and scopes that were unused for long, once the store knows all that is known here."""
        oldest_s = now_s - _FORGET_AFTER_S
        self._scopes = {scope: known for scope, known in self._scopes.items() if known.used_s >= oldest_s}
        self._accounts = self._accounts.kept(
            lambda account: account.used_s >= oldest_s or account.in_use(stored.get(account.lease.window, _NO_AMOUNTS))
        )
        for known in self._scopes.values():
            known.accounts = None
