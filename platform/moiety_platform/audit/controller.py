"""`/admin/v1/audit`: maps HTTP to the audit log. The admin router decides on access and visible entries."""

from __future__ import annotations

from typing import Annotated

from litestar import Controller, get
from litestar.di import NamedDependency
from litestar.params import FromQuery
from sqlalchemy import select

from moiety_platform.access.actions import needs
from moiety_platform.access.caller import Caller
from moiety_platform.access.views import READ_AUDIT, VERIFY_AUDIT
from moiety_platform.audit.models import AuditEntry
from moiety_platform.audit.schemas import AuditPage, AuditVerdict, AuditView
from moiety_platform.audit.stored_chain import verify_stored_chain
from moiety_platform.db.paging import Limit, parse_page
from moiety_platform.db.session import Database
from moiety_platform.errors import BadRequest
from moiety_platform.query_parameters import parse_whole, whole

MAX_SEQ = 2**62
After = Annotated[str | None, whole("Only entries after this number; all if not given.", 0, MAX_SEQ)]
Before = Annotated[str | None, whole("Only entries before this number, the newest first.", 0, MAX_SEQ)]


class AuditController(Controller):
    """Read-only routes of the audit log."""

    path = "/audit"
    tags = ("audit",)

    @get(opt=needs(READ_AUDIT))
    async def list_entries(
        self,
        database: NamedDependency[Database],
        caller: NamedDependency[Caller],
        limit: Limit = None,
        after: After = None,
        before: Before = None,
        object_id: FromQuery[str | None] = None,
    ) -> AuditPage:
        """List changes, oldest first, or newest first with `before`; with `object_id`, the changes to one object."""
        size = parse_page(limit, None).limit
        seq, newest_first = AuditEntry.seq, before is not None
        statement = select(AuditEntry).where(seq > (0 if after is None else _parse_number(after, "after")))
        if before is not None:
            statement = statement.where(seq < _parse_number(before, "before"))
        statement = statement.order_by(seq.desc() if newest_first else seq).limit(size + 1)
        if object_id is not None:
            statement = statement.where(AuditEntry.object_id == object_id)
        async with database.read() as session:
            found = (await session.scalars(statement)).all()
        entries = found[:size]
        last = entries[-1].seq if len(found) > size else None
        rows = [AuditView.of(entry) for entry in entries]
        return AuditPage(
            rows, None if newest_first else last, last if newest_first else None, whole=caller.tenant_id is None
        )

    @get("/verification", opt=needs(VERIFY_AUDIT))
    async def verify_chain(self, database: NamedDependency[Database]) -> AuditVerdict:
        """Recompute and compare the whole chain, in reads of some hundred entries. Takes long for a long log."""
        return await verify_stored_chain(database)


def _parse_number(text: str, param: str) -> int:
    """Return the number of an entry. Raises BadRequest."""
    number = parse_whole(text, param)
    if not 0 <= number <= MAX_SEQ:
        raise BadRequest(f"'{param}' must be the number of an entry, from 0 to {MAX_SEQ}.", param=param)
    return number
