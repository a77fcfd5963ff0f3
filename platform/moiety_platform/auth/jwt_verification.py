"""Verification of JWTs by the public keys of their issuer, which are fetched when a token needs them.

Only asymmetric algorithms are accepted, and of each key only its own, so that neither an unsigned token nor one that is
signed with the public key as a shared secret is valid. Without SQL.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

import httpx
import jwt
import structlog
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

from moiety_platform.clock import Clock
from moiety_platform.errors import Unauthenticated, Unavailable

FETCH_TIMEOUT_S = 5.0
REFETCH_S = 30.0  # shortest interval between fetches of the keys, however many unknown keys tokens name
MAX_AGE_S = 600.0  # longest interval while tokens arrive, so that a withdrawn key stops working
LEEWAY_S = 30.0
MAX_TOKEN_LENGTH = 16_384
MAX_KEYS = 100
MIN_RSA_BITS = 2048
ALGORITHMS = (
    *("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    *("ES256", "ES384", "ES512", "EdDSA"),
)

FETCH_ERRORS = (
    *(httpx.HTTPError, httpx.InvalidURL, TimeoutError, ValueError, KeyError, TypeError),
    RecursionError,  # of a document that is nested too deeply
)

PublicKeys = dict[str, jwt.PyJWK]
FindKey = Callable[[object], Awaitable[jwt.PyJWK]]

log = structlog.get_logger(__name__)


class IssuerKeys:
    """Public keys of one issuer, which `fetch` reads and raises one of FETCH_ERRORS.

    While the issuer cannot be reached, its last keys stay valid for `valid_s` seconds.
    """

    def __init__(
        self,
        issuer: str,
        fetch: Callable[[], Awaitable[PublicKeys]],
        clock: Clock,
        *,
        valid_s: float = float("inf"),
    ) -> None:
        self._issuer = issuer
        self._fetch_keys = fetch
        self._clock = clock
        self._valid_s = valid_s
        self._keys: PublicKeys = {}
        self._read_s = self._tried_s = float("-inf")
        self._failed = False
        self._fetching: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Stop a fetch under way."""
        if self._fetching is not None:
            self._fetching.cancel()
            await asyncio.wait({self._fetching})

    async def find(self, key_id: object) -> jwt.PyJWK:
        """Return the issuer's key with that id; fetch the keys if it is unknown, or they are old.

        Fails closed: raises Unauthenticated if the issuer has no such key, or Unavailable if it cannot be asked and
        its last keys do not have the key or have expired.
        """
        if not isinstance(key_id, str):
            raise invalid_token("it names no key ('kid')")
        if self._is_due(key_id):
            if self._fetching is None:
                self._fetching = asyncio.create_task(self._fetch(), name="issuer-keys")
            await asyncio.shield(self._fetching)  # shared by all callers: a client that disconnects must not end it
        key = self._valid_key(key_id)
        if key is not None:
            return key
        if self._failed:
            raise Unavailable(
                "The keys of the token's issuer cannot be read right now; try again shortly.",
                code="issuer_unavailable",
                retry_after_s=REFETCH_S,
            )
        raise invalid_token("its issuer has no such key")

    def _valid_key(self, key_id: str) -> jwt.PyJWK | None:
        return self._keys.get(key_id) if self._clock.monotonic() - self._read_s < self._valid_s else None

    def _is_due(self, key_id: str) -> bool:
        age_s = self._clock.monotonic() - self._tried_s
        return age_s >= (REFETCH_S if self._valid_key(key_id) is None else MAX_AGE_S)

    async def _fetch(self) -> None:
        """Fetch the keys; if that fails, the last ones stay valid for a while."""
        try:
            async with asyncio.timeout(FETCH_TIMEOUT_S):
                self._keys = await self._fetch_keys()
        except FETCH_ERRORS as exc:
            self._failed = True
            log.warning(
                "oidc_issuer_unreachable",
                issuer=self._issuer,
                reason=f"{type(exc).__name__}: {exc}"[:300],
                advice="restore the connection to the issuer; tokens are verified with its last keys meanwhile",
            )
        else:
            self._failed = False
            self._read_s = self._clock.monotonic()
        finally:  # not earlier: callers that arrive meanwhile wait for this fetch
            self._tried_s = self._clock.monotonic()
            self._fetching = None


class VerifiedToken(NamedTuple):
    """Claims of a valid token, and the key that verified it."""

    claims: dict[str, Any]
    key_id: object
    key: jwt.PyJWK


async def verify_token(token: str, find_key: FindKey, *, issuer: str, audience: str) -> VerifiedToken:
    """Verify the signature, the times, the issuer and the audience of a token.

    Raises Unauthenticated, or what `find_key` raises.
    """
    if len(token) > MAX_TOKEN_LENGTH:
        raise invalid_token("it is too long")
    try:
        header = jwt.get_unverified_header(token)
        if "crit" in header:
            raise invalid_token("it needs an extension ('crit') that is not supported")
        key_id = header.get("kid")
        key = await find_key(key_id)
        if header.get("alg") != key.algorithm_name or key.algorithm_name not in ALGORITHMS:
            raise invalid_token("its algorithm is not that of the issuer's key")
        claims: dict[str, Any] = jwt.decode(
            token,
            key=key,
            algorithms=[key.algorithm_name],
            audience=audience,
            issuer=issuer,
            leeway=LEEWAY_S,
            options={"require": ["exp", "iss", "aud", "sub"]},
        )
    except jwt.ExpiredSignatureError as exc:
        raise Unauthenticated("This token has expired; get a new one from its issuer.", code="token_expired") from exc
    except jwt.PyJWTError as exc:
        raise invalid_token(str(exc)) from exc
    except RecursionError as exc:  # a header that consists only of brackets
        raise invalid_token("it is nested too deeply") from exc
    return VerifiedToken(claims, key_id, key)


def unverified_claims(token: str) -> dict[str, Any]:
    """Return the claims of a token that nobody has verified, to find its issuer. Raises Unauthenticated."""
    if len(token) > MAX_TOKEN_LENGTH:
        raise invalid_token("it is too long")
    try:
        claims: dict[str, Any] = jwt.decode(token, options={"verify_signature": False})
    except jwt.PyJWTError as exc:
        raise invalid_token(str(exc)) from exc
    except RecursionError as exc:
        raise invalid_token("it is nested too deeply") from exc
    return claims


def usable_keys(document: Mapping[str, Any]) -> PublicKeys:
    """Return the keys of a JSON Web Key Set that can check signatures, by id; others are ignored.

    Raises one of FETCH_ERRORS if it is no key set.
    """
    published = document["keys"]
    if not isinstance(published, list):
        raise TypeError("'keys' is not a list")
    usable = {}
    for fields in published[:MAX_KEYS]:
        if not isinstance(fields, dict):
            continue
        try:
            key = jwt.PyJWK.from_dict(fields)
        except (jwt.PyJWTError, TypeError, ValueError):
            continue
        is_weak = isinstance(key.key, RSAPublicKey) and key.key.key_size < MIN_RSA_BITS
        if key.key_id and key.algorithm_name in ALGORITHMS and fields.get("use", "sig") == "sig" and not is_weak:
            usable[str(key.key_id)] = key
    return usable


def invalid_token(why: str) -> Unauthenticated:
    """Return the error of a token that is not accepted."""
    return Unauthenticated(f"This token is not accepted: {why}. Get another one from its issuer.", code="invalid_token")
