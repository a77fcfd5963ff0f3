"""What the admin API says of the audit log."""

from __future__ import annotations

from typing import Any

import msgspec

from moiety_platform.audit.models import AuditEntry


class AuditView(msgspec.Struct, frozen=True):
    """One change. `actor` is the id of the key that made it. `hash` is the SHA-256 of the hash before (64 zeros for the
    first), a line feed, and the other fields as JSON with sorted keys and without spaces."""

    seq: int
    at: str
    actor: str
    action: str
    object_kind: str
    object_id: str
    before: dict[str, Any] | None
    after: dict[str, Any] | None
    hash: str

    @classmethod
    def of(cls, entry: AuditEntry) -> AuditView:
        return cls(
            seq=entry.seq,
            at=entry.at.isoformat(),
            actor=entry.actor,
            action=entry.action,
            object_kind=entry.object_kind,
            object_id=entry.object_id,
            before=entry.before,
            after=entry.after,
            hash=entry.hash,
        )


class AuditPage(msgspec.Struct, frozen=True):
    """Some entries, oldest first; `next_after` is null on the last page."""

    data: list[AuditView]
    next_after: int | None
