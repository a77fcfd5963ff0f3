"""Erases the content of a tenant's audit entries, and lists them in a permanent entry.

An entry that fails verification is blanked, but not listed: it keeps breaking the chain.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec
from sqlalchemy import bindparam, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.access.roles import Role
from moiety_platform.audit.chain import ERASE, GENESIS, LOG, SEALS, is_intact, seal
from moiety_platform.audit.models import AuditEntry
from moiety_platform.audit.schemas import AuditView
from moiety_platform.audit.trail import Change, note

ENTRIES_AT_ONCE = 200
ERASED_ACTOR = "erased"
PERSON = "oidc:"  # prefix of actors that are users of an identity provider


async def erase_entries(session: AsyncSession, tenant_id: str, now: datetime) -> int:
    """Erase some entries within a transaction of the audit log; return their number."""
    wanted = (
        select(AuditEntry)
        .where(AuditEntry.tenant_id == tenant_id, AuditEntry.erased_at.is_(None), AuditEntry.action != ERASE)
        .order_by(AuditEntry.seq)
        .limit(ENTRIES_AT_ONCE)
    )
    entries = [msgspec.structs.asdict(AuditView.of(entry)) for entry in await session.scalars(wanted)]
    if not entries:
        return 0
    before = select(AuditEntry.seq, AuditEntry.hash).where(AuditEntry.seq.in_([one["seq"] - 1 for one in entries]))
    hashes: dict[int, str] = {0: GENESIS} | {row.seq: row.hash for row in await session.execute(before)}
    seals, blanks = {}, []
    for entry in entries:
        actor = _actor(entry)
        if is_intact(hashes.get(entry["seq"] - 1, ""), entry):
            seals[str(entry["seq"])] = seal({**entry, "actor": actor})
        blanks.append({"of": entry["seq"], "who": actor})
    blank: dict[str, Any] = {"before": None, "after": None, "salt": None, "actor": bindparam("who"), "erased_at": now}
    connection = await session.connection()
    statement = update(AuditEntry.__table__).where(AuditEntry.seq == bindparam("of")).values(blank)  # type: ignore[arg-type]
    await connection.execute(statement, blanks)
    listed = {"tenant_id": tenant_id, SEALS: seals}
    note(session, Change(ERASE, LOG, f"{entries[0]['seq']}-{entries[-1]['seq']}", None, listed))
    return len(entries)


def _actor(entry: dict[str, Any]) -> str:
    """Return the actor to keep: a key's id names no person, but a user name of an identity provider does."""
    is_person = entry["actor_role"] == Role.TENANT_ADMIN and entry["actor"].startswith(PERSON)
    return ERASED_ACTOR if is_person else str(entry["actor"])
