"""Authentication of clients by JWTs of trusted issuers, each of which acts as the key of the grant that it matches.

The libraries that verify tokens are imported at the first token, so a gateway without issuers does not load them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, Self

from moiety_platform.auth.principal import Principal
from moiety_platform.clock import Clock
from moiety_platform.db.session import Database
from moiety_platform.db.snapshot import Snapshot
from moiety_platform.errors import Unauthenticated
from moiety_platform.jwt_issuers.service import load_issuers
from moiety_platform.jwt_issuers.terms import JwtIssuer, claim_values
from moiety_platform.usage.attribution import stored_end_user
from moiety_platform.webhooks.addresses import AddressPolicy

if TYPE_CHECKING:
    from moiety_platform.auth.verified_tokens import VerifiedTokens
    from moiety_platform.jwt_issuers.jwt_keys import JwtKeys

UNKNOWN_ISSUER, NO_GRANT = "unknown_issuer", "no_matching_grant"
MAX_SHOWN_CHARS = 200


class KeyHolders(Protocol):
    """Look-up of the holders of keys."""

    async def principal_of(self, key_id: str) -> Principal:
        """Return the holder of a key. Raises Unauthenticated, Forbidden or Unavailable."""
        ...


class JwtAuthenticator:
    """Authentication of JWTs in one gateway process. Owned by the entry point, which closes it."""

    def __init__(self, database: Database, clock: Clock, holders: KeyHolders, reach: AddressPolicy) -> None:
        self._clock = clock
        self._holders = holders
        self._reach = reach
        self._issuers = Snapshot("token issuers", load_issuers, database, clock)
        self._keys: JwtKeys | None = None
        self._verified: VerifiedTokens | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._keys is not None:
            await self._keys.close()

    def forget(self) -> None:
        """Read the issuers again before the next token is accepted."""
        self._issuers.forget()

    async def authenticate(self, token: str) -> Principal:
        """Return the holder of the key as which a token acts.

        Fails closed. Raises Unauthenticated (the token is not valid, or no issuer or grant matches it), Forbidden (the
        tenant is suspended), or Unavailable: the issuer's keys cannot be read, and the last ones do not have the
        token's key or have expired, or the database was never read.
        """
        from moiety_platform.auth.jwt_verification import (  # noqa: PLC0415  slow to import, and few gateways need it
            unverified_claims,
        )

        issuers = await self._issuers.current()
        keys, verified = self._keys_of_issuers(), self._verified_tokens()
        issuer = _issuer_of(issuers.by_url, verified.claims_of(token) or unverified_claims(token))
        keys.keep(one for named in issuers.by_url.values() for one in named)
        find_key = keys.of(issuer).find
        claims = await verified.verify(token, find_key, issuer=issuer.url, audience=issuer.audience)
        if (name := issuer.missing_claim(claims)) is not None:
            raise Unauthenticated(
                f"The token lacks the claim {name!r} with the value {issuer.required_claims[name]!r}, which the issuer "
                f"{issuer.name!r} requires here. Get a token that has it, or ask the operator to change the issuer.",
                code=NO_GRANT,
            )
        grant = issuer.grant_of(claims)
        if grant is None:
            shown = ", ".join(claim_values(claims, issuer.claim or ""))[:MAX_SHOWN_CHARS]
            raise Unauthenticated(
                f"No tenant is set for tokens of the issuer {issuer.name!r} whose claim {issuer.claim!r} is {shown!r}. "
                "Ask the operator to add a grant for it with 'moiety issuer set'.",
                code=NO_GRANT,
            )
        principal = await self._holders.principal_of(grant.key_id)
        return replace(
            principal,
            service_class=issuers.worse_class(principal.service_class, issuer.service_class),
            end_user=_end_user(issuer, claims),
        )

    async def limit_class(self, principal: Principal) -> Principal:
        """Return the holder of a key with at most the class of the issuer whose grant has the key, for deferred work.

        Keys that no grant has stay as they are. Raises Unavailable.
        """
        issuers = await self._issuers.current()
        best = issuers.key_classes.get(principal.key_id)
        if best is None:
            return principal
        return replace(principal, service_class=issuers.worse_class(principal.service_class, best))

    def _keys_of_issuers(self) -> JwtKeys:
        if self._keys is None:
            from moiety_platform.jwt_issuers.jwt_keys import JwtKeys  # noqa: PLC0415  slow to import

            self._keys = JwtKeys(self._reach, self._clock)
        return self._keys

    def _verified_tokens(self) -> VerifiedTokens:
        if self._verified is None:
            from moiety_platform.auth.verified_tokens import VerifiedTokens  # noqa: PLC0415  slow to import

            self._verified = VerifiedTokens(self._clock)
        return self._verified


def _issuer_of(by_url: Mapping[str, Any], claims: Mapping[str, Any]) -> JwtIssuer:
    """Return the issuer that a token names, and whose audience it has. Raises Unauthenticated."""
    url, audience = claims.get("iss"), claims.get("aud")
    named = by_url.get(url, ()) if isinstance(url, str) else ()
    audiences = audience if isinstance(audience, list) else [audience]
    for issuer in named:
        if issuer.audience in audiences:
            found: JwtIssuer = issuer
            return found
    if named:
        wanted = " or ".join(repr(issuer.audience) for issuer in named)
        raise Unauthenticated(
            f"This token is for another audience: its 'aud' must contain {wanted}. Get a token for it from its issuer.",
            code="invalid_token",
        )
    shown = f" {url[:MAX_SHOWN_CHARS]!r}" if isinstance(url, str) and url.isprintable() else ""
    raise Unauthenticated(
        f"Tokens of the issuer{shown} are not accepted here. Send an API key, or ask the operator to trust the issuer "
        "with 'moiety issuer set'.",
        code=UNKNOWN_ISSUER,
    )


def _end_user(issuer: JwtIssuer, claims: Mapping[str, Any]) -> str | None:
    """Return the end user as usage rows store it. Raises Unauthenticated for a token without the issuer's claim."""
    if issuer.end_user_claim is None:
        return None
    values = claim_values(claims, issuer.end_user_claim)
    if not values or not values[0]:
        raise Unauthenticated(
            f"The token lacks the claim {issuer.end_user_claim!r}, by which the issuer {issuer.name!r} names the end "
            "user. Get a token that has it, or ask the operator to set another 'end_user_claim'.",
            code="invalid_token",
        )
    return stored_end_user(values[0])
