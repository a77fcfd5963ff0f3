"""Public keys of the trusted issuers of JWTs, from the addresses that the policy of webhooks permits."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import httpx

from moiety_platform.auth.issuer_documents import HEADERS, read_published_keys, receive_document
from moiety_platform.auth.jwt_verification import FETCH_TIMEOUT_S, IssuerKeys, PublicKeys, usable_keys
from moiety_platform.clock import Clock
from moiety_platform.jwt_issuers.terms import JwtIssuer
from moiety_platform.webhooks.addresses import AddressPolicy, CannotReach
from moiety_platform.webhooks.guarded_http import guarded_client, guarded_request

VALID_S = 3600.0  # time for which the last keys are used while their issuer cannot be reached


class _Source(NamedTuple):
    """Place of an issuer's keys; issuers with the same one share a cache."""

    url: str
    jwks_url: str | None
    jwks: str | None


class JwtKeys:
    """Keys of all issuers in one gateway process, read when a token needs them. Closed by its owner."""

    def __init__(self, reach: AddressPolicy, clock: Clock) -> None:
        self._reach = reach
        self._clock = clock
        self._http = guarded_client(FETCH_TIMEOUT_S)
        self._keys: dict[_Source, IssuerKeys] = {}

    async def close(self) -> None:
        for keys in self._keys.values():
            await keys.close()
        await self._http.aclose()

    def keep(self, issuers: Iterable[JwtIssuer]) -> None:
        """Forget the keys of all other issuers."""
        kept = {_source_of(issuer) for issuer in issuers}
        if self._keys.keys() - kept:
            self._keys = {source: keys for source, keys in self._keys.items() if source in kept}

    def of(self, issuer: JwtIssuer) -> IssuerKeys:
        """Return the keys of an issuer."""
        source = _source_of(issuer)
        keys = self._keys.get(source)
        if keys is None:
            fetch = partial(self._read, source)
            valid_s = VALID_S if source.jwks is None else float("inf")
            keys = self._keys[source] = IssuerKeys(issuer.url, fetch, self._clock, valid_s=valid_s)
        return keys

    async def _read(self, source: _Source) -> PublicKeys:
        """Return the keys of a source. Raises one of FETCH_ERRORS."""
        if source.jwks is not None:
            return usable_keys(json.loads(source.jwks))
        return await read_published_keys(self._get, source.url, source.jwks_url)

    async def _get(self, url: str) -> dict[str, Any]:
        try:
            request = await guarded_request(self._http, self._reach, "GET", httpx.URL(url), HEADERS)
        except CannotReach as exc:
            raise ValueError(f"{url} cannot be reached: {exc.code}") from exc
        return await receive_document(self._http, request, url)


def _source_of(issuer: JwtIssuer) -> _Source:
    return _Source(issuer.url, issuer.jwks_url, issuer.jwks)
