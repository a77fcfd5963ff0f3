"""Keys and their answers in the database, within the caller's transaction. Time is the database's.

A row is locked before its tenant's sums, and several sums in the order of their ids, so that no two transactions wait
for one another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import BigInteger, ColumnElement, bindparam, delete, select, update
from sqlalchemy.engine import CursorResult
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.db.bulk import OverRows
from moiety_platform.db.dialect import insert_into
from moiety_platform.db.expired import oldest_expired
from moiety_platform.db.now import now_ms
from moiety_platform.idempotency.errors import KeyInUse, TooManyKeys
from moiety_platform.idempotency.models import IdempotencyTenant, IdempotentRequest, State

PURGE_ROWS = 100  # in one transaction, each with an answer
CLAIM_ATTEMPTS = 5  # each fails only where another transaction has ended or taken the key in between


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """What a request was answered with."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Found:
    """A key that is taken; `answer` where it is kept."""

    fingerprint: bytes
    state: State
    answer: KeptAnswer | None


class KeyStore:
    """All keys of all tenants. `now` is the database's clock."""

    def __init__(self, *, now: Callable[[], ColumnElement[int]] = now_ms) -> None:
        self._now = now
        self._renew = OverRows(
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
        """Take the key for `ttl_ms`: None, or what has it already. Raises TooManyKeys, or KeyInUse."""
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
        """Put off the expiry of claims that nobody else has taken."""
        await self._renew.execute(session, [(claim_id,) for claim_id in claim_ids], ttl_ms=ttl_ms)

    async def keep(
        self,
        session: AsyncSession,
        tenant_id: str,
        claim_id: str,
        answer: KeptAnswer | None,
        *,
        ttl_ms: int,
        max_bytes: int,
    ) -> bool:
        """Store the answer for `ttl_ms`, or only that there was one: where it is None, and where all answers of the
        tenant together would have more than `max_bytes`. False if the claim is held no more."""
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
        """Give the key back: what it was claimed for has no answer that could be kept."""
        await _delete(session, IdempotentRequest.claim_id == claim_id, IdempotentRequest.state == State.RUNNING)

    async def purge(self, session: AsyncSession, limit: int = PURGE_ROWS) -> int:
        """Delete what has expired, the oldest first, at most `limit` rows; how many."""
        claim_ids = await oldest_expired(
            session, IdempotentRequest.claim_id, IdempotentRequest.expires_ms, self._now(), limit
        )
        return await _delete(session, IdempotentRequest.claim_id.in_(claim_ids)) if claim_ids else 0

    async def erase(self, session: AsyncSession, tenant_id: str) -> int:
        """Delete all that is kept for a tenant; how many keys. What runs just now will not be kept either."""
        return await _delete(session, IdempotentRequest.tenant_id == tenant_id)


async def _count_key(session: AsyncSession, tenant_id: str, max_keys: int) -> None:
    insert = insert_into(session, IdempotencyTenant).values(tenant_id=tenant_id, num_keys=1, num_bytes=0)
    counted = insert.on_conflict_do_update(
        index_elements=[IdempotencyTenant.tenant_id], set_={"num_keys": IdempotencyTenant.num_keys + 1}
    ).returning(IdempotencyTenant.num_keys)
    if await session.scalar(counted) > max_keys:
        raise TooManyKeys(max_keys)


async def _delete(session: AsyncSession, *where: ColumnElement[bool]) -> int:
    """Delete rows and take them off their tenants' sums; how many."""
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
        answer = KeptAnswer(record.status, record.headers, record.body)
    return Found(record.fingerprint, State(record.state), answer)


def _num_rows(result: Any) -> int:
    assert isinstance(result, CursorResult)
    return result.rowcount
