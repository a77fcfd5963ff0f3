"""Receipts of one gateway process: found or issued, and signed when they are delivered. Fails closed."""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.auth.principal import Principal
from moiety_platform.clock import Clock
from moiety_platform.db.dialect import insert_into
from moiety_platform.db.session import Database
from moiety_platform.db.snapshot import Snapshot
from moiety_platform.errors import Conflict, NotFound
from moiety_platform.receipts import chain_store
from moiety_platform.receipts.models import ReceiptKeyRecord, ReceiptRecord
from moiety_platform.receipts.signing import ReceiptSigner, key_id_of
from moiety_platform.usage.models import UsageRecord
from moiety_platform.usage.row import GATEWAY_KILLED
from moiety_platform.usage.store import row_of

KEYS_TTL_S = 10.0  # for which published keys are cached


class PublicKeys(Snapshot[dict[str, bytes]]):
    """Cached snapshot of the public keys of all gateways, by id."""

    def __init__(self, database: Database, clock: Clock) -> None:
        super().__init__("keys of receipts", _load_keys, database, clock, ttl_s=KEYS_TTL_S)


@dataclass(eq=False)
class Receipts:
    """Receipts of one gateway process. `flush_usage` stores the usage rows that wait in this process."""

    database: Database
    signer: ReceiptSigner
    clock: Clock
    holds: Callable[[str], bool]
    flush_usage: Callable[[], Awaitable[None]]
    _published: set[str] = field(default_factory=set, init=False)  # ids of keys

    def __post_init__(self) -> None:
        self._public_keys = PublicKeys(self.database, self.clock)

    async def receipt_of(self, owner: Principal, request_id: str) -> dict[str, Any]:
        """Return the signed receipt of a request of the caller's project.

        A receipt that was not asked for with the request is issued from its usage row, without settings and
        commitments. Raises NotFound, Conflict for a request whose usage is not final, or Unavailable.
        """
        if self.holds(request_id):
            await self.flush_usage()
        async with self.database.read() as session:
            found = await chain_store.find_receipt(session, owner.tenant_id, owner.project_id, request_id)
        if found is None:
            found = await self._issue(owner, request_id)
        await self._publish_key()
        return self._envelope(found)

    async def list_receipts(self, owner: Principal, after: int, limit: int) -> list[dict[str, Any]]:
        """Return signed receipts of the caller's project, in the order of the tenant's chain. Raises Unavailable."""
        async with self.database.read() as session:
            found = await chain_store.list_receipts(session, owner.tenant_id, owner.project_id, after, limit)
        if found:
            await self._publish_key()
        return [self._envelope(record) for record in found]

    async def public_keys(self) -> dict[str, bytes]:
        """Return the public keys of all gateways of the deployment, by id. Raises Unavailable."""
        published = await self._public_keys.current()
        return published | {key_id_of(key): key for key in self.signer.public_keys}

    def _envelope(self, record: ReceiptRecord) -> dict[str, Any]:
        content = chain_store.decoded(record)
        return {
            "object": "receipt",
            "receipt": content,
            "hash": record.hash,
            "signature": self.signer.signature(content),
            "opening": None if record.salt is None else {"salt": record.salt},
        }

    async def _issue(self, owner: Principal, request_id: str) -> ReceiptRecord:
        async with self.database.write() as session:
            usage = await session.scalar(
                select(UsageRecord).where(
                    UsageRecord.request_id == request_id,
                    UsageRecord.tenant_id == owner.tenant_id,
                    UsageRecord.project_id == owner.project_id,
                )
            )
            row = None if usage is None else row_of(usage)
            if row is None or not row.is_request:
                raise NotFound(
                    "There is no ended request with this id in your project. The id is that of the answer; a request "
                    "that has just ended is known within a second.",
                    code="receipt_not_found",
                    param="request_id",
                )
            if row.error_code == GATEWAY_KILLED:
                raise Conflict(
                    "The gateway of this request was killed, so that its usage can still change; it has no receipt.",
                    code="receipt_not_final",
                )
            await chain_store.append_receipts(session, [row])
            found = await chain_store.find_receipt(session, owner.tenant_id, owner.project_id, request_id)
        if found is None:  # its tenant's data was deleted meanwhile
            raise NotFound("The data of this request is deleted.", code="receipt_not_found", param="request_id")
        return found

    async def _publish_key(self) -> None:
        """Store the public key of the signing key, once, before a signature of it is delivered. Raises Unavailable."""
        if self.signer.key_id in self._published:
            return
        row = {
            "key_id": self.signer.key_id,
            "public_key": self.signer.public_key.hex(),
            "created_ms": self.clock.unix_ns() // 1_000_000,
        }
        async with self.database.write() as session:
            await session.execute(insert_into(session, ReceiptKeyRecord).values(row).on_conflict_do_nothing())
        self._public_keys.forget()
        self._published.add(self.signer.key_id)


def jwk_of(public_key: bytes) -> dict[str, str]:
    """Return a public key as a JSON Web Key (RFC 8037)."""
    x = base64.urlsafe_b64encode(public_key).rstrip(b"=").decode("ascii")
    return {"kty": "OKP", "crv": "Ed25519", "use": "sig", "alg": "EdDSA", "kid": key_id_of(public_key), "x": x}


async def _load_keys(session: AsyncSession) -> dict[str, bytes]:
    found = await session.scalars(select(ReceiptKeyRecord).order_by(ReceiptKeyRecord.created_ms))
    return {record.key_id: bytes.fromhex(record.public_key) for record in found}
