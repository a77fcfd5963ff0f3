"""What the admin API says of the audit log."""

from __future__ import annotations

from typing import Any

import msgspec

from moiety_platform.audit.models import AuditEntry


class AuditView(msgspec.Struct, frozen=True):
    """One change. `actor` is the id of the key that made it, `actor_role` what that key was then. `hash` is the SHA-256
    of the hash before (64 zeros for the first), a line feed, and, as JSON with sorted keys and without spaces, in
    version 1 the fields from `seq` to `after`, in version 2 those without `actor`, `before` and `after`, but with
    `version` and `digest`; `actor_role` only where it is not null. `digest` is the SHA-256 of `salt`, a line feed,
    and the JSON of `actor`, `before` and `after`. Where `erased_at` is not null, salt and content are gone."""

    seq: int
    at: str
    actor: str
    actor_role: str | None
    action: str
    object_kind: str
    object_id: str
    before: dict[str, Any] | None
    after: dict[str, Any] | None
    hash: str
    version: int
    salt: str | None
    digest: str | None
    erased_at: str | None

    @classmethod
    def of(cls, entry: AuditEntry) -> AuditView:
        return cls(
            seq=entry.seq,
            at=entry.at.isoformat(),
            actor=entry.actor,
            actor_role=entry.actor_role,
            action=entry.action,
            object_kind=entry.object_kind,
            object_id=entry.object_id,
            before=entry.before,
            after=entry.after,
            hash=entry.hash,
            version=entry.version,
            salt=entry.salt,
            digest=entry.digest,
            erased_at=None if entry.erased_at is None else entry.erased_at.isoformat(),
        )


class AuditVerdict(msgspec.Struct, frozen=True):
    """What computing the whole chain anew has found. `head` is the last entry's hash; `complaint` says where the chain
    is broken, and is null where it holds."""

    intact: bool
    num_entries: int
    num_erased: int
    head: str
    complaint: str | None


class AuditPage(msgspec.Struct, frozen=True):
    """Some entries, oldest first, or newest first where `before` was asked for, after which `next_before` goes on;
    `next_after` and `next_before` are null on the last page. `whole` says whether all entries may be read:
    an administrator of one tenant reads only those of that tenant, whose chain cannot be verified alone."""

    data: list[AuditView]
    next_after: int | None
    next_before: int | None
    whole: bool
