"""Endpoints of contents of requests. Maps HTTP to the service; the router authorizes the caller."""

from __future__ import annotations

from litestar import Controller, delete, get, put
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody, SkipValidation

from moiety_platform.access.actions import needs
from moiety_platform.access.views import CONFIGURE_CONTENTS, READ_CONTENTS, READ_USAGE
from moiety_platform.audit.trail import AuditedStore, Change, note
from moiety_platform.controllers import RulesDependency
from moiety_platform.db.session import Database
from moiety_platform.openapi.described import fails
from moiety_platform.request_contents import service
from moiety_platform.request_contents.cipher import ContentCipher
from moiety_platform.request_contents.models import RequestContent
from moiety_platform.request_contents.schemas import ContentLoggingView, ContentView, NewContentLogging

CipherDependency = NamedDependency[SkipValidation[ContentCipher]]


class RequestContentController(Controller):
    """Contents of logged requests, and the opt-in of their tenants."""

    path = "/request-contents"
    tags = ("requests",)

    @get("/logging/{tenant_id:str}", opt=needs(READ_USAGE) | fails(404))
    async def get_logging(self, database: NamedDependency[Database], tenant_id: FromPath[str]) -> ContentLoggingView:
        """Return whether the contents of a tenant's requests are logged."""
        async with database.read() as session:
            return await service.get_logging(session, tenant_id)

    @put("/logging/{tenant_id:str}", opt=needs(CONFIGURE_CONTENTS) | fails(404))
    async def set_logging(
        self,
        rules: RulesDependency,
        tenant_id: FromPath[str],
        data: JSONBody[NewContentLogging],
    ) -> ContentLoggingView:
        """Opt in: log the contents of the tenant's requests, from now on, at every gateway within seconds."""
        async with rules.write() as session:
            return await service.set_logging(session, tenant_id, data.keep_days, rules.store.clock.now())

    @delete("/logging/{tenant_id:str}", status_code=200, opt=needs(CONFIGURE_CONTENTS) | fails(404))
    async def end_logging(self, rules: RulesDependency, tenant_id: FromPath[str]) -> ContentLoggingView:
        """Opt out: log no more contents of the tenant, and delete the stored ones."""
        async with rules.write() as session:
            return await service.end_logging(session, tenant_id)

    @get("/{request_id:str}", opt=needs(READ_CONTENTS) | fails(404))
    async def get_content(
        self, store: NamedDependency[AuditedStore], content_cipher: CipherDependency, request_id: FromPath[str]
    ) -> ContentView:
        """Return the content of a request. The audit log records who read it."""
        async with store.write() as session:
            view = await service.read_content(session, content_cipher, request_id)
            after = {"tenant_id": view.tenant_id}
            note(session, Change("read", RequestContent.__tablename__, request_id, None, after))
        return view
