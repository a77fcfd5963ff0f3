"""Authentication of an Authorization header, which yields a Principal.

A small cache of keys saves a statement per request: an entry is trusted for `ttl_s`, which bounds how long a revoked
key or a suspended tenant still passes. One statement reads the keys in use again before that. When the database is
down, or does not answer within `CONFIRM_TIMEOUT_S`, unknown keys fail closed (503, never 401) and known keys are served
for `grace_s`. Ids that may not exist are looked up in a separate queue, whose failures say nothing about the store.
Depends on HTTP only for the form of the header. A bearer token that is a JWT goes to `jwts`.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol, Self

import structlog
from sqlalchemy import exc as sa

from moiety_platform.auth.keys import (
    HOW_TO,
    KeyText,
    derive_cache_salt,
    hash_key,
    hashes_match,
    mark_of,
    read_jwt,
    read_key,
)
from moiety_platform.auth.known_ids import KnownKeyIds
from moiety_platform.auth.lookups import LookupQueue, StoreHealth, cannot_check
from moiety_platform.auth.pepper import PepperRotation
from moiety_platform.auth.principal import Principal
from moiety_platform.auth.rehashing import Rehashing
from moiety_platform.auth.store import StoredKey, find_keys
from moiety_platform.auth.users.sign_in import USER_DISABLED
from moiety_platform.auth.users.token_roles import ROLE_ENDED, role_expiry
from moiety_platform.clock import Clock
from moiety_platform.db.failures import is_unmigrated
from moiety_platform.db.session import Database
from moiety_platform.edits import Edits
from moiety_platform.errors import Forbidden, Unauthenticated, Unavailable
from moiety_platform.periodic_task import PeriodicTask
from moiety_platform.tenants.models import TenantStatus
from moiety_wire.shared_fields import copy_fields

TTL_S = 2.0
GRACE_S = 60.0
MAX_CACHED_KEYS = 10_000
NO_ROTATION = PepperRotation()
IN_USE_S = 30.0  # a key used within this time is read again before its entry expires
MAX_AT_ONCE = 1_000  # keys per statement
LOOKUP_TIMEOUT_S = 3.0
CONFIRM_TIMEOUT_S, CONFIRM_TIMEOUT_OUTAGE_S = 0.5, 0.05  # wait for the database to confirm a known key
OUTAGE_PAUSE_S = 0.5
KNOWN_STATEMENTS, MAX_KNOWN_WAITING = 2, 10_000
UNKNOWN_STATEMENTS, MAX_UNKNOWN_WAITING = 1, 1_000
UNKNOWN_GATHER_S = 0.02  # bounds statements for invented ids to 50 per second
KNOWN_IDS_S = 5.0  # interval at which the ids of new keys are read

log = structlog.get_logger(__name__)


def _reason(error: Unavailable) -> str:
    """Return why keys cannot be checked, for the operator's log."""
    cause = error.__cause__
    if cause is not None and is_unmigrated(cause):
        return "the database lacks tables that this release needs; run: moiety migrate upgrade"
    return str(cause or "") or "the database does not answer in time"


class AuthenticatesJwts(Protocol):
    """Interface of the authentication of JWTs."""

    async def authenticate(self, token: str) -> Principal:
        """Return the caller. Raises Unauthenticated, Forbidden or Unavailable."""
        ...

    async def limit_class(self, principal: Principal) -> Principal:
        """Return the holder of a key with at most the class of the key's issuer. Raises Unavailable."""
        ...

    def forget(self) -> None:
        """Read the issuers again before the next token is accepted."""
        ...


@dataclass(frozen=True, slots=True)
class _Entry:
    """The database's answer for a key id, and its time. `stored` None: there is no such key."""

    stored: StoredKey | None
    principal: Principal | None
    read_at_s: float  # monotonic


