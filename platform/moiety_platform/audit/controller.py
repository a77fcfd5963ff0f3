"""/admin/v1/audit. Maps HTTP to the log; who may call, and sees which entries, is the router's affair."""

from __future__ import annotations

from typing import Annotated

from litestar import Controller, get
from litestar.di import NamedDependency
from litestar.params import FromQuery
from sqlalchemy import select

from moiety_platform.access.caller import Caller
from moiety_platform.access.table import Action, needs
from moiety_platform.audit.models import AuditEntry
from moiety_platform.audit.schemas import AuditPage, AuditView
from moiety_platform.db.paging import Limit, parse_page
from moiety_platform.db.session import Database
from moiety_platform.errors import BadRequest
from moiety_platform.query_parameters import parse_whole, whole

MAX_SEQ = 2**62
After = Annotated[str | None, whole("Entries after this number; all if not given.", 0, MAX_SEQ)]


class AuditController(Controller):
    """The log of administrative changes. It has no way to change it."""

    path = "/audit"
    tags = ("audit",)

    @get(opt=needs(Action.READ_AUDIT))
    async def list_entries(
        self,
        database: NamedDependency[Database],
        caller: NamedDependency[Caller],
        limit: Limit = None,
        after: After = None,
        object_id: FromQuery[str | None] = None,
    ) -> AuditPage:
        """Changes, oldest first; with `object_id`, those to one thing."""
        size = parse_page(limit, None).limit
        number = 0 if after is None else parse_whole(after, "after")
        if not 0 <= number <= MAX_SEQ:
            raise BadRequest(f"'after' must be the number of an entry, from 0 to {MAX_SEQ}.", param="after")
        statement = select(AuditEntry).where(AuditEntry.seq > number).order_by(AuditEntry.seq).limit(size + 1)
        if object_id is not None:
            statement = statement.where(AuditEntry.object_id == object_id)
        async with database.read() as session:
            found = (await session.scalars(statement)).all()
        entries = found[:size]
        next_after = entries[-1].seq if len(found) > size else None
        return AuditPage([AuditView.of(e) for e in entries], next_after, whole=caller.tenant_id is None)
