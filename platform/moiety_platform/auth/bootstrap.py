"""First start: creates an owner's key and a demo tenant, once, even if several processes start at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from sqlalchemy import exists, select, text
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.access.roles import Role
from moiety_platform.audit.trail import AuditedStore
from moiety_platform.auth.row_scope import tenant_of
from moiety_platform.auth.schemas import NewKey
from moiety_platform.auth.service import create_key
from moiety_platform.classes.schemas import ClassChange
from moiety_platform.classes.service import change_class
from moiety_platform.clock import Clock
from moiety_platform.db.session import Database
from moiety_platform.tenants.models import ApiKey, Project, Tenant
from moiety_platform.tenants.names import is_named
from moiety_platform.tenants.schemas import NewProject, NewTenant
from moiety_platform.tenants.service import create_project, create_tenant
from moiety_wire.classes import ServiceClass

ACTOR = "first start"
DEMO_TENANT = "demo"
DEMO_PROJECT = "default"
FIRST_OWNER = "first administrator"

_ADVISORY_LOCK = 0x626F_6F74  # "boot"


@dataclass(frozen=True, slots=True)
class BootstrapResult:
    """Objects created by the first start. The keys are in clear, for the one time that they can be shown."""

    tenant_id: str
    tenant_name: str
    admin_key: str = field(repr=False)
    tenant_key: str = field(repr=False)


async def ensure_bootstrap(
    database: Database, pepper: bytes, clock: Clock, *, reissue: bool = False, slos: Iterable[ServiceClass] = ()
) -> BootstrapResult | None:
    """Fill an empty store, whose built-in classes get the SLOs in `slos`; return None if it is not empty.

    With `reissue`, make new keys beside the old ones even then, for the case that the first ones were lost. Raises
    Unavailable when the store is down.
    """
    async with AuditedStore(database, ACTOR, None, tenant_of, clock).write() as session:
        await _only_one(session, database)
        used = await session.scalar(select(exists(select(ApiKey.id)) | exists(select(Tenant.id))))
        if used and not reissue:
            return None
        if not used:
            for service in slos:
                slo = {name: getattr(service, name) for name in ("ttft_s", "ttft_per_1k_s", "tpot_s")}
                await change_class(session, service.name, ClassChange(**slo))
        return await _make_keys(session, pepper, clock)


async def ensure_owner(
    database: Database, pepper: bytes, clock: Clock, keep: Callable[[str], None], *, reissue: bool = False
) -> bool:
    """Make an owner's key in a store that has no keys, or `reissue` one beside the existing keys.

    The key becomes valid only once `keep`, which receives it in clear, has returned. Return False if the store has
    keys. Raises Unavailable when the store is down, and the errors of `keep`.
    """
    async with AuditedStore(database, ACTOR, None, tenant_of, clock).write() as session:
        await _only_one(session, database)
        if not reissue and await session.scalar(select(exists(select(ApiKey.id)))):
            return False
        _, made = await create_key(session, NewKey(name=FIRST_OWNER, role=Role.OWNER), pepper, clock.now())
        keep(made.text)
        return True


async def _only_one(session: AsyncSession, database: Database) -> None:
    """Serialize the processes that fill a store. SQLite has only one writer anyway."""
    if database.dialect == "postgresql":
        await session.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ADVISORY_LOCK})


async def _make_keys(session: AsyncSession, pepper: bytes, clock: Clock) -> BootstrapResult:
    now = clock.now()
    tenant = await session.scalar(select(Tenant).where(is_named(Tenant, DEMO_TENANT)))
    if tenant is None:
        tenant = await create_tenant(session, NewTenant(name=DEMO_TENANT), now)
    project = await session.scalar(
        select(Project).where(Project.tenant_id == tenant.id, is_named(Project, DEMO_PROJECT))
    )
    if project is None:
        project = await create_project(session, NewProject(tenant_id=tenant.id, name=DEMO_PROJECT), now)
    _, admin_text = await create_key(session, NewKey(name=FIRST_OWNER, role=Role.OWNER), pepper, now)
    _, tenant_text = await create_key(session, NewKey(name="first key", project_id=project.id), pepper, now)
    return BootstrapResult(
        tenant_id=tenant.id, tenant_name=tenant.name, admin_key=admin_text.text, tenant_key=tenant_text.text
    )
