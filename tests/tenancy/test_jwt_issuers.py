"""JWTs of trusted issuers in the place of API keys: whose they are, what is refused, and the issuers' keys."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from pydantic import SecretStr
from sqlalchemy import func, select
from tests.token_issuer import AUDIENCE, EC, ED, OTHER_RSA, RSA, TokenIssuer

from moiety_platform.auth.authenticator import Authenticator
from moiety_platform.auth.jwt_verification import MAX_AGE_S, REFETCH_S
from moiety_platform.auth.principal import Principal
from moiety_platform.cli.doctor.peppers import check_pepper
from moiety_platform.clock import ManualClock
from moiety_platform.controllers import with_services
from moiety_platform.db.session import Database
from moiety_platform.db.snapshot import TTL_S
from moiety_platform.errors import Forbidden, PlatformError, Unauthenticated, Unavailable
from moiety_platform.jwt_issuers.admin_resource import parse_claims, parse_grants, read_jwks
from moiety_platform.jwt_issuers.controller import JwtIssuerController
from moiety_platform.jwt_issuers.jwt_authenticator import JwtAuthenticator
from moiety_platform.jwt_issuers.jwt_keys import VALID_S
from moiety_platform.jwt_issuers.models import JwtGrantRecord
from moiety_platform.jwt_issuers.terms import JwtIssuers, claim_values, find_claim
from moiety_platform.object_storage.store import ObjectStore
from moiety_platform.settings import GatewaySettings
from moiety_platform.tenant_deletion.controller import DeletionServices, TenantDeletionController
from moiety_platform.tenants.schemas import NewProject, NewTenant, TenantChange
from moiety_platform.tenants.service import change_tenant, create_project, create_tenant
from moiety_platform.webhooks.addresses import AddressPolicy

from .conftest import PEPPER, Admin, Demo, admin_app, listening


@dataclass
class Gateway:
    """The authentication of a gateway, and its admin API."""

    authenticator: Authenticator
    admin: Admin
    issuer: TokenIssuer
    reach: AddressPolicy

    async def trust(self, expect: int = 200, **fields: Any) -> Any:
        body = {"name": "ci", "url": self.issuer.url, "audience": AUDIENCE, "grants": [{"project": "acme/web"}]}
        return await self.admin.call("PUT", "issuers", expect, json={**body, **fields})

    async def principal(self, **claims: Any) -> Principal:
        return await self.authenticator.authenticate(f"Bearer {self.issuer.token(**claims)}")

    async def refusal(self, token: str) -> PlatformError:
        with pytest.raises(PlatformError) as refused:
            await self.authenticator.authenticate(f"Bearer {token}")
        return refused.value


@pytest.fixture
async def gateway(database: Database, objects: ObjectStore, clock: ManualClock, demo: Demo) -> AsyncIterator[Gateway]:
    issuer, reach = TokenIssuer(), AddressPolicy((ip_network("127.0.0.0/8"),))
    authenticator = Authenticator(database, PEPPER, clock)
    async with listening(issuer.serve) as issuer.url, JwtAuthenticator(database, clock, authenticator, reach) as jwts:
        authenticator.jwts = jwts
        deletion = with_services(TenantDeletionController, deletion=DeletionServices(objects))
        more = [with_services(JwtIssuerController, reach=reach), deletion]
        admin = Admin(admin_app(database, clock, authenticator=authenticator, more=more), demo.admin_key)
        async with admin.http:
            yield Gateway(authenticator, admin, issuer, reach)
        await authenticator.close()


async def test_a_token_acts_as_the_key_of_its_issuers_grant(gateway: Gateway, demo: Demo) -> None:
    made = await gateway.trust(models=["tiny"])
    for signed in (
        {},
        {"key": EC, "algorithm": "ES256", "key_id": "ec"},
        {"key": ED, "algorithm": "EdDSA", "key_id": "ed"},
    ):
        found = await gateway.principal(**signed)
        assert (found.tenant_id, found.project_id) == (demo.tenant_id, demo.project_id)
        assert [found.key_id] == [found.root_key_id] == made["key_ids"] != [demo.key_id]
        assert (found.end_user, found.role, found.scopes) == ("ada", None, {"inference"})
        assert found.allowed_models == {"tiny"}
    mine = await gateway.authenticator.authenticate(f"Bearer {demo.key}")
    assert (mine.key_id, mine.end_user) == (demo.key_id, None), "a key itself names no end user"
    assert found.cache_salt == mine.cache_salt
    key = await gateway.admin.call("GET", f"keys/{found.key_id}", 200)
    assert (key["name"], key["hint"], key["status"]) == ("jwt ci", "(jwt)", "active")


async def test_a_claim_selects_the_project_and_others_are_required(
    gateway: Gateway, database: Database, clock: ManualClock, demo: Demo
) -> None:
    async with database.write() as session:
        globex = await create_tenant(session, NewTenant(name="globex/eu"), clock.now())
        other = await create_project(session, NewProject(tenant_id=globex.id, name="a/b"), clock.now())
    grants = [
        {"claim_value": "acme", "project": "ACME/web"},
        {"claim_value": "globex", "project": "globex/eu/a/b", "models": ["large"]},
    ]
    made = await gateway.trust(
        claim="team.names", grants=grants, required_claims={"env": "prod"}, end_user_claim="mail", models=["tiny"]
    )
    assert [grant["project"] for grant in made["grants"]] == ["acme/web", "globex/eu/a/b"]
    first = await gateway.principal(team={"names": "acme"}, env="prod", mail="a@example.com")
    assert (first.project_id, first.end_user, first.allowed_models) == (demo.project_id, "a@example.com", {"tiny"})
    listed = await gateway.principal(team={"names": ["x", "globex"]}, env=["dev", "prod"], mail="x" * 300)
    assert (listed.tenant_id, listed.project_id, listed.allowed_models) == (globex.id, other.id, {"large"})
    assert listed.end_user is not None and listed.end_user.startswith("sha256:")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"team": {"names": "initech"}, "env": "prod", "mail": "m"}, "no_matching_grant"),
        ({"team": "acme", "env": "prod", "mail": "m"}, "no_matching_grant"),
        ({"team": {"names": "acme"}, "env": "dev", "mail": "m"}, "no_matching_grant"),
        ({"team": {"names": "acme"}, "mail": "m"}, "no_matching_grant"),
        ({"team": {"names": "acme"}, "env": "prod"}, "invalid_token"),
    ]
    for claims, code in cases:
        refused = await gateway.refusal(gateway.issuer.token(**claims))
        assert (refused.status, refused.code) == (401, code), claims
        assert "operator" in str(refused)


async def test_the_class_of_an_issuer_is_never_better_than_its_tenants(
    gateway: Gateway, database: Database, demo: Demo
) -> None:
    for tenants, issuers, expected in (
        ("standard", None, "standard"), ("standard", "batch", "batch"), ("standard", "priority", "standard"),
        ("priority", "standard", "standard"), ("batch", "standard", "batch"),
    ):  # fmt: skip
        async with database.write() as session:
            await change_tenant(session, demo.tenant_id, TenantChange(service_class=tenants))
        await gateway.trust(service_class=issuers)
        assert (await gateway.principal()).service_class == expected, (tenants, issuers)
    assert (await gateway.trust(400, service_class="gold"))["error"]["param"] == "service_class"


def test_a_class_whose_rank_is_not_known_yet_is_not_used_beyond_the_issuers() -> None:
    assert JwtIssuers({}, {"standard": 1}, {}).worse_class("new", "standard") == "standard"
    assert JwtIssuers({}, {"standard": 1}, {}).worse_class("new", None) == "new"


async def test_tokens_that_are_not_valid_are_refused(gateway: Gateway) -> None:
    await gateway.trust()
    issuer, now = gateway.issuer, int(time.time())
    good = issuer.token()
    head, claims, signature = good.split(".")
    public = RSA.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    confused = jwt.api_jws.PyJWS().encode(base64.urlsafe_b64decode(claims + "=="), b"s" * 32, "HS256", {"kid": "rsa"})
    wrong = {
        **issuer.invalid_tokens(),
        "another audience": issuer.token(aud=["a", "b"]),
        "the public key as a shared secret": hmac_signed(claims, public),
        "a shared secret under the id of a key": confused,
        "an unknown extension": jwt.encode(issuer.claims(), RSA, "RS256", {"kid": "rsa", "crit": ["exp"]}),
        "changed claims": f"{head}.{base64.urlsafe_b64encode(b'{}').decode().rstrip('=')}.{signature}",
        "long": f"{'x' * 20_000}.e30.e30",
    }
    for what, token in wrong.items():
        refused = await gateway.refusal(token)
        assert refused.status == 401 and refused.code in ("invalid_token", "unknown_issuer"), what
        assert token[:40] not in str(refused), what
    expired = await gateway.refusal(issuer.token(exp=now - 60))
    assert (expired.status, expired.code) == (401, "token_expired")
    stranger = await gateway.refusal(issuer.token(iss="https://other.example.com"))
    assert (stranger.status, stranger.code) == (401, "unknown_issuer")
    assert "moiety issuer set" in str(stranger) and "https://other.example.com" in str(stranger)
    assert (await gateway.refusal("mty_x.y.z")).code != "unknown_issuer", "this is a broken key"
    assert (await gateway.principal(exp=now - 10)).end_user == "ada", "clocks may differ by some seconds"


def hmac_signed(claims: str, secret: bytes) -> str:
    """A token that is signed with any bytes as the secret; the library refuses to make one with a public key."""
    head = base64.urlsafe_b64encode(b'{"alg":"HS256","kid":"rsa"}').decode().rstrip("=")
    digest = hmac.digest(secret, f"{head}.{claims}".encode(), hashlib.sha256)
    return f"{head}.{claims}.{base64.urlsafe_b64encode(digest).decode().rstrip('=')}"


async def test_a_token_used_before_is_refused_after_another_replica_changed_or_removed_its_issuer(
    gateway: Gateway, second: Database, clock: ManualClock, demo: Demo
) -> None:
    strange = {**jwt.algorithms.RSAAlgorithm.to_jwk(OTHER_RSA.public_key(), as_dict=True), "kid": "rsa"}
    elsewhere = Admin(
        admin_app(second, clock, more=[with_services(JwtIssuerController, reach=gateway.reach)]), demo.admin_key
    )
    mine, token = gateway.admin, gateway.issuer.token()
    await gateway.trust()
    async with elsewhere.http:
        for _ in range(2):
            assert (await gateway.authenticator.authenticate(f"Bearer {token}")).end_user == "ada"
        gateway.admin = elsewhere
        await gateway.trust(jwks={"keys": [strange]})
        clock.advance(TTL_S)
        assert (await gateway.refusal(token)).code == "invalid_token", "the key of this id is another one"
        await gateway.trust(jwks={"keys": gateway.issuer.keys})
        clock.advance(TTL_S)
        assert (await gateway.authenticator.authenticate(f"Bearer {token}")).end_user == "ada"
        await gateway.trust(jwks={"keys": gateway.issuer.keys}, audience="others")
        clock.advance(TTL_S)
        assert (await gateway.refusal(token)).code == "invalid_token", "it is for another audience"
        await elsewhere.call("DELETE", "issuers/ci", 200)
        clock.advance(TTL_S)
        assert (await gateway.refusal(token)).code == "unknown_issuer"
    gateway.admin = mine


@pytest.mark.parametrize("dialect", ["sqlite"], indirect=True)
async def test_unknown_keys_are_fetched_at_a_bounded_rate(gateway: Gateway, clock: ManualClock) -> None:
    await gateway.trust()
    for number in range(20):
        assert (await gateway.refusal(gateway.issuer.token(key_id=f"made-up-{number}"))).status == 401
    assert gateway.issuer.num_fetches == 1
    new = {**jwt.algorithms.RSAAlgorithm.to_jwk(OTHER_RSA.public_key(), as_dict=True), "kid": "new"}
    gateway.issuer.keys = [*gateway.issuer.keys, new]
    clock.advance(REFETCH_S)
    rotated = (gateway.principal(key=OTHER_RSA, key_id="new") for _ in range(5))
    assert {found.end_user for found in await asyncio.gather(*rotated)} == {"ada"}
    assert gateway.issuer.num_fetches == 2
    gateway.issuer.keys = [new]
    clock.advance(MAX_AGE_S)
    assert (await gateway.refusal(gateway.issuer.token())).code == "invalid_token", "a withdrawn key"


@pytest.mark.parametrize("dialect", ["sqlite"], indirect=True)
async def test_a_client_that_disconnects_does_not_end_the_fetch_for_others(gateway: Gateway) -> None:
    await gateway.trust()
    gateway.issuer.held = asyncio.Event()
    first, second = (asyncio.create_task(gateway.principal()) for _ in range(2))
    async with asyncio.timeout(20):
        while not gateway.issuer.num_waiting:  # noqa: ASYNC110 - the connection has no event of its own
            await asyncio.sleep(0.001)
    first.cancel()
    await asyncio.wait({first})
    gateway.issuer.held.set()
    assert (await second).end_user == "ada" and gateway.issuer.num_fetches == 1


@pytest.mark.parametrize("dialect", ["sqlite"], indirect=True)
async def test_during_an_outage_of_the_issuer_its_keys_expire_after_an_hour(
    gateway: Gateway, clock: ManualClock
) -> None:
    await gateway.trust()
    gateway.issuer.away = True
    refused = await gateway.refusal(gateway.issuer.token())
    assert isinstance(refused, Unavailable) and refused.code == "issuer_unavailable" and refused.retry_after_s
    gateway.issuer.away = False
    assert (await gateway.refusal(gateway.issuer.token())).code == "issuer_unavailable", "it is not asked again at once"
    clock.advance(REFETCH_S)
    assert (await gateway.principal()).end_user == "ada"
    gateway.issuer.away = True
    clock.advance(VALID_S - 1)
    assert (await gateway.principal()).end_user == "ada", "the last keys are still valid"
    assert (await gateway.refusal(gateway.issuer.token(key_id="new"))).code == "issuer_unavailable"
    clock.advance(1)
    assert (await gateway.refusal(gateway.issuer.token())).code == "issuer_unavailable", "and now they are not"
    gateway.issuer.away = False
    clock.advance(REFETCH_S)
    assert (await gateway.principal()).end_user == "ada"


@pytest.mark.parametrize("dialect", ["sqlite"], indirect=True)
async def test_keys_are_read_from_their_url_or_given_and_only_from_permitted_addresses(
    gateway: Gateway, clock: ManualClock
) -> None:
    issuer = gateway.issuer
    await gateway.trust(jwks_url=f"{issuer.url}/keys")
    assert (await gateway.principal()).end_user == "ada" and issuer.paths == ["/keys"]
    await gateway.trust(jwks={"keys": issuer.keys})
    issuer.away = True
    assert (await gateway.principal()).end_user == "ada"
    clock.advance(2 * VALID_S)
    assert (await gateway.principal()).end_user == "ada", "keys that are given do not expire"
    issuer.away, issuer.calls_itself = False, "http://somebody.else"
    await gateway.trust()
    assert (await gateway.refusal(issuer.token())).code == "issuer_unavailable"
    issuer.calls_itself = None
    gateway.reach.networks = ()
    clock.advance(REFETCH_S)
    num_asked = len(issuer.paths)
    assert (await gateway.refusal(issuer.token())).code == "issuer_unavailable", "the network was withdrawn"
    assert len(issuer.paths) == num_asked
    for fields, param in (
        ({}, "url"),
        ({"jwks_url": "https://10.0.0.1/keys"}, "jwks_url"),
        ({"jwks_url": "http://idp.example.com/keys"}, "jwks_url"),
        ({"jwks_url": "https://user:word@idp.example.com/keys"}, "jwks_url"),
        ({"jwks": {"keys": []}}, "jwks"),
        ({"jwks": {"keys": "no list"}}, "jwks"),
        ({"jwks": {}}, "jwks"),
        ({"jwks": {"keys": issuer.keys[3:]}}, "jwks"),
        ({"jwks": {"keys": issuer.keys}, "jwks_url": "https://idp.example.com/keys"}, "jwks"),
        ({"jwks": {"keys": [{"pad": "x" * 70_000}]}}, "jwks"),
    ):
        assert (await gateway.trust(400, **fields))["error"]["param"] == param, fields


@pytest.mark.parametrize("dialect", ["sqlite"], indirect=True)
async def test_an_issuer_that_makes_no_sense_is_refused_with_its_field(gateway: Gateway) -> None:
    two = [{"project": "acme/web", "claim_value": "a"}, {"project": "acme/web", "claim_value": "b"}]
    for fields, param in (
        ({"name": "CI"}, "name"),
        ({"url": ""}, "url"),
        ({"url": "https://é.example"}, "url"),
        ({"audience": ""}, "audience"),
        ({"audience": "a\nb"}, "audience"),
        ({"grants": []}, "grants"),
        ({"grants": two}, "grants"),
        ({"claim": "team"}, "grants"),
        ({"claim": "team", "grants": [two[0], two[0]]}, "grants"),
        ({"claim": "team", "grants": [{"project": "acme/web", "claim_value": "x" * 201}]}, "claim_value"),
        ({"claim": ""}, "claim"),
        ({"end_user_claim": ""}, "end_user_claim"),
        ({"required_claims": {"": "a"}}, "required_claims"),
        ({"required_claims": {f"c{number}": "a" for number in range(11)}}, "required_claims"),
        ({"models": []}, "models"),
    ):
        assert (await gateway.trust(400, **fields))["error"]["param"] == param, fields
    for project in ("acme/none", "none/web", "/web", "acme/", "prj_none"):
        refused = await gateway.trust(404, grants=[{"project": project}])
        assert "project" in refused["error"]["message"]
    assert (await gateway.admin.call("GET", "issuers", 200))["data"] == []
    await gateway.trust()
    assert (await gateway.trust(409, name="again"))["error"]["param"] == "audience"


async def test_a_grant_that_stays_keeps_its_key_and_one_that_goes_loses_it(
    gateway: Gateway, database: Database, clock: ManualClock, demo: Demo
) -> None:
    async with database.write() as session:
        await create_project(session, NewProject(tenant_id=demo.tenant_id, name="batch"), clock.now())
    web, batch = {"claim_value": "a", "project": "acme/web"}, {"claim_value": "b", "project": "acme/batch"}
    first = await gateway.trust(claim="team", grants=[web, batch])
    await gateway.principal(team="b")
    again = await gateway.trust(claim="team", grants=[batch, web], models=["tiny"])
    assert again["key_ids"] == first["key_ids"][::-1]
    assert (await gateway.principal(team="b")).allowed_models == {"tiny"}
    moved = await gateway.trust(claim="team", grants=[web, {**web, "claim_value": "b"}])
    assert moved["key_ids"][0] == first["key_ids"][0] and moved["key_ids"][1] not in first["key_ids"]
    assert (await gateway.principal(team="b")).project_id == demo.project_id
    assert (await gateway.admin.call("GET", f"keys/{first['key_ids'][1]}", 200))["status"] == "revoked"
    refused = await gateway.admin.call("POST", f"keys/{moved['key_ids'][0]}/rotate", 409)
    assert refused["error"]["code"] == "key_of_issuer"
    await gateway.admin.call("POST", f"keys/{moved['key_ids'][0]}/revoke", 200)
    assert (await gateway.refusal(gateway.issuer.token(team="a"))).code == "key_revoked"
    renewed = await gateway.trust(claim="team", grants=[web, {**web, "claim_value": "b"}])
    assert renewed["key_ids"][0] not in (*first["key_ids"], *moved["key_ids"]), "a revoked key stays revoked"
    assert renewed["key_ids"][1] == moved["key_ids"][1]
    assert (await gateway.principal(team="a")).key_id == renewed["key_ids"][0]
    await gateway.admin.call("DELETE", "issuers/ci", 200)
    assert (await gateway.refusal(gateway.issuer.token(team="b"))).code == "unknown_issuer"
    assert {
        key["status"] for key in (await gateway.admin.call("GET", "keys", 200))["data"] if key["hint"] == "(jwt)"
    } == {"revoked"}
    await gateway.admin.call("GET", "issuers/ci", 404)
    entries = (await gateway.admin.call("GET", "audit", 200))["data"]
    changes = {(entry["object_kind"], entry["action"]) for entry in entries}
    assert {("jwt_issuers", "create"), ("jwt_issuers", "delete"), ("jwt_grants", "create")} <= changes
    made = [entry["after"] for entry in entries if (entry["object_kind"], entry["action"]) == ("jwt_grants", "create")]
    assert {(grant["tenant_id"], grant["claim_value"]) for grant in made} == {
        (demo.tenant_id, "a"),
        (demo.tenant_id, "b"),
    }


async def test_a_suspended_tenants_tokens_are_refused_and_a_deleted_tenants_grants_are_gone(
    gateway: Gateway, database: Database, clock: ManualClock, demo: Demo
) -> None:
    await gateway.trust()
    async with database.write() as session:
        await change_tenant(session, demo.tenant_id, TenantChange(status="suspended"))
    refused = await gateway.refusal(gateway.issuer.token())
    assert isinstance(refused, Forbidden) and refused.code == "tenant_suspended"
    await gateway.admin.call("DELETE", f"tenants/{demo.tenant_id}/data", 202)
    clock.advance(TTL_S)
    assert (await gateway.refusal(gateway.issuer.token())).code in ("key_revoked", "no_matching_grant")
    async with database.read() as session:
        assert await session.scalar(select(func.count()).select_from(JwtGrantRecord)) == 0
    assert (await gateway.admin.call("GET", "issuers/ci", 200))["grants"] == []
    refused_again = await gateway.trust(409, grants=[{"project": demo.project_id}])
    assert refused_again["error"]["code"] == "tenant_erased"


async def test_without_an_issuer_a_token_is_refused_with_what_to_do(gateway: Gateway, demo: Demo) -> None:
    refused = await gateway.refusal(gateway.issuer.token())
    assert isinstance(refused, Unauthenticated) and refused.code == "unknown_issuer"
    assert gateway.issuer.paths == [], "nobody is asked for keys at the address that a token names"
    gateway.authenticator.jwts = None
    assert "format of an API key" in str(await gateway.refusal(gateway.issuer.token()))


@pytest.mark.parametrize("dialect", ["sqlite"], indirect=True)
async def test_the_key_of_a_grant_needs_no_pepper(
    gateway: Gateway, database: Database, clock: ManualClock, tmp_path: Path
) -> None:
    await gateway.trust()
    settings = GatewaySettings(
        data_dir=tmp_path, key_pepper=SecretStr(PEPPER.decode()), key_pepper_previous=SecretStr("p" * 32)
    )
    async with database.read() as session:
        finding = await check_pepper(session, settings, None, clock)
    assert finding.code == "pepper_previous", "no key still waits for its first use under the new pepper"


def test_claims_are_found_by_their_path_even_with_dots_in_their_names() -> None:
    claims = {
        "kubernetes.io": {"namespace": "prod", "serviceaccount": {"name": "web"}},
        "a": {"b": {"c": 1}},
        "a.b": {"d": [True, "x", {"no": 1}, None]},
        "https://example.com/team": "t",
    }
    assert find_claim(claims, "kubernetes.io.namespace") == "prod"
    assert find_claim(claims, "kubernetes.io.serviceaccount.name") == "web"
    assert claim_values(claims, "a.b.c") == ("1",)
    assert claim_values(claims, "a.b.d") == ("true", "x")
    assert find_claim(claims, "https://example.com/team") == "t"
    assert claim_values(claims, "a.x") == claim_values(claims, "") == claim_values(claims, "a.b") == ()


def test_grants_and_claims_are_written_in_one_line(tmp_path: Path) -> None:
    assert parse_grants("acme/web") == [{"project": "acme/web", "claim_value": None}]
    assert parse_grants("a=b=acme/web, c=prj_1") == [
        {"project": "acme/web", "claim_value": "a=b"},
        {"project": "prj_1", "claim_value": "c"},
    ]
    assert parse_claims("env=prod,ref=refs/heads/a=b") == {"env": "prod", "ref": "refs/heads/a=b"}
    for parse, text in ((parse_grants, "a="), (parse_grants, "=acme/web"), (parse_grants, ""), (parse_claims, "env")):
        with pytest.raises(ValueError, match="must be"):
            parse(text)
    file = tmp_path / "jwks.json"
    with pytest.raises(ValueError, match="cannot be read"):
        read_jwks(str(file))
    file.write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        read_jwks(str(file))
    file.write_text('{"keys": []}')
    assert read_jwks(str(file)) == {"keys": []}
