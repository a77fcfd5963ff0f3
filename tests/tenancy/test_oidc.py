"""OpenID Connect tokens of a loopback issuer: valid ones are accepted with their role, invalid ones refused."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from pydantic import ValidationError

from moiety_platform.access.roles import Role
from moiety_platform.auth.oidc import MAX_AGE_S, REFETCH_S, OidcTerms, OidcVerifier
from moiety_platform.bootstrap.oidc_authentication import OidcAuthentication
from moiety_platform.clock import ManualClock
from moiety_platform.db.session import Database
from moiety_platform.errors import Forbidden, Unauthenticated
from moiety_platform.live_settings import LiveSettings
from moiety_platform.settings import GatewaySettings
from moiety_platform.tenants.schemas import NewTenant, TenantChange
from moiety_platform.tenants.service import change_tenant, create_tenant

from .conftest import Demo, admin_app, listening

AUDIENCE = "moiety"
RSA = rsa.generate_private_key(public_exponent=65537, key_size=2048)
OTHER_RSA = rsa.generate_private_key(public_exponent=65537, key_size=2048)
EC = ec.generate_private_key(ec.SECP256R1())


class Issuer:
    """Publishes its keys over HTTP, and counts how often it is asked for them. `away` drops every connection."""

    def __init__(self) -> None:
        self.url = ""
        self.away = False
        self.num_fetches = 0
        self.calls_itself: str | None = None
        self.keys: list[dict[str, Any]] = [
            {**jwt.algorithms.RSAAlgorithm.to_jwk(RSA.public_key(), as_dict=True), "kid": "rsa", "alg": "RS256"},
            {**jwt.algorithms.ECAlgorithm.to_jwk(EC.public_key(), as_dict=True), "kid": "ec"},
            {"kty": "oct", "kid": "shared", "k": base64.urlsafe_b64encode(b"s" * 32).decode()},
            {"kty": "strange", "kid": "strange"},
        ]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readuntil(b"\r\n\r\n")).split(b" ")[1]
        if not self.away:
            if path == b"/keys":
                self.num_fetches += 1
            found: dict[str, Any] = {"issuer": self.calls_itself or self.url, "jwks_uri": f"{self.url}/keys"}
            body = json.dumps({"keys": self.keys} if path == b"/keys" else found).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (len(body), body))
            await writer.drain()
        writer.close()

    def token(self, key: Any = RSA, algorithm: str = "RS256", key_id: str | None = "rsa", **claims: Any) -> str:
        now = int(time.time())  # of the library's own clock
        usual: dict[str, Any] = {
            "iss": self.url,
            "aud": AUDIENCE,
            "sub": "ada",
            "exp": now + 300,
            "moiety_roles": ["viewer"],
        }
        whole = {name: value for name, value in {**usual, **claims}.items() if value is not None}
        headers = {} if key_id is None else {"kid": key_id}
        return jwt.encode(whole, key, algorithm, headers=headers)


@pytest.fixture
async def issuer() -> AsyncIterator[Issuer]:
    started = Issuer()
    async with listening(started.serve) as started.url:
        yield started


@pytest.fixture
def dialect() -> str:
    return "sqlite"


@pytest.fixture
async def gateway(issuer: Issuer, database: Database, clock: ManualClock) -> AsyncIterator[Any]:
    """`await gateway(token, path)`: what the admin API answers."""
    async with httpx.AsyncClient() as http:
        oidc = OidcVerifier(OidcTerms(issuer.url, AUDIENCE, "moiety_roles", "moiety_tenant"), database, http, clock)
        transport = httpx.ASGITransport(app=admin_app(database, clock, oidc=lambda: oidc))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway/admin/v1/") as client:

            async def call(token: str, path: str = "tenants", **body: Any) -> httpx.Response:
                headers: dict[str, Any] = {"Authorization": f"Bearer {token}".encode()}
                return await client.request("POST" if body else "GET", path, headers=headers, json=body or None)

            yield call


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


async def test_a_token_gets_in_with_its_role_and_the_log_names_its_subject(issuer: Issuer, gateway: Any) -> None:
    for signed in ({}, {"key": EC, "algorithm": "ES256", "key_id": "ec"}):
        assert (await gateway(issuer.token(**signed))).status_code == 200
        assert code(await gateway(issuer.token(**signed), name="new")) == (403, "missing_role")
    made = await gateway(issuer.token(moiety_roles="operator"), name="new")
    assert made.status_code == 201
    (entry,) = (await gateway(issuer.token(moiety_roles=["staff", "viewer", "owner"]), "audit")).json()["data"]
    assert (entry["actor"], entry["actor_role"], entry["object_id"]) == ("oidc:ada", "operator", made.json()["id"])
    assert issuer.num_fetches == 1


async def test_a_token_for_one_tenant_reaches_that_tenant(
    issuer: Issuer, gateway: Any, database: Database, clock: ManualClock
) -> None:
    async with database.write() as session:
        a, b = [await create_tenant(session, NewTenant(name=name), clock.now()) for name in "ab"]
    token = issuer.token(moiety_roles=["tenant-admin"], moiety_tenant=a.id)
    assert [one["id"] for one in (await gateway(token)).json()["data"]] == [a.id]
    assert (await gateway(token, f"tenants/{b.id}")).status_code == 404
    assert (await gateway(token, "projects", name="p", tenant_id=a.id)).status_code == 201
    assert code(await gateway(token, "keys", name="k", role="owner")) == (403, "missing_role")
    async with database.write() as session:
        await change_tenant(session, a.id, TenantChange(status="suspended"))
    assert code(await gateway(token)) == (403, "tenant_suspended")
    for roles, tenant, expected in (
        ("tenant-admin", None, "missing_role"),
        ("owner", b.id, "missing_role"),
        ("viewer", "ten_unknown", "tenant_unknown"),
        ("viewer", ["x"], "tenant_unknown"),
        ("king", None, "missing_role"),
        (None, None, "missing_role"),
    ):
        refused = await gateway(issuer.token(moiety_roles=roles, moiety_tenant=tenant))
        assert code(refused) == (403, expected), (roles, tenant)


async def test_invalid_tokens_are_refused(issuer: Issuer, gateway: Any, demo: Demo) -> None:
    now = int(time.time())
    good = issuer.token()
    head, claims, signature = good.split(".")
    wrong: dict[str, Any] = {
        "issuer": issuer.token(iss="http://127.0.0.1:1"),
        "audience": issuer.token(aud="other"),
        "no audience": issuer.token(aud=None),
        "no end": issuer.token(exp=None),
        "no subject": issuer.token(sub=None),
        "not yet": issuer.token(nbf=now + 300),
        "another's signature": issuer.token(OTHER_RSA),
        "another key's id": issuer.token(EC, "ES256", "rsa"),
        "the key's other algorithm": issuer.token(RSA, "RS512"),
        "a shared secret": issuer.token(b"s" * 32, "HS256", "shared"),
        "unsigned": issuer.token(None, "none"),
        "no key": issuer.token(key_id=None),
        "a key that is not a signing one": issuer.token(key_id="strange"),
        "changed claims": f"{head}.{claims[:-4]}AAAA.{signature}",
        "no token": "x.y.z",
        "nothing": "",
        "long": "x" * 20_000,
        "brackets": base64.urlsafe_b64encode(b"[" * 12_000).decode().rstrip("=") + ".e30.c2ln",
        "other letters": "é.é.é",
    }
    for what, token in wrong.items():
        assert code(await gateway(token)) == (401, "invalid_token"), what
    assert code(await gateway(issuer.token(exp=now - 60))) == (401, "token_expired")
    assert (await gateway(good)).status_code == 200
    assert (await gateway(demo.admin_key)).status_code == 200  # keys count beside tokens
    assert code(await gateway(demo.key)) == (403, "missing_scope")


async def test_unknown_keys_are_asked_for_at_a_bounded_rate_and_withdrawn_ones_stop_to_count(
    issuer: Issuer, gateway: Any, clock: ManualClock
) -> None:
    new: dict[str, Any] = {**jwt.algorithms.RSAAlgorithm.to_jwk(OTHER_RSA.public_key(), as_dict=True), "kid": "new"}
    for number in range(20):
        assert code(await gateway(issuer.token(key_id=f"made-up-{number}")))[0] == 401
    assert issuer.num_fetches == 1
    issuer.keys = [*issuer.keys, new]
    clock.advance(REFETCH_S)
    answers = await asyncio.gather(*(gateway(issuer.token(OTHER_RSA, key_id="new")) for _ in range(5)))
    assert {answer.status_code for answer in answers} == {200}
    assert issuer.num_fetches == 2
    issuer.keys = [new]
    assert (await gateway(issuer.token())).status_code == 200
    clock.advance(MAX_AGE_S)
    assert code(await gateway(issuer.token())) == (401, "invalid_token")


async def test_while_the_issuer_is_away_known_keys_count_and_others_get_503(
    issuer: Issuer, gateway: Any, clock: ManualClock
) -> None:
    issuer.away = True
    refused = await gateway(issuer.token())
    assert code(refused) == (503, "issuer_unavailable")
    assert "retry-after" in refused.headers
    issuer.away = False
    issuer.calls_itself = "http://somebody.else"
    clock.advance(REFETCH_S)
    assert code(await gateway(issuer.token())) == (503, "issuer_unavailable")
    issuer.calls_itself = None
    clock.advance(REFETCH_S)
    assert (await gateway(issuer.token())).status_code == 200
    issuer.away = True
    clock.advance(MAX_AGE_S)
    assert (await gateway(issuer.token())).status_code == 200


@pytest.mark.parametrize(
    "given",
    [
        {"oidc_issuer": "http://idp.example", "oidc_audience": "a"},
        {"oidc_issuer": "https://idp.example"},
        {"oidc_audience": "a"},
    ],
    ids=["not https", "no audience", "no issuer"],
)
def test_settings_that_cannot_be_right_are_refused(given: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match="issuer"):
        GatewaySettings(**given)


async def test_reload_applies_oidc_settings(issuer: Issuer, database: Database, clock: ManualClock) -> None:
    live = LiveSettings(GatewaySettings())
    async with OidcAuthentication(live.now, database, clock) as authentication:
        authentication.followed_by(live)
        assert authentication.find() is None
        given: dict[str, Any] = {"oidc_issuer": issuer.url, "oidc_audience": AUDIENCE}
        others: dict[str, Any] = {"aud": "others", "roles": ["owner"], "tenant": "ten_a"}
        await live.change(GatewaySettings(**given))
        first = authentication.find()
        assert first is not None
        assert (await first.authenticate(issuer.token())).role is Role.VIEWER
        with pytest.raises(Unauthenticated):
            await first.authenticate(issuer.token(**others))
        await live.change(GatewaySettings(**given | {"oidc_audience": "others", "oidc_roles_claim": "roles"}))
        second = authentication.find()
        assert second is not None
        assert (await second.authenticate(issuer.token(**others))).role is Role.OWNER
        assert (await first.authenticate(issuer.token())).role is Role.VIEWER, "what has begun goes on"
        claims: dict[str, Any] = {"oidc_roles_claim": "moiety_roles", "oidc_tenant_claim": "tenant"}
        await live.change(GatewaySettings(**given | claims))
        third = authentication.find()
        assert third is not None
        with pytest.raises(Forbidden):
            await third.authenticate(issuer.token(tenant="no tenant's id"))
        await live.change(GatewaySettings(oidc_issuer="https://other.example.com", oidc_audience=AUDIENCE))
        fourth = authentication.find()
        assert fourth is not None and fourth is not third
        await live.change(GatewaySettings())
        assert authentication.find() is None
