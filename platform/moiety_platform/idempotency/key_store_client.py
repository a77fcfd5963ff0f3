"""Idempotency keys of one gateway process: claimed in the database and renewed while their requests run.

All gateways share the rows of one database, so a key is claimed once, whichever gateway receives its requests. A claim
that is not renewed because its gateway was killed is free again after it expires. Claims fail closed: while the
database is unavailable, a request with a key is refused with 503 before anything is generated. An answer that could not
be stored is still sent.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping

import structlog

from moiety_platform.db.session import Database
from moiety_platform.errors import Unavailable
from moiety_platform.idempotency.errors import AnswerNotStored, KeyInUse, KeyReused
from moiety_platform.idempotency.keys import KeyBinding, hash_of
from moiety_platform.idempotency.limits import AnswerStorageLimits
from moiety_platform.idempotency.models import State
from moiety_platform.idempotency.store import Found, KeyStore, StoredAnswer
from moiety_platform.periodic_task import PeriodicTask

CLAIM_S = 30.0

INLINE_BYTES = 64 * 1024  # larger bodies are hashed in a thread

log = structlog.get_logger(__name__)


class KeyClaim:
    """A key claimed by one running request.

    Owned by the request's handler. It records the answer as it is sent, and ends with `keep` or `release`.
    """

    def __init__(self, keys: IdempotencyKeys, tenant_id: str, max_bytes: int) -> None:
        self.claim_id = secrets.token_hex(16)
        self.tenant_id = tenant_id
        self._keys = keys
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._parts: list[bytes] = []
        self._is_over = False

    def note(self, data: bytes) -> None:
        """Record a part of the answer's body. An answer that is too large is not held in memory."""
        self._num_bytes += len(data)
        if self._num_bytes <= self._max_bytes:
            self._parts.append(data)
        else:
            self._parts.clear()

    async def keep(self, status: int, headers: Mapping[str, str]) -> None:
        """Store the complete answer. If the database is unavailable, the claim is left to expire."""
        self._is_over = True
        is_small = self._num_bytes <= self._max_bytes
        await self._keys.end(self, StoredAnswer(status, headers, b"".join(self._parts)) if is_small else None)

    async def release(self) -> None:
        """Release the key for reuse, unless the answer was stored."""
        if not self._is_over:
            self._is_over = True
            await self._keys.give_back(self)


class IdempotencyKeys:
    """Claims and renews keys.

    Owned by the entry point, in one event loop. Call `start` before the first request and `stop` after the last.
    """

    def __init__(
        self,
        database: Database,
        store: KeyStore,
        limits: AnswerStorageLimits,
        *,
        claim_s: float = CLAIM_S,
    ) -> None:
        self._database = database
        self._store = store
        self.limits = limits  # may be replaced, for keys claimed later
        self._claim_ms = round(claim_s * 1000)
        self._running: set[str] = set()
        self._renewing = PeriodicTask("idempotency-renew", self.renew, claim_s / 3)

    # ── One request ──

    async def claim(self, key: bytes, binding: KeyBinding) -> KeyClaim | StoredAnswer:
        """Claim the key, or return the stored answer of its first request.

        Raises KeyReused, KeyInUse, AnswerNotStored, TooManyKeys or Unavailable.
        """
        is_small = len(binding.body) <= INLINE_BYTES
        bound_to = binding.fingerprint() if is_small else await asyncio.to_thread(binding.fingerprint)
        claim = KeyClaim(self, binding.tenant_id, self.limits.max_answer_bytes)
        async with self._database.write() as session:
            found = await self._store.claim(
                session,
                tenant_id=binding.tenant_id,
                key_hash=hash_of(key),
                fingerprint=bound_to,
                claim_id=claim.claim_id,
                ttl_ms=self._claim_ms,
                max_keys=self.limits.max_keys_per_tenant,
            )
        if found is not None:
            return _answer_of(found, bound_to)
        self._running.add(claim.claim_id)
        return claim

    async def end(self, claim: KeyClaim, answer: StoredAnswer | None) -> None:
        """Store the answer, or the fact that it is too large to store."""
        self._running.discard(claim.claim_id)
        try:
            async with self._database.write() as session:
                is_held = await self._store.keep(
                    session,
                    claim.tenant_id,
                    claim.claim_id,
                    answer,
                    ttl_ms=round(self.limits.ttl_s * 1000),
                    max_bytes=self.limits.max_bytes_per_tenant,
                )
        except Unavailable as error:
            advice = "restore the connection to the database; a repeated request runs again"
            _warn("idempotent_response_not_stored", claim, advice, reason=str(error))
        else:
            if not is_held:
                advice = "none needed: the claim expired, and a repeated request may have run"
                _warn("idempotent_claim_lost", claim, advice)

    async def give_back(self, claim: KeyClaim) -> None:
        """Release the key of a request without a stored answer. A repetition is served again."""
        self._running.discard(claim.claim_id)
        try:
            async with self._database.write() as session:
                await self._store.release(session, claim.claim_id)
        except Unavailable as error:
            advice = "none needed: the claim expires by itself, and a repeated request waits until then"
            _warn("idempotent_claim_not_released", claim, advice, reason=str(error))

    # ── Lifecycle ──

    async def start(self) -> None:
        self._renewing.start()

    async def stop(self) -> None:
        """Stop renewing claims. Idempotent."""
        await self._renewing.cancel()

    async def renew(self) -> None:
        """Extend the claims of the requests that run in this process. Raises Unavailable."""
        if self._running:
            async with self._database.write() as session:
                await self._store.renew(session, list(self._running), self._claim_ms)


def _answer_of(found: Found, bound_to: bytes) -> StoredAnswer:
    if found.fingerprint != bound_to:
        raise KeyReused
    if found.state == State.RUNNING:
        raise KeyInUse
    if found.answer is None:
        raise AnswerNotStored
    return found.answer


def _warn(event: str, claim: KeyClaim, advice: str, **fields: str) -> None:
    log.warning(event, tenant_id=claim.tenant_id, **fields, advice=advice)
