"""Documents that an issuer of tokens publishes: its metadata (OpenID Connect Discovery 1.0) and its keys (RFC 7517).

Both are limited in size. Opens no connections itself.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from moiety_platform.auth.jwt_verification import PublicKeys, usable_keys

MAX_DOCUMENT_BYTES = 256 * 1024
HEADERS = {"Accept": "application/json", "Accept-Encoding": "identity"}


class OtherIssuer(ValueError):
    """The issuer's own name differs from the expected one, so none of its tokens would be valid."""


async def read_published_keys(
    read: Callable[[str], Awaitable[dict[str, Any]]], issuer: str, jwks_url: str | None = None
) -> PublicKeys:
    """Return the keys that can check signatures, by id. `read` returns the document of a URL.

    Without `jwks_url`, the issuer's metadata names it. Raises one of FETCH_ERRORS.
    """
    if jwks_url is None:
        found = await read(f"{issuer.rstrip('/')}/.well-known/openid-configuration")
        if found.get("issuer") != issuer:
            raise OtherIssuer(f"its metadata names the issuer {found.get('issuer')!r}")
        jwks_url = str(found["jwks_uri"])
        if issuer.startswith("https:") and not jwks_url.startswith("https:"):
            raise ValueError("its jwks_uri is not an https:// URL")
    return usable_keys(await read(jwks_url))


async def receive_document(http: httpx.AsyncClient, request: httpx.Request, url: str) -> dict[str, Any]:
    """Send a request and return the JSON object of its response, which ends at MAX_DOCUMENT_BYTES.

    Raises one of FETCH_ERRORS.
    """
    response = await http.send(request, stream=True)
    try:
        response.raise_for_status()
        encoding = response.headers.get("Content-Encoding", "identity")
        if encoding.lower() != "identity":
            raise ValueError(f"{url} is encoded as {encoding[:40]!r}, which the request does not accept")
        data = bytearray()
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
