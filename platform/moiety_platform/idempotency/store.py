"""Idempotency keys and their answers in the database, within the caller's transaction. Times are the database's.

Deadlocks are avoided by lock order: a row is locked before its tenant's sums, and several sums in the order of their
ids.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import BigInteger, ColumnElement, bindparam, delete, select, update
from sqlalchemy.engine import CursorResult
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.db.bulk import BulkStatement
from moiety_platform.db.dialect import insert_into
from moiety_platform.db.expired import oldest_expired
from moiety_platform.db.now import now_ms
from moiety_platform.idempotency.errors import KeyInUse, TooManyKeys
from moiety_platform.idempotency.models import IdempotencyTenant, IdempotentRequest, State

PURGE_ROWS = 100  # per transaction, each with an answer
CLAIM_ATTEMPTS = 5  # an attempt fails only if another transaction deletes or claims the key meanwhile


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """A stored answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Found:
    """An existing key, with its `answer` if stored."""

    fingerprint: bytes
    state: State
    answer: StoredAnswer | None


class KeyStore:
    """Keys of all tenants. `now` is the database's clock."""

    def __init__(self, *, now: Callable[[], ColumnElement[int]] = now_ms) -> None:
        self._now = now
        self._renew = BulkStatement(
            [IdempotentRequest.claim_id],
            lambda given, _: (
                update(IdempotentRequest)
                .where(IdempotentRequest.claim_id.in_(given), IdempotentRequest.state == State.RUNNING)
                .values(expires_ms=now() + bindparam("ttl_ms", type_=BigInteger))
            ),
        )

    async def claim(
        self,
        session: AsyncSession,
        *,
        tenant_id: str,
        key_hash: bytes,
        fingerprint: bytes,
        claim_id: str,
        ttl_ms: int,
        max_keys: int,
    ) -> Found | None:
        """Claim the key for `ttl_ms` and return None, or return the existing key. Raises TooManyKeys or KeyInUse."""
        this = (IdempotentRequest.tenant_id == tenant_id, IdempotentRequest.key_hash == key_hash)
        insert = insert_into(session, IdempotentRequest).on_conflict_do_nothing().returning(IdempotentRequest.claim_id)
        values = {
            "tenant_id": tenant_id,
            "key_hash": key_hash,
            "fingerprint": fingerprint,
            "claim_id": claim_id,
            "state": State.RUNNING,
            "expires_ms": self._now() + ttl_ms,
            "num_bytes": 0,
        }
        for _ in range(CLAIM_ATTEMPTS):
            if await session.scalar(insert.values(values)) is not None:
                await _count_key(session, tenant_id, max_keys)
                return None
            has_expired = IdempotentRequest.expires_ms <= self._now()
            found = (await session.execute(select(IdempotentRequest, has_expired).where(*this))).one_or_none()
            if found is None:
                continue
            record, is_old = found
            session.expunge(record)
            if not is_old:
                return _found(record)
            await _delete(session, *this, IdempotentRequest.claim_id == record.claim_id)
        raise KeyInUse

    async def renew(self, session: AsyncSession, claim_ids: Collection[str], ttl_ms: int) -> None:
        """Extend claims that are still held."""
        await self._renew.execute(session, [(claim_id,) for claim_id in claim_ids], ttl_ms=ttl_ms)

    async def keep(
        self,
        session: AsyncSession,
        tenant_id: str,
        claim_id: str,
        answer: StoredAnswer | None,
        *,
        ttl_ms: int,
        max_bytes: int,
    ) -> bool:
        """Store the answer for `ttl_ms` and return whether the claim was still held.

        Only the fact that the request was answered is stored if the answer is None, or if all answers of the tenant
        together would exceed `max_bytes`.
        """
        num_bytes = len(answer.body) if answer is not None else 0
        this = IdempotentRequest.claim_id == claim_id
        ended = await session.execute(
            update(IdempotentRequest)
            .where(this, IdempotentRequest.state == State.RUNNING)
            .values(state=State.NOT_KEPT, expires_ms=self._now() + ttl_ms)
        )
        if not _num_rows(ended):
            return False
        if answer is not None:
            total = IdempotencyTenant.num_bytes + num_bytes
            counted = await session.execute(
                update(IdempotencyTenant)
                .where(IdempotencyTenant.tenant_id == tenant_id, total <= max_bytes)
                .values(num_bytes=total)
            )
            if _num_rows(counted):
                values = {"status": answer.status, "headers": dict(answer.headers), "body": answer.body}
                await session.execute(
                    update(IdempotentRequest).where(this).values(state=State.KEPT, num_bytes=num_bytes, **values)
                )
        return True

    async def release(self, session: AsyncSession, claim_id: str) -> None:
        """Release the key of a request without a stored answer."""
        await _delete(session, IdempotentRequest.claim_id == claim_id, IdempotentRequest.state == State.RUNNING)

    async def purge(self, session: AsyncSession, limit: int = PURGE_ROWS) -> int:
        """Delete at most `limit` expired rows, the oldest first, and return their number."""
        claim_ids = await oldest_expired(
            session, IdempotentRequest.claim_id, IdempotentRequest.expires_ms, self._now(), limit
        )
        return await _delete(session, IdempotentRequest.claim_id.in_(claim_ids)) if claim_ids else 0

    async def erase(self, session: AsyncSession, tenant_id: str) -> int:
        """Delete everything stored for a tenant and return the number of keys.

        Answers of requests in progress are not stored.
        """
        return await _delete(session, IdempotentRequest.tenant_id == tenant_id)


async def _count_key(session: AsyncSession, tenant_id: str, max_keys: int) -> None:
    insert = insert_into(session, IdempotencyTenant).values(tenant_id=tenant_id, num_keys=1, num_bytes=0)
    counted = insert.on_conflict_do_update(
        index_elements=[IdempotencyTenant.tenant_id], set_={"num_keys": IdempotencyTenant.num_keys + 1}
    ).returning(IdempotencyTenant.num_keys)
    if await session.scalar(counted) > max_keys:
        raise TooManyKeys(max_keys)


async def _delete(session: AsyncSession, *where: ColumnElement[bool]) -> int:
    """Delete rows, subtract them from their tenants' sums, and return their number."""
    statement = delete(IdempotentRequest).where(*where)
    rows = (await session.execute(statement.returning(IdempotentRequest.tenant_id, IdempotentRequest.num_bytes))).all()
    num_keys, num_bytes = Counter[str](), Counter[str]()
    for tenant_id, size in rows:
        num_keys[tenant_id] += 1
        num_bytes[tenant_id] += size
    for tenant_id in sorted(num_keys):
        await session.execute(
            update(IdempotencyTenant)
            .where(IdempotencyTenant.tenant_id == tenant_id)
            .values(
                num_keys=IdempotencyTenant.num_keys - num_keys[tenant_id],
                num_bytes=IdempotencyTenant.num_bytes - num_bytes[tenant_id],
            )
        )
    if num_keys:
        empty = (IdempotencyTenant.tenant_id.in_(sorted(num_keys)), IdempotencyTenant.num_keys <= 0)
        await session.execute(delete(IdempotencyTenant).where(*empty))
    return len(rows)


def _found(record: IdempotentRequest) -> Found:
    answer = None
    if record.state == State.KEPT:
        assert record.status is not None and record.headers is not None and record.body is not None
        answer = StoredAnswer(record.status, record.headers, record.body)
    return Found(record.fingerprint, State(record.state), answer)


def _num_rows(result: Any) -> int:
    assert isinstance(result, CursorResult)
    return result.rowcount
