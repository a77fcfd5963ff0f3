"""Verification of the stored audit log, in reads of some hundred entries."""

from __future__ import annotations

import msgspec
from sqlalchemy import select

from moiety_platform.audit.chain import BrokenChain, Verifier
from moiety_platform.audit.models import AuditEntry
from moiety_platform.audit.schemas import AuditVerdict, AuditView
from moiety_platform.db.session import Database

VERIFIED_AT_ONCE = 200


async def verify_stored_chain(database: Database) -> AuditVerdict:
    """Recompute and compare the whole chain. Raises Unavailable."""
    verifier, seq = Verifier(), 0
    try:
        while True:
            page = select(AuditEntry).where(AuditEntry.seq > seq).order_by(AuditEntry.seq).limit(VERIFIED_AT_ONCE)
            async with database.read() as session:
                found = (await session.scalars(page)).all()
            for entry in found:
                verifier.take(msgspec.structs.asdict(AuditView.of(entry)))
            if len(found) < VERIFIED_AT_ONCE:
                break
            seq = found[-1].seq
        verified = verifier.finish()
    except BrokenChain as exc:
        return AuditVerdict(False, verifier.num_entries, verifier.num_erased, verifier.head, str(exc))
    return AuditVerdict(True, verified.num_entries, verified.num_erased, verified.head, None)
