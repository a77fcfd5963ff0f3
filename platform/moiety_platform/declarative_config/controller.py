"""`/admin/v1/declarations`: maps HTTP to the service. The admin router decides on access."""

from __future__ import annotations

from litestar import Controller, delete, get, put
from litestar.di import NamedDependency
from litestar.params import FromQuery, JSONBody

from moiety_platform.access.actions import needs
from moiety_platform.audit.trail import AuditedStore
from moiety_platform.db.session import Database
from moiety_platform.declarative_config import service
from moiety_platform.declarative_config.admin_resource import DECLARATIONS
from moiety_platform.declarative_config.models import DeclaredKind
from moiety_platform.declarative_config.schemas import DeclarationView, DeclarationViews, NewDeclaration
from moiety_platform.openapi.described import fails


class DeclarationController(Controller):
    """Routes of objects that files declare, and that only these files change and delete."""

    path = DECLARATIONS.path
    tags = DECLARATIONS.tags

    @get(opt=needs(DECLARATIONS.read))
    async def list_declarations(self, database: NamedDependency[Database]) -> DeclarationViews:
        """List all declared objects by kind and name."""
        async with database.read() as session:
            found = await service.list_declarations(session)
            return DeclarationViews([DeclarationView.of(record) for record in found])

    @put(opt=needs(DECLARATIONS.write) | fails(409))
    async def put_declaration(
        self, store: NamedDependency[AuditedStore], data: JSONBody[NewDeclaration]
    ) -> DeclarationView:
        """Record that a file declares an object; 409 where another file does."""
        async with store.write() as session:
            return DeclarationView.of(await service.put_declaration(session, data))

    @delete(status_code=200, opt=needs(DECLARATIONS.write) | fails(404))
    async def delete_declaration(
        self, store: NamedDependency[AuditedStore], kind: FromQuery[DeclaredKind], name: FromQuery[str]
    ) -> DeclarationView:
        """Forget a declaration: the object stays, as if created manually."""
        async with store.write() as session:
            return DeclarationView.of(await service.delete_declaration(session, kind, name))
