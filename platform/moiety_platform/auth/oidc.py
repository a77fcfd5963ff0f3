"""Authentication of administrators by tokens of an OpenID Connect issuer instead of a key.

A token is valid if one of the issuer's published keys signed it with an asymmetric algorithm, and its audience and
times match. Its claims contain the role, and the tenant where the role belongs to one. Fails closed: while the issuer
is down, tokens signed with an unknown key get 503.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import jwt
import structlog

from moiety_platform.access.caller import MISSING_ROLE, Caller
from moiety_platform.access.roles import Role, tenant_complaint
from moiety_platform.audit.models import ACTOR_LENGTH
from moiety_platform.clock import Clock
from moiety_platform.db.session import Database
from moiety_platform.errors import Forbidden, Unauthenticated, Unavailable
from moiety_platform.tenants.checks import is_id
from moiety_platform.tenants.models import Tenant, TenantStatus

FETCH_TIMEOUT_S = 5.0
REFETCH_S = 30.0  # shortest interval between fetches of the keys, however many unknown keys tokens name
MAX_AGE_S = 600.0  # longest interval while tokens arrive, so that a withdrawn key stops working
LEEWAY_S = 30.0
MAX_TOKEN_LENGTH = 16_384
MAX_KEYS = 100
ALGORITHMS = (
    *("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    *("ES256", "ES384", "ES512", "EdDSA"),
)
TENANT_UNKNOWN = "tenant_unknown"

FETCH_ERRORS = (httpx.HTTPError, httpx.InvalidURL, TimeoutError, ValueError, KeyError, TypeError)

log = structlog.get_logger(__name__)


class OtherIssuer(ValueError):
    """The issuer's own name differs from the one in the settings, so none of its tokens would be valid."""


@dataclass(frozen=True, slots=True)
class OidcTerms:
    """Issuer and audience of accepted tokens, and the claims that contain the role and the tenant's id.

    Dots separate the names of nested claims.
    """

    issuer: str
    audience: str
    roles_claim: str
    tenant_claim: str


class OidcVerifier:
    """Verifier of tokens. Caches the issuer's keys; the caller closes `http`."""

    def __init__(self, terms: OidcTerms, database: Database, http: httpx.AsyncClient, clock: Clock) -> None:
        self._terms = terms
        self._database = database
        self._http = http
        self._clock = clock
        self._keys: dict[str, jwt.PyJWK] = {}
        self._fetched_s = float("-inf")
        self._failed = False
        self._fetching = asyncio.Lock()

    async def authenticate(self, token: str) -> Caller:
        """Return the caller of a token.

        Raises Unauthenticated, Forbidden (no known role, or not for this tenant), or Unavailable.
        """
        claims = await self._verify(token)
        role = self._role(claims)
        tenant_id = _claim(claims, self._terms.tenant_claim)
        if tenant_id is not None and not (isinstance(tenant_id, str) and is_id(tenant_id)):
            raise Forbidden(
                f"The token's claim '{self._terms.tenant_claim}' is not the id of a tenant.", code=TENANT_UNKNOWN
            )
        if complaint := tenant_complaint(role, tenant_id):
            raise Forbidden(
                f"{complaint} The token's claim '{self._terms.tenant_claim}' names the tenant.", code=MISSING_ROLE
            )
        if tenant_id is not None:
            await self._check_tenant(tenant_id)
        return Caller(_actor(claims["sub"]), role, tenant_id)

    async def _verify(self, token: str) -> dict[str, Any]:
        if len(token) > MAX_TOKEN_LENGTH:
            raise _bad("it is too long")
        try:
            header = jwt.get_unverified_header(token)
            key = await self._key(header.get("kid"))
            if header.get("alg") != key.algorithm_name or key.algorithm_name not in ALGORITHMS:
                raise _bad("its algorithm is not that of the issuer's key")
            claims: dict[str, Any] = jwt.decode(
                token,
                key=key,
                algorithms=[key.algorithm_name],
                audience=self._terms.audience,
                issuer=self._terms.issuer,
                leeway=LEEWAY_S,
                options={"require": ["exp", "iss", "aud", "sub"]},
            )
        except jwt.ExpiredSignatureError as exc:
            raise Unauthenticated(
                "This token has expired; get a new one from its issuer.", code="token_expired"
            ) from exc
        except jwt.PyJWTError as exc:
            raise _bad(str(exc)) from exc
        except RecursionError as exc:  # a header that consists only of brackets
            raise _bad("it is nested too deeply") from exc
        return claims

    async def _key(self, key_id: object) -> jwt.PyJWK:
        """Return the issuer's key with that id; fetch the keys if it is unknown.

        Raises Unauthenticated or Unavailable.
        """
        if not isinstance(key_id, str):
            raise _bad("it names no key ('kid')")
        if self._is_due(key_id):
            async with self._fetching:
                if self._is_due(key_id):
                    await self._fetch()
        if key_id in self._keys:
            return self._keys[key_id]
        if self._failed:
            raise Unavailable(
                "The keys of the token's issuer cannot be read right now; try again shortly.",
                code="issuer_unavailable",
                retry_after_s=REFETCH_S,
            )
        raise _bad("its issuer has no such key")

    def _is_due(self, key_id: str) -> bool:
        age_s = self._clock.monotonic() - self._fetched_s
        return age_s >= (MAX_AGE_S if key_id in self._keys else REFETCH_S)

    async def _fetch(self) -> None:
        """Fetch the issuer's keys; if that fails, the known keys stay valid."""
        try:
            async with asyncio.timeout(FETCH_TIMEOUT_S):
                self._keys = await read_keys(self._http, self._terms.issuer)
        except FETCH_ERRORS as exc:
            self._failed = True
            log.warning(
                "oidc_issuer_unreachable",
                issuer=self._terms.issuer,
                reason=f"{type(exc).__name__}: {exc}"[:300],
                advice="restore the connection to the issuer; tokens are verified with its last keys meanwhile",
            )
        else:
            self._failed = False
        finally:  # not earlier: callers that arrive meanwhile wait for this fetch
            self._fetched_s = self._clock.monotonic()

    def _role(self, claims: Mapping[str, Any]) -> Role:
        """Return the role with the most rights among the token's known roles. Raises Forbidden."""
        given = _claim(claims, self._terms.roles_claim)
        names = given if isinstance(given, list) else [given]
        for role in Role:
            if role.value in names:
                return role
        raise Forbidden(
            f"The token's claim '{self._terms.roles_claim}' has none of the roles {', '.join(Role)}; ask the "
            "administrator of its issuer for one.",
            code=MISSING_ROLE,
        )

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


