"""Response bodies of the admin API for tenant data deletion."""

from __future__ import annotations

from datetime import datetime

import msgspec

from moiety_platform.tenants.models import TenantDeletion


class TenantDeletionView(msgspec.Struct, frozen=True):
    """Progress of a deletion: `erasing` until nothing is left, then `erased`.

    `counts` are the rows deleted or blanked since the beginning, by table; `objects` are those of the object store.
    """

    tenant_id: str
    state: str
    begun_at: datetime
    ended_at: datetime | None
    counts: dict[str, int]

    @classmethod
    def of(cls, deletion: TenantDeletion) -> TenantDeletionView:
        state = "erasing" if deletion.ended_at is None else "erased"
        return cls(deletion.tenant_id, state, deletion.begun_at, deletion.ended_at, deletion.counts)
