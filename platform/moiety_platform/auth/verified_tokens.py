"""Cache of JWTs whose signatures were verified, so that a token that is sent again costs no further verification.

A cached result is a function of the token, the public key and the expected issuer and audience. All of these are
compared with the current ones at each use: a token is verified again after its issuer has changed the key, and a token
of an issuer that is no longer trusted never gets here. So no gateway needs to be told about changes. Without SQL.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jwt

from moiety_platform.auth.jwt_verification import FindKey, verify_token
from moiety_platform.clock import Clock

MAX_CACHED_TOKENS = 4096
MAX_CACHED_LENGTH = 4096  # longer tokens are verified at each use, so that the cache has at most 16 MiB of tokens


@dataclass(frozen=True, slots=True)
class _Verified:
    """Claims of a token, and what they were verified with."""

    claims: Mapping[str, Any]
    key_id: object
    key: jwt.PyJWK
    issuer: str
    audience: str
    expires_s: float  # Unix time


class VerifiedTokens:
    """Least recently used cache of one gateway process, by the SHA-256 digest of each token."""

    def __init__(self, clock: Clock, max_tokens: int = MAX_CACHED_TOKENS) -> None:
        self._clock = clock
        self._max_tokens = max_tokens
        self._verified: OrderedDict[bytes, _Verified] = OrderedDict()

    def __len__(self) -> int:
        return len(self._verified)

    def claims_of(self, token: str) -> Mapping[str, Any] | None:
        """Return the claims of a cached token, to find its issuer; they may be valid no longer."""
        cached = self._verified.get(_digest(token))
        return None if cached is None else cached.claims

    async def verify(self, token: str, find_key: FindKey, *, issuer: str, audience: str) -> Mapping[str, Any]:
        """Return the claims of a valid token. Raises Unauthenticated, or what `find_key` raises."""
        digest = _digest(token)
        cached = self._verified.get(digest)
        if cached is not None and self._is_current(cached, issuer, audience):
            key = await find_key(cached.key_id)  # fetches the keys if they are old
            if _is_same(key, cached.key):
                if digest in self._verified:
                    self._verified.move_to_end(digest)
                return cached.claims
        self._verified.pop(digest, None)
        verified = await verify_token(token, find_key, issuer=issuer, audience=audience)
        expires_s = float(verified.claims["exp"])
        entry = _Verified(verified.claims, verified.key_id, verified.key, issuer, audience, expires_s)
        if len(token) <= MAX_CACHED_LENGTH and self._is_current(entry, issuer, audience):
            self._verified[digest] = entry
            while len(self._verified) > self._max_tokens:
                self._verified.popitem(last=False)
        return verified.claims

    def _is_current(self, cached: _Verified, issuer: str, audience: str) -> bool:
        is_unexpired = self._clock.now().timestamp() < cached.expires_s
        return is_unexpired and cached.issuer == issuer and cached.audience == audience


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def _is_same(key: jwt.PyJWK, other: jwt.PyJWK) -> bool:
    return key is other or (key.algorithm_name == other.algorithm_name and bool(key.key == other.key))
