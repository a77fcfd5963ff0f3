"""Request and response bodies of the admin API for users and their invitations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, ClassVar

import msgspec

from moiety_platform.access.roles import Role, tenant_complaint
from moiety_platform.auth.users.models import MAX_EMAIL_LENGTH, User, UserState
from moiety_platform.db.paging import Page
from moiety_platform.etags import Tagged
from moiety_platform.openapi.schemas import shows
from moiety_platform.tenants.models import MAX_NAME_LENGTH
from moiety_wire.shared_fields import CopyOf

MAX_PROJECTS = 100
MAX_INVITATION_LENGTH = 200
MIN_VALID_HOURS, MAX_VALID_HOURS, DEFAULT_VALID_HOURS = 1, 30 * 24, 72

EMAIL = shows(minLength=3, maxLength=MAX_EMAIL_LENGTH, format="email-address")
DISPLAY_NAME = shows(maxLength=MAX_NAME_LENGTH, format="name")
PROJECTS = shows(minItems=1, maxItems=MAX_PROJECTS)


def _places() -> list[dict[str, Any]]:
    """Return the possible places of a role as JSON schemas: the deployment, or one tenant."""
    shown: list[dict[str, Any]] = []
    for role in Role:
        fields: dict[str, Any] = {"role": {"const": role}}
        if role is not Role.DEVELOPER:
            fields["project_ids"] = {"type": "null"}
        if tenant_complaint(role, None) is None:
            shown.append({"required": ["role"], "properties": {**fields, "tenant_id": {"type": "null"}}})
        if tenant_complaint(role, "one") is None:
            shown.append({"required": ["role", "tenant_id"], "properties": {**fields, "tenant_id": {"type": "string"}}})
    return shown


class NewUser(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A user to create, who can sign in after an invitation is made and accepted.

    With `tenant_id` the role is for that tenant. `project_ids` are the projects of a developer, null for all.
    """

    rules: ClassVar[Sequence[Mapping[str, Any]]] = ({"anyOf": _places()},)

    email: Annotated[str, EMAIL]
    role: Role
    tenant_id: str | None = None
    name: Annotated[str, DISPLAY_NAME] = ""
    project_ids: Annotated[list[str], PROJECTS] | None = None


class UserChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Changes of a user; fields that are not given stay unchanged.

    The state `disabled` refuses the user and its keys, `active` enables it again. With `everywhere`, only for
    administrators of all tenants, the state applies to the roles of the same email address in all tenants.
    """

    rules: ClassVar[Sequence[Mapping[str, Any]]] = (
        {"anyOf": [{"properties": {"everywhere": {"const": False}}}, {"required": ["state"]}]},
    )

    name: Annotated[str, DISPLAY_NAME] | msgspec.UnsetType = msgspec.UNSET
    role: Role | msgspec.UnsetType = msgspec.UNSET
    project_ids: Annotated[list[str], PROJECTS] | msgspec.UnsetType | None = msgspec.UNSET
    state: Annotated[str, shows(enum=[UserState.ACTIVE, UserState.DISABLED])] | msgspec.UnsetType = msgspec.UNSET
    everywhere: bool = False


class UserView(CopyOf[User], Tagged, frozen=True):
    """A user. `issuer` and `subject` identify it at the identity provider, null until the invitation is accepted.

    For a developer by groups, `role_seen_at` is about the time of the last token with the role, and `role_ended_at`
    that of a token without it, after which its keys are refused.
    """

    id: str
    email: str
    name: str
    role: str
    tenant_id: str | None
    project_ids: list[str] | None
    state: str
    issuer: str | None
    subject: str | None
    created_at: datetime
    accepted_at: datetime | None
    role_seen_at: datetime | None
    role_ended_at: datetime | None
    invitation_expires_at: datetime | None


class UserPage(Page[UserView], frozen=True):
    """A page of users, oldest first; `next_cursor` is null on the last page."""


class InvitationTerms(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Hours for which an invitation is valid."""

    valid_hours: Annotated[int, shows(minimum=MIN_VALID_HOURS, maximum=MAX_VALID_HOURS)] = DEFAULT_VALID_HOURS


class CreatedInvitation(msgspec.Struct, frozen=True):
    """A new invitation in `secret`, which is shown only once. `path` is the link below the dashboard's address."""

    user: UserView
    secret: str
    path: str


class AcceptedInvitation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An invitation that the caller of the request accepts."""

    invitation: Annotated[str, shows(minLength=1, maxLength=MAX_INVITATION_LENGTH)]
