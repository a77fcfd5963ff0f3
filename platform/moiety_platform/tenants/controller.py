"""`/admin/v1/tenants` and `/admin/v1/projects`: map HTTP to the service. The admin router decides on access."""

from __future__ import annotations

from typing import Annotated

from litestar import Controller, Response, get, patch, post
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter

from moiety_platform.access.actions import needs
from moiety_platform.audit.trail import AuditedStore
from moiety_platform.db.paging import PageRequestDependency
from moiety_platform.db.session import Database
from moiety_platform.etags import Precondition, tagged
from moiety_platform.openapi.described import fails
from moiety_platform.tenants import service
from moiety_platform.tenants.admin_resource import PROJECTS, TENANTS
from moiety_platform.tenants.checks import NAME
from moiety_platform.tenants.schemas import (
    NewProject,
    NewTenant,
    ProjectPage,
    ProjectView,
    TenantChange,
    TenantPage,
    TenantView,
)

Named = Annotated[
    str | None,
    QueryParameter(description="Only tenants with this name, in any case.", schema_extra=NAME.extra_json_schema),
]


class TenantController(Controller):
    """Routes of tenants."""

    path = TENANTS.path
    tags = TENANTS.tags

    @post(opt=needs(TENANTS.write) | fails(409))
    async def create_tenant(self, store: NamedDependency[AuditedStore], data: JSONBody[NewTenant]) -> TenantView:
        """Create a tenant."""
        async with store.write() as session:
            return TenantView.of(await service.create_tenant(session, data, store.clock.now()))

    @get(opt=needs(TENANTS.read))
    async def list_tenants(
        self, database: NamedDependency[Database], page: PageRequestDependency, name: Named = None
    ) -> TenantPage:
        """List tenants, oldest first; with `name`, only the tenant of that name."""
        async with database.read() as session:
            return await service.list_tenants(session, page, name=name)

    @get("/{tenant_id:str}", opt=needs(TENANTS.read))
    async def get_tenant(self, database: NamedDependency[Database], tenant_id: FromPath[str]) -> Response[TenantView]:
        """Return one tenant."""
        async with database.read() as session:
            return tagged(TenantView.of(await service.get_tenant(session, tenant_id)))

    @patch("/{tenant_id:str}", opt=needs(TENANTS.write) | fails(409))
    async def change_tenant(
        self,
        store: NamedDependency[AuditedStore],
        precondition: NamedDependency[Precondition],
        tenant_id: FromPath[str],
        data: JSONBody[TenantChange],
    ) -> Response[TenantView]:
        """Change a tenant's name, class, weight or status; `suspended` disables its keys within seconds."""
        async with store.write() as session:
            precondition.check(TenantView.of(await service.get_tenant(session, tenant_id)))
            return tagged(TenantView.of(await service.change_tenant(session, tenant_id, data)))


class ProjectController(Controller):
    """Routes of projects."""

    path = PROJECTS.path
    tags = PROJECTS.tags

    @post(opt=needs(PROJECTS.write) | fails(404, 409))
    async def create_project(self, store: NamedDependency[AuditedStore], data: JSONBody[NewProject]) -> ProjectView:
        """Create a project of a tenant."""
        async with store.write() as session:
            return ProjectView.of(await service.create_project(session, data, store.clock.now()))

    @get(opt=needs(PROJECTS.read) | fails(404))
    async def list_projects(
        self,
        database: NamedDependency[Database],
        page: PageRequestDependency,
        tenant_id: FromQuery[str | None] = None,
        name: Named = None,
    ) -> ProjectPage:
        """List projects, oldest first; of one tenant if `tenant_id` is given."""
        async with database.read() as session:
            return await service.list_projects(session, page, tenant_id=tenant_id, name=name)

    @get("/{project_id:str}", opt=needs(PROJECTS.read))
    async def get_project(
        self, database: NamedDependency[Database], project_id: FromPath[str]
    ) -> Response[ProjectView]:
        """Return one project."""
        async with database.read() as session:
            return tagged(ProjectView.of(await service.get_project(session, project_id)))