class Authenticator:
    """Authenticator of all requests of one gateway process."""

    def __init__(
        self,
        database: Database,
        pepper: bytes,
        clock: Clock,
        *,
        turn: PepperRotation = NO_ROTATION,
        ttl_s: float = TTL_S,
        grace_s: float = GRACE_S,
        max_cached_keys: int = MAX_CACHED_KEYS,
    ) -> None:
        self._database = database
        self._pepper = pepper
        self._mark = mark_of(pepper)
        self._turn = turn
        self.rehashing = Rehashing(database, pepper, self.forget)
        self.role_days = 0.0  # after a role's last token, until which keys of developers by groups are valid; 0: no end
        self.jwts: AuthenticatesJwts | None = None  # set by the entry point; None: only keys are accepted
        self._clock = clock
        self._ttl_s = ttl_s
        self._grace_s = grace_s
        self._max_cached_keys = max_cached_keys
        self._known: OrderedDict[str, _Entry] = OrderedDict()
        self._unknown: OrderedDict[str, _Entry] = OrderedDict()
        self._edits = Edits()  # edits of keys through this process
        self._used_s: dict[str, float] = {}  # time of each key's last use
        self._refreshing: asyncio.Task[None] | None = None
        self._health = StoreHealth(clock, OUTAGE_PAUSE_S)
        self._known_lookups = LookupQueue(
            "known",
            self._read,
            clock,
            max_statements=KNOWN_STATEMENTS,
            max_waiting=MAX_KNOWN_WAITING,
            max_batch=MAX_AT_ONCE,
        )
        self._unknown_lookups = LookupQueue(
            "unknown",
            self._read_unknown_ids,
            clock,
            max_statements=UNKNOWN_STATEMENTS,
            max_waiting=MAX_UNKNOWN_WAITING,
            max_batch=MAX_AT_ONCE,
            gather_s=UNKNOWN_GATHER_S,
            pause_s=OUTAGE_PAUSE_S,
        )
        self._has_logged_failure = False  # of the look-ups of unknown keys, since the last success
        self._ids = KnownKeyIds()
        self._id_rounds = PeriodicTask("read_key_ids", self.read_key_ids, KNOWN_IDS_S)
        self._reading_since_s: dict[object, float] = {}  # start times of running statements for existing keys

    async def authenticate(self, authorization: str | None) -> Principal:
        """Return the caller.

        Raises Unauthenticated (key missing, wrong, revoked or expired), Forbidden (its tenant is suspended), or
        Unavailable (the database is down and this key was not seen recently).
        """
        try:
            key = read_key(authorization)
        except Unauthenticated:
            if self.jwts is None or (token := read_jwt(authorization)) is None:
                raise
            return await self.jwts.authenticate(token)
        offered_hash = hash_key(key, self._pepper)
        entry = await self._find(key.key_id)
        stored = entry.stored
        if stored is None or entry.principal is None or not self._secret_matches(key, offered_hash, stored):
            raise Unauthenticated(f"This API key is unknown. Check that it is complete and still valid. {HOW_TO}")
        self._check_active(stored)
        return entry.principal

    def _secret_matches(self, key: KeyText, offered_hash: bytes, stored: StoredKey) -> bool:
        """Return whether the key matches the stored hash under the current pepper or another one of the rotation.

        A key that matches and lacks the current pepper's mark is noted for rehashing.
        """
        if hashes_match(stored.secret_hash, offered_hash):
            if stored.pepper_mark != self._mark:
                self.rehashing.note(key, stored.secret_hash)
            return True
        if self._matches(key, self._turn.previous, stored):
            self.rehashing.note(key, stored.secret_hash)
            return True
        return self._matches(key, self._turn.coming, stored)

    @staticmethod
    def _matches(key: KeyText, pepper: bytes | None, stored: StoredKey) -> bool:
        return pepper is not None and hashes_match(stored.secret_hash, hash_key(key, pepper))

    async def principal_of(self, key_id: str) -> Principal:
        """Return the holder of a key that was authenticated before, for deferred work. Raises like `authenticate`."""
        self._ids.add(key_id)
        entry = await self._find(key_id)
        if entry.stored is None or entry.principal is None:
            raise Unauthenticated(
                "The API key of this request no longer exists. Send the request again with another key."
            )
        self._check_active(entry.stored)
        return entry.principal

    def _check_active(self, stored: StoredKey) -> None:
        """Check that the key may be used now. Raises Unauthenticated or Forbidden."""
        if stored.revoked_at is not None and stored.revoked_at <= self._clock.now():
            raise Unauthenticated(
                "This API key was revoked. Ask your administrator for another key.", code="key_revoked"
            )
        if stored.expires_at is not None and stored.expires_at <= self._clock.now():
            raise Unauthenticated(
                "This API key has expired. Ask your administrator for another key.", code="key_expired"
            )
        if stored.is_user_disabled:
            raise Forbidden(
                "The user of this API key is disabled or deleted. Ask an administrator of your tenant to enable it, or "
                "for another key.",
                code=USER_DISABLED,
            )
        if stored.role_seen_at is not None:
            self._check_role(stored.role_seen_at, stored.role_ended_at)
        if stored.tenant_id and stored.tenant_status != TenantStatus.ACTIVE:
            raise Forbidden(
                f"The tenant {stored.tenant_name!r} is suspended. Ask your administrator to activate it.",
                code="tenant_suspended",
            )

    def _check_role(self, seen_at: datetime, ended_at: datetime | None) -> None:
        """Check that a user by tokens still has its role. Raises Forbidden."""
        expiry = role_expiry(seen_at, ended_at, self.role_days)
        if expiry is not None and expiry <= self._clock.now():
            raise Forbidden(
                "The identity provider no longer gives the user of this API key its role, or has not given it for "
                f"{self.role_days:g} days. Sign in to the dashboard again, or ask an administrator for another key.",
                code=ROLE_ENDED,
            )

    def forget(self, key_id: str) -> None:
        """Drop the cache entry of a key, so that a change through this process takes effect here at once.

        The result of a read that is under way may be older than the change, and is not cached.
        """
        self._drop(key_id)
        self._edits.note(key_id)
        self._known_lookups.forget(key_id)
        self._unknown_lookups.forget(key_id)

    def forget_issuers(self, key_ids: Sequence[str]) -> None:
        """Make a change of issuers of JWTs, and of the keys of their grants, take effect here at once."""
        for key_id in key_ids:
            self.forget(key_id)
        if self.jwts is not None:
            self.jwts.forget()

    async def read_key_ids(self) -> None:
        """Read the ids of keys that other processes made, so that their first use skips the queue of unknown ids.

        Raises Unavailable.
        """
        await self._ids.refresh(self._database)

    async def __aenter__(self) -> Self:
        self._id_rounds.start()
        self._id_rounds.wake()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop the background work before the database is closed, so that nothing holds a transaction.

        Pending rehashes are written first.
        """
        await self._id_rounds.cancel()
        await self.rehashing.close()
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.gather(self._refreshing, return_exceptions=True)
        await self._known_lookups.close()
        await self._unknown_lookups.close()

    @property
    def num_waiting(self) -> int:
        """Number of keys that wait for a look-up."""
        return self._known_lookups.num_waiting + self._unknown_lookups.num_waiting

    @property
    def num_cached(self) -> int:
        """Number of cache entries, of known and unknown keys together."""
        return len(self._known) + len(self._unknown)

    async def _find(self, key_id: str) -> _Entry:
        cached = self._known.get(key_id) or self._unknown.get(key_id)
        now_s = self._clock.monotonic()
        if cached is not None and now_s - cached.read_at_s < self._ttl_s:
            self._touch(key_id, now_s)
            if now_s - cached.read_at_s >= self._ttl_s / 2 and key_id in self._known and not self._health.is_paused:
                self._refresh_soon(now_s)
            return cached
        if cached is None or cached.stored is None or now_s - cached.read_at_s >= self._grace_s:
            if self._health.is_paused:
                raise cannot_check()
            return await self._look_up(key_id)
        self._touch(key_id, now_s)
        if not self._health.is_paused:
            await self._confirm(key_id, now_s)
        return self._known.get(key_id) or await self._find(key_id)  # again if it was changed meanwhile

    async def _confirm(self, key_id: str, now_s: float) -> None:
        """Start another read of a known key, with a bounded wait.

        If the database does not answer, all keys in use are read together, and the wait is short.
        """
        oldest_s = next(iter(self._reading_since_s.values()), now_s)
        asking: asyncio.Future[Any]
        if self._health.is_unreachable or now_s - oldest_s >= CONFIRM_TIMEOUT_S:
            asking, timeout_s = self._refresh_soon(now_s), CONFIRM_TIMEOUT_OUTAGE_S
        else:
            asking, timeout_s = self._known_lookups.begin(key_id), CONFIRM_TIMEOUT_S
        await asyncio.wait([asking], timeout=max(0.0, oldest_s + timeout_s - now_s))

    async def _look_up(self, key_id: str) -> _Entry:
        """Return the database's answer for a key that is not cached. Raises Unavailable.

        All callers that wait for the same key share one look-up; a caller's cancellation does not cancel it.
        """
        exists = key_id in self._known or key_id in self._ids
        lookups = self._known_lookups if exists else self._unknown_lookups
        return await asyncio.shield(lookups.begin(key_id))

    def _refresh_soon(self, now_s: float) -> asyncio.Task[None]:
        """Start a read of all recently used keys, while their entries are still valid."""
        if self._refreshing is None:
            self._refreshing = asyncio.create_task(self._refresh(now_s), name="key-refresh")
        return self._refreshing

    async def _refresh(self, now_s: float) -> None:
        oldest_s = now_s - IN_USE_S
        self._used_s = {key_id: used_s for key_id, used_s in self._used_s.items() if used_s >= oldest_s}
        due = [key_id for key_id in self._used_s if self._is_due(key_id, now_s)]
        try:
            for first in range(0, len(due), MAX_AT_ONCE):
                await self._read(due[first : first + MAX_AT_ONCE])
        except Unavailable:
            pass  # already logged; the entries remain valid for a while
        finally:
            self._refreshing = None

    def _is_due(self, key_id: str, now_s: float) -> bool:
        entry = self._known.get(key_id)
        return entry is not None and now_s - entry.read_at_s >= self._ttl_s / 4

    async def _read(self, key_ids: Sequence[str]) -> dict[str, _Entry]:
        """Read the current state of keys that exist. Raises Unavailable."""
        asked_at_s, token = self._clock.monotonic(), object()
        self._reading_since_s[token] = asked_at_s
        try:
            entries = await self._read_unknown(key_ids)
        except Unavailable as error:
            timed_out = isinstance(error.__cause__, TimeoutError | sa.TimeoutError)
            if self._health.failed(asked_at_s, timed_out=timed_out):
                log.warning(
                    "key_store_unreachable",
                    reason=_reason(error),
                    advice="restore the connection to the database; known keys are accepted meanwhile",
                )
            raise
        finally:
            del self._reading_since_s[token]
        self._health.answered(asked_at_s)
        return entries

    async def _read_unknown_ids(self, key_ids: Sequence[str]) -> dict[str, _Entry]:
        """Read the current state of keys that may not exist. Raises Unavailable.

        A failure does not count against the store, and is logged once unless it was a timeout.
        """
        try:
            entries = await self._read_unknown(key_ids)
        except Unavailable as error:
            if not self._has_logged_failure and not isinstance(error.__cause__, TimeoutError | sa.TimeoutError):
                self._has_logged_failure = True
                log.warning(
                    "key_store_unreachable",
                    reason=_reason(error),
                    advice="restore the connection to the database; known keys are accepted meanwhile",
                )
            raise
        self._has_logged_failure = False
        return entries

    async def _read_unknown(self, key_ids: Sequence[str]) -> dict[str, _Entry]:
        """Read the state of these keys, without an effect on the store's health. Raises Unavailable."""
        asked_at_s, seen = self._clock.monotonic(), self._edits.now
        try:
            async with asyncio.timeout(LOOKUP_TIMEOUT_S):
                found = await find_keys(self._database, key_ids)
        except TimeoutError as error:
            raise cannot_check() from error
        except Unavailable as error:
            raise cannot_check() from error.__cause__
        entries = {}
        for key_id in key_ids:
            stored = found.get(key_id)
            entries[key_id] = _Entry(stored, self._principal_of(key_id, stored), asked_at_s)
            if stored is not None:
                self._ids.add(key_id)
            if not self._edits.since(seen, key_id):
                self._remember(key_id, entries[key_id])
        return entries

    def _drop(self, key_id: str) -> None:
        self._known.pop(key_id, None)
        self._unknown.pop(key_id, None)

    def _remember(self, key_id: str, entry: _Entry) -> None:
        self._drop(key_id)
        cache = self._unknown if entry.stored is None else self._known
        cache[key_id] = entry
        while len(cache) > self._max_cached_keys:
            cache.popitem(last=False)

    def _touch(self, key_id: str, now_s: float) -> None:
        if key_id in self._known:
            self._used_s[key_id] = now_s
        for cache in (self._known, self._unknown):
            if key_id in cache:
                cache.move_to_end(key_id)

    def _principal_of(self, key_id: str, stored: StoredKey | None) -> Principal | None:
        known = self._known.get(key_id)
        return known.principal if known is not None and known.stored == stored else self._to_principal(stored)

    def _to_principal(self, stored: StoredKey | None) -> Principal | None:
        if stored is None:
            return None
        cache_salt = derive_cache_salt(stored.tenant_id, self._pepper)
        return copy_fields(stored, Principal, root_key_id=stored.root_id, cache_salt=cache_salt, end_user=None)
