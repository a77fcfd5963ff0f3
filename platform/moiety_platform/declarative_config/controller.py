"""/admin/v1/declarations. Maps HTTP to the service; who may call is the router's affair."""

from __future__ import annotations

from litestar import Controller, delete, get, put
from litestar.di import NamedDependency
from litestar.params import FromQuery, JSONBody

from moiety_platform.access.table import AdminAction, needs
from moiety_platform.audit.trail import AuditedStore
from moiety_platform.db.session import Database
from moiety_platform.declarative_config import service
from moiety_platform.declarative_config.models import DeclaredKind
from moiety_platform.declarative_config.schemas import DeclarationView, DeclarationViews, NewDeclaration
from moiety_platform.openapi.described import fails


class DeclarationController(Controller):
    """What was declared in files, and is therefore theirs to change and delete."""

    path = "/declarations"
    tags = ("declarations",)

    @get(opt=needs(AdminAction.READ_DECLARATIONS))
    async def list_declarations(self, database: NamedDependency[Database]) -> DeclarationViews:
        """All declared things, by kind and name."""
        async with database.read() as session:
            found = await service.list_declarations(session)
            return DeclarationViews([DeclarationView.of(record) for record in found])

    @put(opt=needs(AdminAction.WRITE_DECLARATIONS) | fails(409))
    async def put_declaration(
        self, store: NamedDependency[AuditedStore], data: JSONBody[NewDeclaration]
    ) -> DeclarationView:
        """Note that a file declares something; 409 where another file does."""
        async with store.write() as session:
            return DeclarationView.of(await service.put_declaration(session, data))

    @delete(status_code=200, opt=needs(AdminAction.WRITE_DECLARATIONS) | fails(404))
    async def delete_declaration(
        self, store: NamedDependency[AuditedStore], kind: FromQuery[DeclaredKind], name: FromQuery[str]
    ) -> DeclarationView:
        """Let a thing go: it stays, as if made by hand."""
        async with store.write() as session:
            return DeclarationView.of(await service.delete_declaration(session, kind, name))
