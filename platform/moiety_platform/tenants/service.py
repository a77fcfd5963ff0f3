"""Creates, finds and changes tenants and projects within the caller's transaction. Independent of HTTP."""

from __future__ import annotations

from datetime import datetime

import msgspec
from sqlalchemy import select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.classes.service import require_class
from moiety_platform.db.paging import PageRequest, read_page
from moiety_platform.errors import Conflict
from moiety_platform.tenants.admin_resource import PROJECTS, TENANTS
from moiety_platform.tenants.checks import check_speculative_prefill, check_status, check_weight, new_id
from moiety_platform.tenants.models import Project, Tenant, TenantDeletion, TenantStatus
from moiety_platform.tenants.names import check_new_name, fold_missing_names, is_named
from moiety_platform.tenants.rows import require_row
from moiety_platform.tenants.schemas import (
    NewProject,
    NewTenant,
    ProjectPage,
    ProjectView,
    TenantChange,
    TenantPage,
    TenantView,
)


async def create_tenant(session: AsyncSession, new: NewTenant, now: datetime) -> Tenant:
    """Create a tenant. Raises BadRequest, or Conflict when the name is taken."""
    await fold_missing_names(session, Tenant)
    tenant = Tenant(
        id=new_id("ten"),
        name=check_new_name(new.name),
        service_class=await require_class(session, new.service_class),
        weight=check_weight(new.weight),
        status=TenantStatus.ACTIVE,
        created_at=now,
        speculative_prefill=check_speculative_prefill(new.speculative_prefill),
    )
    session.add(tenant)
    await _flush_unique(session, f"A tenant named {tenant.name!r} exists already; choose another name.")
    return tenant


async def get_tenant(session: AsyncSession, tenant_id: str) -> Tenant:
    """Return the tenant. Raises NotFound."""
    return await require_row(session, Tenant, tenant_id, TENANTS)


async def get_undeleted_tenant(session: AsyncSession, tenant_id: str) -> Tenant:
    """Return a tenant whose data was not deleted. Raises NotFound, or Conflict."""
    tenant = await get_tenant(session, tenant_id)
    if await session.get(TenantDeletion, tenant_id) is not None:
        raise Conflict("This tenant's data was erased; create a new tenant instead.", code="tenant_erased")
    return tenant


async def list_tenants(session: AsyncSession, page: PageRequest, *, name: str | None = None) -> TenantPage:
    """Return tenants, oldest first; with `name`, only the tenant of an equal name."""
    statement = select(Tenant)
    if name is not None:
        statement = statement.where(is_named(Tenant, name))
    tenants, next_cursor = await read_page(session, statement, page, Tenant.created_at, Tenant.id)
    return TenantPage([TenantView.of(tenant) for tenant in tenants], next_cursor)


async def change_tenant(session: AsyncSession, tenant_id: str, change: TenantChange) -> Tenant:
    """Change the given fields. Raises NotFound, BadRequest, or Conflict.

    Conflict means that the new name is taken, or that the tenant's data was deleted.
    """
    tenant = await get_undeleted_tenant(session, tenant_id)
    if not isinstance(change.service_class, msgspec.UnsetType):
        tenant.service_class = await require_class(session, change.service_class)
    if not isinstance(change.weight, msgspec.UnsetType):
        tenant.weight = check_weight(change.weight)
    if not isinstance(change.status, msgspec.UnsetType):
        tenant.status = check_status(change.status)
    if not isinstance(change.speculative_prefill, msgspec.UnsetType):
        tenant.speculative_prefill = check_speculative_prefill(change.speculative_prefill)
    if not isinstance(change.name, msgspec.UnsetType):  # last, so that no query before the flush below sends it
        await fold_missing_names(session, Tenant)
        tenant.name = check_new_name(change.name)
    await _flush_unique(session, f"A tenant named {tenant.name!r} exists already; choose another name.")
    return tenant


async def create_project(session: AsyncSession, new: NewProject, now: datetime) -> Project:
    """Create a project. Raises NotFound (no such tenant), BadRequest, or Conflict.

    Conflict means that the tenant has a project of this name, or that its data was deleted.
    """
    tenant = await get_undeleted_tenant(session, new.tenant_id)
    await fold_missing_names(session, Project)
    project = Project(id=new_id("prj"), tenant_id=tenant.id, name=check_new_name(new.name), created_at=now)
    session.add(project)
    taken = f"The tenant {tenant.name!r} has a project named {project.name!r} already; choose another name."
    await _flush_unique(session, taken)
    return project


async def get_project(session: AsyncSession, project_id: str) -> Project:
    """Return the project. Raises NotFound."""
    return await require_row(session, Project, project_id, PROJECTS)


async def list_projects(
    session: AsyncSession, page: PageRequest, *, tenant_id: str | None = None, name: str | None = None
) -> ProjectPage:
    """Return projects, oldest first, of one tenant if `tenant_id` is given. Raises NotFound for an unknown tenant."""
    statement = select(Project)
    if tenant_id is not None:
        statement = statement.where(Project.tenant_id == (await get_tenant(session, tenant_id)).id)
    if name is not None:
        statement = statement.where(is_named(Project, name))
    projects, next_cursor = await read_page(session, statement, page, Project.created_at, Project.id)
    return ProjectPage([ProjectView.of(project) for project in projects], next_cursor)


async def _flush_unique(session: AsyncSession, taken: str) -> None:
    """Flush the changes; the uniqueness of a name is the only constraint that valid input can violate.

    Raises Conflict.
    """
    try:
        await session.flush()
    except IntegrityError as error:
        raise Conflict(taken, code="name_taken", param="name") from error
