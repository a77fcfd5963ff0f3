"""Verification of the chains of receipts in a database, without signatures, which are made at delivery."""

from __future__ import annotations

import msgspec
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.receipts.chain_store import decoded
from moiety_platform.receipts.content import GENESIS, hash_of
from moiety_platform.receipts.models import ReceiptChain, ReceiptRecord

READ_AT_ONCE = 500


class StoredChains(msgspec.Struct, frozen=True):
    """Numbers of receipts and of tenants with receipts. `complaints` has a sentence for each chain that is broken."""

    num_receipts: int
    num_chains: int
    complaints: list[str]


async def verify_stored_chains(session: AsyncSession) -> StoredChains:
    """Check numbers, hashes and links of all receipts, and the head of each chain, from which it continues."""
    heads = {one.tenant_id: (one.num_receipts, one.head) for one in await session.scalars(select(ReceiptChain))}
    ends: dict[str, tuple[int, str]] = {}  # number and hash of the newest receipt that follows the one before
    broken: dict[str, str] = {}
    num_receipts = 0
    wanted = select(ReceiptRecord).order_by(ReceiptRecord.tenant_id, ReceiptRecord.sequence)
    async for record in await session.stream_scalars(wanted, execution_options={"yield_per": READ_AT_ONCE}):
        num_receipts += 1
        tenant_id = record.tenant_id
        if (complaint := _complaint(record, *ends.get(tenant_id, (0, GENESIS)))) is not None:
            broken.setdefault(tenant_id, complaint)
        ends[tenant_id] = record.sequence, record.hash
    for tenant_id in heads.keys() | ends.keys():
        if heads.get(tenant_id) != ends.get(tenant_id, (0, GENESIS)):
            broken.setdefault(tenant_id, "its head is not the newest receipt")
    complaints = [f"the receipts of the tenant {tenant_id}: {broken[tenant_id]}" for tenant_id in sorted(broken)]
    return StoredChains(num_receipts, len(heads), complaints)


def _complaint(record: ReceiptRecord, number_before: int, hash_before: str) -> str | None:
    """Return why a receipt does not follow the one before; None if it does. Deleted contents are not checked."""
    if record.sequence != number_before + 1:
        return f"receipt {number_before + 1} is missing"
    if record.content is None:
        return None
    try:
        content = decoded(record)
    except msgspec.DecodeError:
        return f"receipt {record.sequence} was changed"
    if hash_of(content) != record.hash:
        return f"receipt {record.sequence} was changed"
    if content["previous"] != hash_before:
        return f"receipt {record.sequence} does not follow receipt {number_before}"
    return None
