"""Response bodies of the admin API for the audit log."""

from __future__ import annotations

from typing import Any

import msgspec

from moiety_platform.audit.models import AuditEntry
from moiety_wire.shared_fields import copy_fields


class AuditView(msgspec.Struct, frozen=True):
    """One change.

    `actor` is the id of the key that made it, `actor_role` the role of that key at that time. `hash` is the SHA-256 of
    the previous hash (64 zeros for the first), a line feed, and JSON with sorted keys and without spaces: in version 1
    of the fields from `seq` to `after`, in version 2 of those fields without `actor`, `before` and `after`, but with
    `version` and `digest`; `actor_role` only where it is not null. `digest` is the SHA-256 of `salt`, a line feed, and
    the JSON of `actor`, `before` and `after`. Where `erased_at` is not null, salt and content are gone.
    """

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
        return copy_fields(
            entry,
            cls,
            at=entry.at.isoformat(),
            erased_at=None if entry.erased_at is None else entry.erased_at.isoformat(),
        )


class AuditVerdict(msgspec.Struct, frozen=True):
    """Result of recomputing the whole chain.

    `head` is the hash of the last entry; `complaint` says where the chain is broken, and is null where it is intact.
    """

    intact: bool
    num_entries: int
    num_erased: int
    head: str
    complaint: str | None


class AuditPage(msgspec.Struct, frozen=True):
    """One page of entries, oldest first, or newest first for a request with `before`, which `next_before` continues.

    `next_after` and `next_before` are null on the last page. `whole` says whether the caller may read all entries: an
    administrator of one tenant reads only the entries of that tenant, which cannot be verified alone.
    """

    data: list[AuditView]
    next_after: int | None
    next_before: int | None
    whole: bool
