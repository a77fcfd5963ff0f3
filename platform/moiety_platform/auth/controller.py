"""`/admin/v1/keys`: maps HTTP to the service. The admin router decides on access."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from litestar import Controller, Response, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.access.actions import needs
from moiety_platform.access.caller import Caller
from moiety_platform.access.roles import Role
from moiety_platform.audit.trail import AuditedStore
from moiety_platform.auth import service
from moiety_platform.auth.admin_resource import KEYS, WRITE_ADMIN_KEYS
from moiety_platform.auth.authenticator import Authenticator
from moiety_platform.auth.key_details import read_details
from moiety_platform.auth.keys import KeyText
from moiety_platform.auth.pepper import Pepper
from moiety_platform.auth.schemas import CreatedKey, KeyPage, KeyView, NewKey, Rotation
from moiety_platform.clock import Clock
from moiety_platform.db.paging import PageRequestDependency
from moiety_platform.db.session import Database
from moiety_platform.errors import BadRequest
from moiety_platform.etags import Precondition, tagged
from moiety_platform.openapi.described import fails
from moiety_platform.query_parameters import one_of
from moiety_platform.tenants.checks import NAME
from moiety_platform.tenants.models import ApiKey
from moiety_platform.usage.reconciliation import take_snapshot_locks

NameFilter = Annotated[
    str | None, QueryParameter(description="Only keys with this name.", schema_extra=NAME.extra_json_schema)
]
DetailsChoice = Annotated[str | None, one_of("Add the details of each key; false if not given.", "true", "false")]
RoleFilter = Annotated[str | None, one_of("Only keys of administrators with this role.", *Role)]


class KeyController(Controller):
    """Routes of API keys."""

    path = KEYS.path
    tags = KEYS.tags

    @post(opt=needs(KEYS.write) | fails(404, 409))
    async def create_key(
        self,
        store: NamedDependency[AuditedStore],
        pepper: NamedDependency[Pepper],
        caller: NamedDependency[Caller],
        data: JSONBody[NewKey],
    ) -> CreatedKey:
        """Make a key; only this response contains its text. Only owners make administrators' keys."""
        if data.project_id is None:
            caller.require(WRITE_ADMIN_KEYS)
        async with store.write() as session:
            made = await service.create_key(session, data, pepper.value, store.clock.now())
        return _made(*made, store.clock)

    @get(opt=needs(KEYS.read) | fails(404))
    async def list_keys(
        self,
        database: NamedDependency[Database],
        now: NamedDependency[datetime],
        page: PageRequestDependency,
        tenant_id: FromQuery[str | None] = None,
        project_id: FromQuery[str | None] = None,
        role: RoleFilter = None,
        name: NameFilter = None,
        user_id: FromQuery[str | None] = None,
        details: DetailsChoice = None,
    ) -> KeyPage:
        """List keys, oldest first; of one tenant, project, role, name or user if given.

        With `details=true` each has its last use, its cost of this month and its quotas.
        """
        wanted = service.KeyFilter(tenant_id, project_id, parse_role(role), name, user_id)
        with_details = parse_details(details)
        async with database.read() as session:
            if with_details:
                await take_snapshot_locks(session)
            return await service.list_keys(session, page, now, wanted, with_details=with_details)

    @get("/{key_id:str}", opt=needs(KEYS.read))
    async def get_key(
        self,
        database: NamedDependency[Database],
        now: NamedDependency[datetime],
        key_id: FromPath[str],
        details: DetailsChoice = None,
    ) -> Response[KeyView]:
        """Return one key; with `details=true` also its last use, its cost of this month and its quotas."""
        with_details = parse_details(details)
        async with database.read() as session:
            if with_details:
                await take_snapshot_locks(session)
            key = await service.get_key(session, key_id)
            found = await read_details(session, [key], now) if with_details else {}
            return tagged(KeyView.of(key, now, found.get(key.id)))

    @post("/{key_id:str}/revoke", status_code=200, opt=needs(KEYS.write) | fails(409))
    async def revoke_key(
        self,
        store: NamedDependency[AuditedStore],
        authenticator: NamedDependency[Authenticator],
        caller: NamedDependency[Caller],
        precondition: NamedDependency[Precondition],
        key_id: FromPath[str],
    ) -> KeyView:
        """Revoke a key, here at once and at every other gateway within seconds."""
        async with store.write() as session:
            await _check_may_change(session, caller, key_id)
            precondition.check(KeyView.of(await service.get_key(session, key_id), store.clock.now()))
            key = await service.revoke_key(session, key_id, store.clock.now())
        authenticator.forget(key.id)
        return KeyView.of(key, store.clock.now())

    @post("/{key_id:str}/rotate", opt=needs(KEYS.write) | fails(409))
    async def rotate_key(
        self,
        store: NamedDependency[AuditedStore],
        pepper: NamedDependency[Pepper],
        authenticator: NamedDependency[Authenticator],
        caller: NamedDependency[Caller],
        precondition: NamedDependency[Precondition],
        key_id: FromPath[str],
        data: JSONBody[Rotation | None] = None,
    ) -> CreatedKey:
        """Make a key's successor; the old key works for another `grace_s`, by default one day."""
        grace_s = (data or Rotation()).grace_s
        async with store.write() as session:
            await _check_may_change(session, caller, key_id)
            precondition.check(KeyView.of(await service.get_key(session, key_id), store.clock.now()))
            made = await service.rotate_key(session, key_id, grace_s, pepper.value, store.clock.now())
        authenticator.forget(key_id)
        return _made(*made, store.clock)


def parse_details(text: str | None) -> bool:
    """Return whether details are requested. Raises BadRequest."""
    if text not in (None, "true", "false"):
        raise BadRequest("'details' must be 'true' or 'false'.", param="details")
    return text == "true"


def parse_role(text: str | None) -> Role | None:
    """Return the role. Raises BadRequest."""
    role = Role.of(text)
    if text is not None and role is None:
        raise BadRequest(f"'role' must be one of: {', '.join(Role)}.", param="role")
    return role


async def _check_may_change(session: AsyncSession, caller: Caller, key_id: str) -> None:
    """Check that the caller may change the key.

    Raises NotFound, or Forbidden where an administrator's key is not changed by an owner.
    """
    if (await service.get_key(session, key_id)).role is not None:
        caller.require(WRITE_ADMIN_KEYS)


def _made(key: ApiKey, text: KeyText, clock: Clock) -> CreatedKey:
    return CreatedKey(key=KeyView.of(key, clock.now()), secret=text.text)
