"""`/admin/v1/classes`: maps HTTP to the service. The admin router decides on access."""

from __future__ import annotations

from litestar import Controller, Response, delete, get, patch, post
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody, SkipValidation

from moiety_platform.access.actions import needs
from moiety_platform.audit.trail import AuditedStore
from moiety_platform.classes import service
from moiety_platform.classes.admin_resource import CLASSES
from moiety_platform.classes.cache import ClassCache
from moiety_platform.classes.schemas import ClassChange, ClassList, ClassView, NewClass
from moiety_platform.db.session import Database
from moiety_platform.etags import Precondition, tagged
from moiety_platform.openapi.described import fails

ClassCacheDependency = NamedDependency[SkipValidation[ClassCache]]


class ClassController(Controller):
    """Routes of service classes. An edit applies from the next request on, at other gateways within seconds."""

    path = CLASSES.path
    tags = CLASSES.tags

    @get(opt=needs(CLASSES.read))
    async def list_classes(self, database: NamedDependency[Database]) -> ClassList:
        """List all classes, best first."""
        async with database.read() as session:
            found = await service.load_classes(session)
        return ClassList([ClassView.of(terms) for terms in found.values()])

    @get("/{name:str}", opt=needs(CLASSES.read))
    async def get_class(self, database: NamedDependency[Database], name: FromPath[str]) -> Response[ClassView]:
        """Return one class."""
        async with database.read() as session:
            return tagged(ClassView.of(await service.get_class(session, name)))

    @post(opt=needs(CLASSES.write) | fails(409))
    async def create_class(
        self, store: NamedDependency[AuditedStore], classes: ClassCacheDependency, data: JSONBody[NewClass]
    ) -> ClassView:
        """Create a class."""
        async with store.write() as session:
            made = await service.create_class(session, data)
        classes.forget()
        return ClassView.of(made)

    @patch("/{name:str}", opt=needs(CLASSES.write))
    async def change_class(
        self,
        store: NamedDependency[AuditedStore],
        classes: ClassCacheDependency,
        precondition: NamedDependency[Precondition],
        name: FromPath[str],
        data: JSONBody[ClassChange],
    ) -> Response[ClassView]:
        """Change a class's rank, SLO, price or action on overload."""
        async with store.write() as session:
            precondition.check(ClassView.of(await service.get_class(session, name)))
            changed = await service.change_class(session, name, data)
        classes.forget()
        return tagged(ClassView.of(changed))

    @delete("/{name:str}", status_code=200, opt=needs(CLASSES.write) | fails(409))
    async def delete_class(
        self,
        store: NamedDependency[AuditedStore],
        classes: ClassCacheDependency,
        precondition: NamedDependency[Precondition],
        name: FromPath[str],
    ) -> ClassView:
        """Delete a class that is neither shipped nor in use; returns its last state."""
        async with store.write() as session:
            precondition.check(ClassView.of(await service.get_class(session, name)))
            deleted = await service.delete_class(session, name)
        classes.forget()
        return ClassView.of(deleted)
