"""Authentication of administrators by tokens of an OpenID Connect issuer instead of a key.

A token is valid if one of the issuer's published keys signed it with an asymmetric algorithm, and its audience and
times match. Its claims contain the role, and the tenant where the role belongs to one, or groups to which the settings
give roles. Fails closed: while the issuer is down, tokens signed with an unknown key get 503.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import httpx
from sqlalchemy import select

from moiety_platform.access.actions import SELF_SERVICE
from moiety_platform.access.caller import MISSING_ROLE, Caller
from moiety_platform.access.group_roles import GroupRole, HeldRole, best_roles
from moiety_platform.access.roles import Role, tenant_complaint
from moiety_platform.audit.models import ACTOR_LENGTH
from moiety_platform.audit.trail import AuditedStore
from moiety_platform.auth.issuer_documents import HEADERS, read_published_keys, receive_document
from moiety_platform.auth.jwt_verification import FETCH_TIMEOUT_S, IssuerKeys, PublicKeys
from moiety_platform.auth.row_scope import tenant_of
from moiety_platform.auth.users.models import User, UserState
from moiety_platform.auth.users.provisioning import provision_developer
from moiety_platform.auth.users.sign_in import (
    TENANT_HEADER,
    TENANT_UNKNOWN,
    TokenSubject,
    choose_caller,
    memberships_of,
    no_role_in_tenant,
    user_disabled,
)
from moiety_platform.auth.users.token_roles import record_roles
from moiety_platform.auth.verified_tokens import VerifiedTokens
from moiety_platform.clock import Clock
from moiety_platform.db.session import Database
from moiety_platform.errors import BadRequest, Forbidden
from moiety_platform.jwt_issuers.terms import claim_values, find_claim
from moiety_platform.tenants.checks import is_id
from moiety_platform.tenants.models import Tenant, TenantStatus
from moiety_platform.tenants.names import is_named

SEVERAL_TENANTS = "several_tenants"


@dataclass(frozen=True, slots=True)
class OidcTerms:
    """Issuer and audience of accepted tokens, and the claims that contain the role, the tenant's id and the groups.

    Dots separate the names of nested claims. `group_roles` are the roles of groups.
    """

    issuer: str
    audience: str
    roles_claim: str
    tenant_claim: str
    groups_claim: str = "groups"
    group_roles: Mapping[str, GroupRole] = field(default_factory=dict)


class OidcVerifier:
    """Verifier of tokens. Caches the issuer's keys and verified tokens; the caller closes `http`."""

    def __init__(self, terms: OidcTerms, database: Database, http: httpx.AsyncClient, clock: Clock) -> None:
        self._terms = terms
        self._database = database
        self._clock = clock
        self._keys = IssuerKeys(terms.issuer, partial(read_keys, http, terms.issuer), clock)
        self._verified = VerifiedTokens(clock)

    async def close(self) -> None:
        await self._keys.close()

    async def identify(self, token: str) -> TokenSubject:
        """Return the person that a token names, who may have no role here.

        Raises Unauthenticated, or Unavailable.
        """
        return self._subject(await self._verify(token))

    async def authenticate(self, token: str, tenant_id: str | None = None) -> Caller:
        """Return the caller of a token: the user that it names, or else the role that its claims or groups give.

        A developer by claims or groups becomes a user at the first sign-in. `tenant_id` is the tenant that the request
        names, for persons with roles in several. Raises Unauthenticated, Forbidden (a disabled user, no known role, or
        not for this tenant), or Unavailable.
        """
        claims = await self._verify(token)
        subject = self._subject(claims)
        memberships = await memberships_of(self._database, subject)
        of_token = [one.user for one in memberships if one.user.has_role_of_token]
        given = [one for one in memberships if not one.user.has_role_of_token]
        held = await self._held_roles(claims) if of_token or not given else []
        if of_token:
            await self._record_roles(claims, held, of_token)
        is_of_token = any(user.tenant_id == tenant_id for user in of_token)
        if not is_of_token and (caller := choose_caller(subject, given, tenant_id)) is not None:
            return caller
        caller = await self._caller_of_claims(claims, held, tenant_id)
        is_of_deployment = caller.tenant_id is None and not given  # an accepted role replaces one of the token's
        if tenant_id is not None and caller.tenant_id != tenant_id and not is_of_deployment:
            raise no_role_in_tenant()
        user = next((one.user for one in memberships if one.user.tenant_id == caller.tenant_id), None)
        if user is not None and user.state == UserState.DISABLED:
            raise user_disabled()
        if caller.role is not Role.DEVELOPER or caller.tenant_id is None:
            return caller
        if user is None:
            store = AuditedStore(self._database, subject.actor, None, tenant_of, self._clock)
            user = await provision_developer(store, subject, caller.tenant_id, self._issued_at(claims))
        return caller if user is None else replace(caller, user_id=user.id)

    async def _verify(self, token: str) -> Mapping[str, Any]:
        terms = self._terms
        return await self._verified.verify(token, self._keys.find, issuer=terms.issuer, audience=terms.audience)

    def _subject(self, claims: Mapping[str, Any]) -> TokenSubject:
        email = claims.get("email")
        verified = claims.get("email_verified", True)  # text at some issuers
        is_verified = isinstance(email, str) and (verified is True or verified == "true")
        return TokenSubject(self._terms.issuer, claims["sub"], email if is_verified else None, _actor(claims["sub"]))

    async def _held_roles(self, claims: Mapping[str, Any]) -> list[HeldRole]:
        """Return all roles that the token's claims and groups give."""
        return [*self._roles_of_claim(claims), *await self._roles_of_groups(claims)]

    async def _record_roles(self, claims: Mapping[str, Any], held: Sequence[HeldRole], users: Sequence[User]) -> None:
        """Record which users by tokens still have a role with keys.

        A role ends by a token with the claim that names roles or groups, since some tokens lack it whatever the person
        may do, and that is not for another tenant.
        """
        terms = self._terms
        own = find_claim(claims, terms.tenant_claim)
        given = {str(one.tenant_id or own) for one in held if one.role in SELF_SERVICE}
        ended: set[str] = set()
        if find_claim(claims, terms.groups_claim if terms.group_roles else terms.roles_claim) is not None:
            ended = {str(user.tenant_id) for user in users if own in (None, user.tenant_id)} - given
        await record_roles(self._database, users, given, ended, self._issued_at(claims))

    def _issued_at(self, claims: Mapping[str, Any]) -> datetime:
        """Return the time at which a token was issued; the present time for a token that does not say so."""
        now, issued_s = self._clock.now(), claims.get("iat")
        if not isinstance(issued_s, int | float) or not 0 <= issued_s < now.timestamp():
            return now
        return datetime.fromtimestamp(issued_s, UTC)

    async def _caller_of_claims(
        self, claims: Mapping[str, Any], held: Sequence[HeldRole], wanted_tenant_id: str | None
    ) -> Caller:
        """Return the caller whose role and tenant are in the token's claims or groups, which give the roles `held`.

        With `wanted_tenant_id`, which the request names, roles of other tenants do not count. Raises Forbidden.
        """
        terms = self._terms
        tenant_id = find_claim(claims, terms.tenant_claim)
        if tenant_id is not None and not (isinstance(tenant_id, str) and is_id(tenant_id)):
            raise Forbidden(f"The token's claim '{terms.tenant_claim}' is not the id of a tenant.", code=TENANT_UNKNOWN)
        reached = [one for one in held if wanted_tenant_id is None or one.tenant_id in (None, wanted_tenant_id)]
        if held and not reached:
            raise no_role_in_tenant()
        found = best_roles(reached, tenant_id)
        if not found:
            raise self._missing_role()
        if len(found) > 1:
            raise Forbidden(
                f"The token's groups give the role '{found[0].role}' of several tenants "
                f"({', '.join(str(one.tenant_id) for one in found)}). Name one of them in the header {TENANT_HEADER}, "
                f"or get a token whose claim '{terms.tenant_claim}' names one of them.",
                code=SEVERAL_TENANTS,
            )
        role, tenant_id = found[0].role, found[0].tenant_id
        if complaint := tenant_complaint(role, tenant_id):
            raise Forbidden(
                f"{complaint} The token's claim '{terms.tenant_claim}' names the tenant.", code=MISSING_ROLE
            )
        if tenant_id is not None:
            await self._check_tenant(tenant_id)
        return Caller(_actor(claims["sub"]), role, tenant_id)

    def _roles_of_claim(self, claims: Mapping[str, Any]) -> list[HeldRole]:
        """Return the known roles that the token names itself."""
        names = claim_values(claims, self._terms.roles_claim)
        return [HeldRole(role) for role in Role if role.value in names]

    async def _roles_of_groups(self, claims: Mapping[str, Any]) -> list[HeldRole]:
        """Return the roles of the token's groups; those of tenants that do not exist are left out."""
        if not self._terms.group_roles:
            return []
        groups = claim_values(claims, self._terms.groups_claim)
        mine = [self._terms.group_roles[group] for group in groups if group in self._terms.group_roles]
        held = [HeldRole(one.role) for one in mine if one.tenant is None]
        ids: dict[str, str | None] = {}
        for one in mine:
            if one.tenant is not None:
                if one.tenant not in ids:
                    ids[one.tenant] = await self._find_tenant(one.tenant)
                if (tenant_id := ids[one.tenant]) is not None:
                    held.append(HeldRole(one.role, tenant_id))
        return held

    def _missing_role(self) -> Forbidden:
        terms = self._terms
        groups = (
            f", and no group in its claim '{terms.groups_claim}' has a role of an existing tenant or of all"
            if terms.group_roles
            else ""
        )
        return Forbidden(
            f"The token's claim '{terms.roles_claim}' has none of the roles {', '.join(Role)}{groups}; ask the "
            "administrator of its issuer for one.",
            code=MISSING_ROLE,
        )

    async def _find_tenant(self, text: str) -> str | None:
        """Return the id of the tenant with that id or name, or None."""
        async with self._database.read() as session:
            if is_id(text) and (tenant := await session.get(Tenant, text)) is not None:
                return tenant.id
            try:
                found: str | None = await session.scalar(select(Tenant.id).where(is_named(Tenant, text)))
            except BadRequest:  # no tenant can have this name
                return None
            return found

    async def _check_tenant(self, tenant_id: str) -> None:
        async with self._database.read() as session:
            tenant = await session.get(Tenant, tenant_id)
        if tenant is None:
            raise Forbidden(f"The token is for the tenant {tenant_id}, which does not exist.", code=TENANT_UNKNOWN)
        if tenant.status != TenantStatus.ACTIVE:
            raise Forbidden(
                f"The tenant {tenant.name!r} is suspended. Ask your administrator to activate it.",
                code="tenant_suspended",
            )


async def read_keys(http: httpx.AsyncClient, issuer: str) -> PublicKeys:
    """Return the issuer's published keys that can check signatures, by id. Raises one of FETCH_ERRORS."""

    async def read(url: str) -> dict[str, Any]:
        return await receive_document(http, http.build_request("GET", url, headers=HEADERS), url)

    async with asyncio.timeout(FETCH_TIMEOUT_S):  # a timeout of the client would be of each single part
        return await read_published_keys(read, issuer)


def _actor(subject: str) -> str:
    """Return the token subject's name in the audit log: `oidc:…`, hashed if it is too long."""
    actor = f"oidc:{subject}"
    if len(actor) <= ACTOR_LENGTH and subject.isprintable():
        return actor
    return f"oidc:sha256:{hashlib.sha256(subject.encode()).hexdigest()}"[:ACTOR_LENGTH]
