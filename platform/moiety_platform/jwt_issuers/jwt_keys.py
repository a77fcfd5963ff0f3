"""Public keys of the trusted issuers of JWTs, from the addresses that the policy of webhooks permits."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import httpx

from moiety_platform.auth.jwt_verification import FETCH_TIMEOUT_S, IssuerKeys, PublicKeys, usable_keys
from moiety_platform.clock import Clock
from moiety_platform.jwt_issuers.terms import JwtIssuer
from moiety_platform.webhooks.addresses import AddressPolicy, CannotReach
from moiety_platform.webhooks.guarded_http import guarded_client, guarded_request

VALID_S = 3600.0  # time for which the last keys are used while their issuer cannot be reached
MAX_DOCUMENT_BYTES = 256 * 1024


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
        location = source.jwks_url
        if location is None:
            found = await self._get(f"{source.url.rstrip('/')}/.well-known/openid-configuration")
            if found.get("issuer") != source.url:
                raise ValueError(f"its metadata names the issuer {found.get('issuer')!r}")
            location = str(found["jwks_uri"])
            if source.url.startswith("https:") and not location.startswith("https:"):
                raise ValueError("its jwks_uri is not an https:// URL")
        return usable_keys(await self._get(location))

    async def _get(self, url: str) -> dict[str, Any]:
        headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        try:
            request = await guarded_request(self._http, self._reach, "GET", httpx.URL(url), headers)
        except CannotReach as exc:
            raise ValueError(f"{url} cannot be reached: {exc.code}") from exc
        response = await self._http.send(request, stream=True)
        try:
            response.raise_for_status()
            encoding = response.headers.get("Content-Encoding", "identity")
            if encoding.lower() != "identity":
                raise ValueError(f"{url} is encoded as {encoding[:40]!r}, which the request does not accept")
            data = b""
            async for part in response.aiter_raw():  # not decompressed
                data += part
                if len(data) > MAX_DOCUMENT_BYTES:
                    raise ValueError(f"{url} has more than {MAX_DOCUMENT_BYTES} bytes")
        finally:
            await response.aclose()
        document = json.loads(data)
        if not isinstance(document, dict):
            raise TypeError(f"{url} is not a JSON object")
        return document


def _source_of(issuer: JwtIssuer) -> _Source:
    return _Source(issuer.url, issuer.jwks_url, issuer.jwks)
