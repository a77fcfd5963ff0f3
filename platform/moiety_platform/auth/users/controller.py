"""`/admin/v1/users` and `/admin/v1/invitations`: map HTTP to the service. The admin router decides on access."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from litestar import Controller, Response, delete, get, patch, post
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter, SkipValidation

from moiety_platform.access.actions import needs
from moiety_platform.access.caller import Caller
from moiety_platform.access.roles import Role
from moiety_platform.access.views import ACCEPT_INVITATION
from moiety_platform.audit.trail import AuditedStore
from moiety_platform.auth.authenticator import Authenticator
from moiety_platform.auth.pepper import Pepper
from moiety_platform.auth.users import service
from moiety_platform.auth.users.admin_resource import USERS, WRITE_ADMIN_USERS
from moiety_platform.auth.users.invitations import read_invitation
from moiety_platform.auth.users.models import UserState
from moiety_platform.auth.users.schemas import (
    EMAIL,
    AcceptedInvitation,
    CreatedInvitation,
    InvitationTerms,
    NewUser,
    UserChange,
    UserPage,
    UserView,
)
from moiety_platform.auth.users.sign_in import TokenSubject
from moiety_platform.db.paging import PageRequestDependency
from moiety_platform.db.session import Database
from moiety_platform.errors import BadRequest
from moiety_platform.etags import Precondition, tagged
from moiety_platform.openapi.described import fails

INVITATION_PATH = "/?invitation="  # below the dashboard's address

EmailFilter = Annotated[
    str | None, QueryParameter(description="Only users with this address.", schema_extra=EMAIL.extra_json_schema)
]


class UserController(Controller):
    """Routes of users."""

    path = USERS.path
    tags = USERS.tags

    @post(opt=needs(USERS.write) | fails(404, 409))
    async def create_user(
        self, store: NamedDependency[AuditedStore], caller: NamedDependency[Caller], data: JSONBody[NewUser]
    ) -> UserView:
        """Create a user. Only owners create administrators; tenants' administrators create developers and viewers."""
        async with store.write() as session:
            user = await service.create_user(session, data, store.clock.now())
            _check_may_change(caller, Role(user.role), user.tenant_id)
            return UserView.of(user)

    @get(opt=needs(USERS.read) | fails(404))
    async def list_users(
        self,
        database: NamedDependency[Database],
        page: PageRequestDependency,
        tenant_id: FromQuery[str | None] = None,
        email: EmailFilter = None,
    ) -> UserPage:
        """List users, oldest first; of one tenant or address if given."""
        async with database.read() as session:
            return await service.list_users(session, page, tenant_id=tenant_id, email=email)

    @get("/{user_id:str}", opt=needs(USERS.read))
    async def get_user(self, database: NamedDependency[Database], user_id: FromPath[str]) -> Response[UserView]:
        """Return one user."""
        async with database.read() as session:
            return tagged(UserView.of(await service.get_user(session, user_id)))

    @patch("/{user_id:str}", opt=needs(USERS.write))
    async def change_user(
        self,
        store: NamedDependency[AuditedStore],
        authenticator: NamedDependency[Authenticator],
        caller: NamedDependency[Caller],
        precondition: NamedDependency[Precondition],
        user_id: FromPath[str],
        data: JSONBody[UserChange],
    ) -> Response[UserView]:
        """Change a user's name, role, projects or state. A disabled user and its keys are refused from then on."""
        if data.everywhere and caller.tenant_id is not None:
            raise BadRequest("'everywhere' is for administrators of all tenants; leave it out.", param="everywhere")
        async with store.write() as session:
            if data.everywhere:
                user, roles = await service.lock_user_everywhere(session, user_id)
            else:
                user, roles = await service.lock_user(session, user_id), []
            _check_may_change(caller, Role(user.role), user.tenant_id)
            precondition.check(UserView.of(user))
            changed = await service.change_user(session, user, data, store.clock.now())
            _check_may_change(caller, Role(user.role), user.tenant_id)
            key_ids = [*changed.key_ids, *await service.key_ids_of(session, user.id)]
            for other in roles:
                _check_may_change(caller, Role(other.role), other.tenant_id)
                service.set_state(other, UserState(str(data.state)))
                key_ids += await service.key_ids_of(session, other.id)
            view = UserView.of(user)
        _forget(authenticator, key_ids)
        return tagged(view)

    @post("/{user_id:str}/invitation", opt=needs(USERS.write) | fails(409))
    async def invite_user(
        self,
        store: NamedDependency[AuditedStore],
        pepper: NamedDependency[Pepper],
        caller: NamedDependency[Caller],
        user_id: FromPath[str],
        data: JSONBody[InvitationTerms | None] = None,
    ) -> CreatedInvitation:
        """Make an invitation, which replaces an open one; only this response contains it.

        It is good for one acceptance within `valid_hours`, by default three days.
        """
        terms = data or InvitationTerms()
        async with store.write() as session:
            user = await service.lock_user(session, user_id)
            _check_may_change(caller, Role(user.role), user.tenant_id)
            text, _ = await service.invite_user(session, user, terms.valid_hours, pepper.value, store.clock.now())
            return CreatedInvitation(UserView.of(user), text, f"{INVITATION_PATH}{text}")

    @delete("/{user_id:str}", status_code=200, opt=needs(USERS.write))
    async def delete_user(
        self,
        store: NamedDependency[AuditedStore],
        authenticator: NamedDependency[Authenticator],
        caller: NamedDependency[Caller],
        precondition: NamedDependency[Precondition],
        user_id: FromPath[str],
    ) -> UserView:
        """Delete a user and revoke its keys; returns its last state."""
        async with store.write() as session:
            user = await service.lock_user(session, user_id)
            _check_may_change(caller, Role(user.role), user.tenant_id)
            view = UserView.of(user)
            precondition.check(view)
            key_ids = await service.delete_user(session, user, store.clock.now())
        _forget(authenticator, key_ids)
        return view


class InvitationController(Controller):
    """Route for people who have signed in, and have no role yet."""

    path = "/invitations"
    tags = USERS.tags

    @post("/accept", status_code=200, opt=needs(ACCEPT_INVITATION) | fails(409, 410))
    async def accept_invitation(
        self,
        subject: NamedDependency[SkipValidation[TokenSubject]],
        subject_store: NamedDependency[SkipValidation[AuditedStore]],
        pepper: NamedDependency[Pepper],
        data: JSONBody[AcceptedInvitation],
    ) -> UserView:
        """Accept an invitation with a token of the identity provider, whose subject is the user from then on.

        If the token has a verified email address, it must be the invited one.
        """
        now = subject_store.clock.now()
        invitation = read_invitation(data.invitation, pepper.value, now)
        async with subject_store.write() as session:
            return UserView.of(await service.accept_invitation(session, invitation, subject, now))


def _check_may_change(caller: Caller, role: Role, tenant_id: str | None) -> None:
    """Check that the caller may give or take this role. Raises Forbidden."""
    if tenant_id is None or role is Role.TENANT_ADMIN:
        caller.require(WRITE_ADMIN_USERS)


def _forget(authenticator: Authenticator, key_ids: Iterable[str]) -> None:
    for key_id in key_ids:
        authenticator.forget(key_id)