async def read_keys(http: httpx.AsyncClient, issuer: str) -> dict[str, jwt.PyJWK]:
    """Return the issuer's published keys that can check signatures, by id. Raises one of FETCH_ERRORS."""
    found = await _get(http, f"{issuer.rstrip('/')}/.well-known/openid-configuration")
    if found.get("issuer") != issuer:
        raise OtherIssuer(f"its metadata names the issuer {found.get('issuer')!r}")
    location = str(found["jwks_uri"])
    if issuer.startswith("https:") and not location.startswith("https:"):
        raise ValueError("its jwks_uri is not an https:// URL")
    return dict(_usable((await _get(http, location))["keys"]))


async def _get(http: httpx.AsyncClient, url: str) -> dict[str, Any]:
    response = await http.get(url)
    response.raise_for_status()
    document = response.json()
    if not isinstance(document, dict):
        raise TypeError(f"{url} is not a JSON object")
    return document


def _usable(published: list[dict[str, Any]]) -> list[tuple[str, jwt.PyJWK]]:
    """Return the published keys that can check signatures, with their ids; others are ignored."""
    usable = []
    for fields in published[:MAX_KEYS]:
        try:
            key = jwt.PyJWK.from_dict(fields)
        except (jwt.PyJWTError, TypeError, ValueError):
            continue
        if key.key_id and key.algorithm_name in ALGORITHMS and fields.get("use", "sig") == "sig":
            usable.append((str(key.key_id), key))
    return usable


def _claim(claims: Mapping[str, Any], name: str) -> Any:
    """Return the claim of that name, or the nested claim where the dots separate names; None if there is none."""
    if name in claims:
        return claims[name]
    found: Any = claims
    for part in name.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _actor(subject: str) -> str:
    """Return the token subject's name in the audit log: `oidc:…`, hashed if it is too long."""
    actor = f"oidc:{subject}"
    if len(actor) <= ACTOR_LENGTH and subject.isprintable():
        return actor
    return f"oidc:sha256:{hashlib.sha256(subject.encode()).hexdigest()}"[:ACTOR_LENGTH]


def _bad(why: str) -> Unauthenticated:
    return Unauthenticated(f"This token is not accepted: {why}. Get another one from its issuer.", code="invalid_token")
