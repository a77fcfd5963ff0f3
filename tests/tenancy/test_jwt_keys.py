"""Reading of an issuer's keys: documents that are nested too deeply, compressed or too large are refused."""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import ip_network

import httpx
import pytest
from tests.token_issuer import AUDIENCE, TokenIssuer, started_issuer

from moiety_platform.auth.issuer_documents import MAX_DOCUMENT_BYTES
from moiety_platform.auth.oidc import OidcTerms, OidcVerifier, read_keys
from moiety_platform.clock import ManualClock
from moiety_platform.db.session import Database
from moiety_platform.errors import Unavailable
from moiety_platform.jwt_issuers.jwt_keys import JwtKeys
from moiety_platform.jwt_issuers.terms import JwtIssuer
from moiety_platform.webhooks.addresses import AddressPolicy


def trusted(url: str) -> JwtIssuer:
    return JwtIssuer(
        name="ci", url=url, audience=AUDIENCE, jwks_url=f"{url}/keys", jwks=None, claim=None, required_claims={},
        end_user_claim=None, service_class=None, grants=(),
    )  # fmt: skip


@pytest.fixture
async def issuer() -> AsyncIterator[TokenIssuer]:
    async with started_issuer() as started:
        yield started


@asynccontextmanager
async def opened_keys() -> AsyncIterator[JwtKeys]:
    keys = JwtKeys(AddressPolicy((ip_network("127.0.0.0/8"),)), ManualClock())
    try:
        yield keys
    finally:
        await keys.close()


class OpenedVerifier(OidcVerifier):
    """The verifier of administrators' tokens, and its client."""

    def __init__(self, issuer: TokenIssuer, database: Database, http: httpx.AsyncClient) -> None:
        self.http = http
        super().__init__(OidcTerms(issuer.url, AUDIENCE, "roles", "tenant"), database, http, ManualClock())


@asynccontextmanager
async def opened_verifier(issuer: TokenIssuer) -> AsyncIterator[OpenedVerifier]:
    database = Database.open("sqlite:///unused.db")  # never connects
    async with httpx.AsyncClient() as http:
        verifier = OpenedVerifier(issuer, database, http)
        try:
            yield verifier
        finally:
            await verifier.close()
            await database.close()


async def test_keys_are_requested_uncompressed(issuer: TokenIssuer) -> None:
    async with opened_keys() as keys:
        assert (await keys.of(trusted(issuer.url)).find("rsa")).key_id == "rsa"
    async with opened_verifier(issuer) as verifier:
        assert (await verifier.identify(issuer.token())).subject == "ada"
    assert len(issuer.request_heads) == 3
    assert all(b"accept-encoding: identity\r\n" in head.lower() for head in issuer.request_heads)


async def test_a_document_that_cannot_be_read_makes_the_issuer_unavailable(issuer: TokenIssuer) -> None:
    plain = json.dumps({"keys": issuer.keys}).encode()
    for document, headers in (
        (b'{"keys":' + b"[" * 100_000, b""),
        (gzip.compress(plain), b"Content-Encoding: gzip\r\n"),
        (gzip.compress(plain + b" " * 10**6), b"Content-Encoding: gzip\r\n"),
        (plain + b" " * MAX_DOCUMENT_BYTES, b""),
    ):
        issuer.key_document, issuer.key_headers = document, headers
        async with opened_keys() as keys, opened_verifier(issuer) as verifier:
            for reading in (keys.of(trusted(issuer.url)).find("rsa"), verifier.identify(issuer.token())):
                with pytest.raises(Unavailable) as refused:
                    await reading
                assert refused.value.code == "issuer_unavailable", document[:20]


async def test_a_large_metadata_document_makes_the_issuer_unavailable(issuer: TokenIssuer) -> None:
    issuer.calls_itself = issuer.url + "x" * MAX_DOCUMENT_BYTES
    async with opened_verifier(issuer) as verifier:
        with pytest.raises(Unavailable):
            await verifier.identify(issuer.token())
        with pytest.raises(ValueError, match=f"more than {MAX_DOCUMENT_BYTES} bytes"):
            await read_keys(verifier.http, issuer.url)
