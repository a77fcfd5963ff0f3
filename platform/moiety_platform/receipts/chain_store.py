"""Chains of receipts in the store, within the caller's transaction: appended in the transaction of the usage row."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.db.dialect import insert_into
from moiety_platform.receipts.content import GENESIS, VERSION, canonical, hash_of
from moiety_platform.receipts.models import ReceiptChain, ReceiptRecord
from moiety_platform.usage.row import UsageRow


async def append_receipts(session: AsyncSession, rows: Sequence[UsageRow]) -> None:
    """Append a receipt of each request to the chain of its tenant, once.

    Chains are locked in the order of their tenants, to the end of the transaction.
    """
    by_tenant: defaultdict[str, list[UsageRow]] = defaultdict(list)
    for row in rows:
        by_tenant[row.tenant_id].append(row)
    for tenant_id in sorted(by_tenant):
        await _append(session, tenant_id, by_tenant[tenant_id])


async def find_receipt(session: AsyncSession, tenant_id: str, project_id: str, request_id: str) -> ReceiptRecord | None:
    """Return the receipt of a request of the project."""
    return await session.scalar(
        select(ReceiptRecord).where(
            ReceiptRecord.tenant_id == tenant_id,
            ReceiptRecord.request_id == request_id,
            ReceiptRecord.project_id == project_id,
            ReceiptRecord.content.is_not(None),
        )
    )


async def list_receipts(
    session: AsyncSession, tenant_id: str, project_id: str, after: int, limit: int
) -> Sequence[ReceiptRecord]:
    """Return the receipts of a project that follow a number of its tenant's chain, in the order of the chain."""
    wanted = (
        select(ReceiptRecord)
        .where(
            ReceiptRecord.tenant_id == tenant_id,
            ReceiptRecord.project_id == project_id,
            ReceiptRecord.sequence > after,
            ReceiptRecord.content.is_not(None),
        )
        .order_by(ReceiptRecord.sequence)
        .limit(limit)
    )
    return (await session.scalars(wanted)).all()


async def _append(session: AsyncSession, tenant_id: str, rows: Sequence[UsageRow]) -> None:
    start = {"tenant_id": tenant_id, "num_receipts": 0, "head": GENESIS}
    await session.execute(insert_into(session, ReceiptChain).values(start).on_conflict_do_nothing())
    chain = (
        await session.scalars(
            select(ReceiptChain).where(ReceiptChain.tenant_id == tenant_id).with_for_update(),
            execution_options={"populate_existing": True},
        )
    ).one()
    known = select(ReceiptRecord.request_id).where(
        ReceiptRecord.tenant_id == tenant_id, ReceiptRecord.request_id.in_([row.request_id for row in rows])
    )
    done = set(await session.scalars(known))
    for row in rows:
        if row.request_id in done:
            continue
        done.add(row.request_id)
        content = content_of(row, chain.num_receipts + 1, chain.head, datetime.now(UTC))
        record = ReceiptRecord(
            tenant_id=tenant_id,
            sequence=chain.num_receipts + 1,
            request_id=row.request_id,
            project_id=row.project_id,
            hash=hash_of(content),
            content=canonical(content).decode(),
            salt=None if row.receipt is None else row.receipt.salt,
        )
        session.add(record)
        chain.num_receipts, chain.head = record.sequence, record.hash
    await session.flush()


def content_of(row: UsageRow, sequence: int, previous: str, issued_at: datetime) -> dict[str, Any]:
    """Return the content of a receipt. Without a draft it has neither settings nor commitments."""
    draft = row.receipt
    return {
        "version": VERSION,
        "sequence": sequence,
        "previous": previous,
        "issued_at": _moment(issued_at),
        "request": {
            "request_id": row.request_id,
            "tenant_id": row.tenant_id,
            "project_id": row.project_id,
            "endpoint": row.endpoint,
            "model": row.model,
            "route": row.route,
            "started_at": _moment(row.started_at),
            "outcome": row.outcome,
            "http_status": row.http_status,
            "error_code": row.error_code,
        },
        "usage": {
            "num_choices": row.num_choices,
            "prompt_tokens": row.prompt_tokens,
            "cached_tokens": row.cached_tokens,
            "output_tokens": row.output_tokens,
        },
        "price": {
            "service_class": row.service_class,
            "spot_percent": row.spot_percent,
            "rates_nanodollars_per_million": None if draft is None else draft.rates,
            "cost_nanodollars": row.cost_nanodollars,
            "credit_nanodollars": row.credit_nanodollars,
        },
        "engines": None if draft is None else draft.engines,
        "settings": None if draft is None else draft.settings,
        "commitments": None if draft is None else {"prompts": draft.prompts, "answers": draft.answers},
    }


def decoded(record: ReceiptRecord) -> dict[str, Any]:
    """Return the content of a stored receipt."""
    assert record.content is not None, "deleted contents are not read"
    content: dict[str, Any] = msgspec.json.decode(record.content)
    return content


def _moment(at: datetime) -> str:
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
