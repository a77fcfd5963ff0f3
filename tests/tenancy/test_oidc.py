"""OpenID Connect tokens of a loopback issuer: valid ones are accepted with their role, invalid ones refused."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import jwt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from tests.token_issuer import AUDIENCE, EC, OTHER_RSA, TokenIssuer

from moiety_platform.access.group_roles import GroupRole, HeldRole, best_roles, parse_group_roles
from moiety_platform.access.roles import Role, tenant_complaint
from moiety_platform.auth.jwt_verification import MAX_AGE_S, REFETCH_S
from moiety_platform.auth.oidc import OidcTerms, OidcVerifier
from moiety_platform.bootstrap.oidc_authentication import OidcAuthentication
from moiety_platform.clock import ManualClock
from moiety_platform.db.session import Database
from moiety_platform.errors import Forbidden, Unauthenticated
from moiety_platform.live_settings import LiveSettings
from moiety_platform.settings import GatewaySettings
from moiety_platform.tenants.schemas import NewTenant, TenantChange
from moiety_platform.tenants.service import change_tenant, create_tenant

from .conftest import Demo, admin_app, listening

OIDC: dict[str, Any] = {"oidc_issuer": "https://idp.example", "oidc_audience": AUDIENCE}


@pytest.fixture
async def issuer() -> AsyncIterator[TokenIssuer]:
    started = TokenIssuer()
    async with listening(started.serve) as started.url:
        yield started


@pytest.fixture
def dialect() -> str:
    return "sqlite"


@pytest.fixture
async def gateway(issuer: TokenIssuer, database: Database, clock: ManualClock) -> AsyncIterator[Any]:
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


async def test_a_token_gets_in_with_its_role_and_the_log_names_its_subject(issuer: TokenIssuer, gateway: Any) -> None:
    for signed in ({}, {"key": EC, "algorithm": "ES256", "key_id": "ec"}):
        assert (await gateway(issuer.token(**signed))).status_code == 200
        assert code(await gateway(issuer.token(**signed), name="new")) == (403, "missing_role")
    made = await gateway(issuer.token(moiety_roles="operator"), name="new")
    assert made.status_code == 201
    (entry,) = (await gateway(issuer.token(moiety_roles=["staff", "viewer", "owner"]), "audit")).json()["data"]
    assert (entry["actor"], entry["actor_role"], entry["object_id"]) == ("oidc:ada", "operator", made.json()["id"])
    assert issuer.num_fetches == 1


async def test_a_token_for_one_tenant_reaches_that_tenant(
    issuer: TokenIssuer, gateway: Any, database: Database, clock: ManualClock
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


async def test_invalid_tokens_are_refused(issuer: TokenIssuer, gateway: Any, demo: Demo) -> None:
    now = int(time.time())
    good = issuer.token()
    head, claims, signature = good.split(".")
    wrong: dict[str, Any] = {
        **issuer.invalid_tokens(),
        "issuer": issuer.token(iss="http://127.0.0.1:1"),
        "audience": issuer.token(aud="other"),
        "a key that is not a signing one": issuer.token(key_id="strange"),
        "changed claims": f"{head}.{claims[:-4]}AAAA.{signature}",
        "nothing": "",
        "long": "x" * 20_000,
    }
    for what, token in wrong.items():
        assert code(await gateway(token)) == (401, "invalid_token"), what
    assert code(await gateway(issuer.token(exp=now - 60))) == (401, "token_expired")
    assert (await gateway(good)).status_code == 200
    assert (await gateway(demo.admin_key)).status_code == 200  # keys count beside tokens
    assert code(await gateway(demo.key)) == (403, "missing_scope")


async def test_unknown_keys_are_asked_for_at_a_bounded_rate_and_withdrawn_ones_stop_to_count(
    issuer: TokenIssuer, gateway: Any, clock: ManualClock
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
    issuer: TokenIssuer, gateway: Any, clock: ManualClock
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
    ("wrong", "complaint"),
    [
        ({"oidc_issuer": "http://idp.example", "oidc_audience": "a"}, "issuer"),
        ({"oidc_issuer": "https://idp.example"}, "issuer"),
        ({"oidc_audience": "a"}, "issuer"),
        ({"oidc_group_roles": "a=owner"}, "oidc_group_roles needs oidc_issuer"),
        (OIDC | {"oidc_group_roles": "a=king"}, "must have one of the roles owner"),
        (OIDC | {"oidc_group_roles": "a"}, "must have one of the roles owner"),
        (OIDC | {"oidc_group_roles": "a=viewer:"}, "names no tenant"),
        (OIDC | {"oidc_group_roles": "a=tenant-admin"}, "for one tenant"),
        (OIDC | {"oidc_group_roles": "a=operator:acme"}, "for all tenants"),
        (OIDC | {"oidc_group_roles": '{"a": '}, "JSON"),
    ],
)
def test_settings_that_cannot_be_right_are_refused(wrong: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        GatewaySettings(**wrong)


def test_roles_of_groups_are_written_in_one_line_or_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, group, role in (
        ('{"cn=a,dc=b": "viewer:x: y", "ops": "operator"}', "cn=a,dc=b", GroupRole(Role.VIEWER, "x: y")),
        ("ops=operator, leads = tenant-admin:acme", "leads", GroupRole(Role.TENANT_ADMIN, "acme")),
    ):
        monkeypatch.setenv("MOIETY_OIDC_GROUP_ROLES", text)
        parsed = parse_group_roles(GatewaySettings.load(**OIDC).oidc_group_roles)
        assert parsed == {"ops": GroupRole(Role.OPERATOR), group: role}


async def test_groups_give_roles_of_the_deployment_or_of_a_tenant(
    issuer: TokenIssuer, database: Database, clock: ManualClock
) -> None:
    async with database.write() as session:
        a, b = [await create_tenant(session, NewTenant(name=name), clock.now()) for name in ("acme", "globex: eu")]
    settings: dict[str, Any] = OIDC | {
        "oidc_issuer": issuer.url,
        "oidc_groups_claim": "realm_access.groups",
        "oidc_group_roles": {
            "ops": "operator", "readers": "viewer", "acme-leads": "tenant-admin:ACME", "acme-all": f"viewer:{a.id}",
            "globex-all": "viewer:globex: eu", "gone": "tenant-admin:initech",
        },
    }  # fmt: skip
    async with OidcAuthentication(GatewaySettings(**settings), database, clock) as authentication:
        verifier = authentication.find()
        assert verifier is not None

        async def held(*groups: str, tenant: str | None = None, **claims: Any) -> tuple[str, str | None]:
            assert verifier is not None
            named: dict[str, Any] = {"moiety_roles": None, "realm_access": {"groups": list(groups)}, **claims}
            caller = await verifier.authenticate(issuer.token(**named), tenant)
            assert caller.actor == "oidc:ada"
            return caller.role.value, caller.tenant_id

        assert await held("x", "ops") == ("operator", None)
        assert await held("acme-leads", "x") == ("tenant-admin", a.id)
        assert await held("acme-leads", "acme-all", "gone") == ("tenant-admin", a.id)
        assert await held("acme-all", "readers") == ("viewer", None), "the role of all tenants includes the other"
        assert await held("acme-all", "ops", "acme-leads") == ("operator", None)
        assert await held("acme-all", "globex-all", moiety_tenant=b.id) == ("viewer", b.id)
        assert await held("readers", moiety_tenant=b.id) == ("viewer", b.id), "a token may restrict itself"
        assert await held("acme-all", moiety_roles=["operator"]) == ("operator", None), "a role in the token counts too"
        assert await held("acme-leads", moiety_roles=["tenant-admin"]) == ("tenant-admin", a.id)
        for tenant, role in ((a.id, "tenant-admin"), (b.id, "viewer")):  # the request names one of its tenants
            assert await held("acme-leads", "acme-all", "globex-all", tenant=tenant) == (role, tenant)
            assert await held("acme-all", "globex-all", tenant=tenant) == ("viewer", tenant)
            assert await held("acme-all", "readers", tenant=tenant) == ("viewer", None)
            assert await held("acme-all", "globex-all", tenant=tenant, moiety_tenant=tenant) == ("viewer", tenant)
        refused: list[tuple[tuple[str, ...], dict[str, Any], str]] = [
            (("acme-all", "globex-all"), {"tenant": "ten_other"}, "tenant_unknown"),
            (("acme-all", "globex-all"), {"tenant": a.id, "moiety_tenant": b.id}, "missing_role"),
            ((), {"tenant": a.id}, "missing_role"),
            ((), {"tenant": a.id, "moiety_roles": ["tenant-admin"]}, "missing_role"),
            ((), {}, "missing_role"),
            (("gone",), {}, "missing_role"),
            (("acme-all",), {"moiety_tenant": b.id}, "missing_role"),
            (("ops",), {"moiety_tenant": b.id}, "missing_role"),
            (("acme-all", "globex-all"), {}, "several_tenants"),
            (("acme-leads",), {"realm_access": None, "groups": ["acme-leads"]}, "missing_role"),
        ]
        for groups, claims, expected in refused:
            with pytest.raises(Forbidden) as refusal:
                await held(*groups, **claims)
            assert refusal.value.code == expected, groups
        assert await held("acme-leads") == ("tenant-admin", a.id)
        with pytest.raises(Forbidden):
            await held()  # the next token, after the provider has removed the group


@given(
    st.lists(
        st.builds(HeldRole, st.sampled_from(Role), st.sampled_from([None, "ten_a", "ten_b"])).filter(
            lambda one: tenant_complaint(one.role, one.tenant_id) is None
        )
    ),
    st.sampled_from([None, "ten_a"]),
)
def test_the_chosen_role_is_one_that_the_groups_give_and_none_has_more_rights(
    held: list[HeldRole], tenant_id: str | None
) -> None:
    chosen = best_roles(held, tenant_id)
    usable = [one for one in held if tenant_id is None or one.tenant_id in (None, tenant_id)]
    assert bool(chosen) == bool(usable)
    for one in chosen:
        assert one in held or (HeldRole(one.role) in held and one.tenant_id == tenant_id)
        assert tenant_id is None or one.tenant_id == tenant_id
        assert all(list(Role).index(other.role) >= list(Role).index(one.role) for other in usable)


async def test_reload_applies_oidc_settings(issuer: TokenIssuer, database: Database, clock: ManualClock) -> None:
    live = LiveSettings(GatewaySettings())
    async with OidcAuthentication(live.now, database, clock) as authentication:
        authentication.followed_by(live)
        assert authentication.find() is None
        settings: dict[str, Any] = {"oidc_issuer": issuer.url, "oidc_audience": AUDIENCE}
        others: dict[str, Any] = {"aud": "others", "roles": ["owner"], "tenant": "ten_a"}
        await live.change(GatewaySettings(**settings))
        first = authentication.find()
        assert first is not None
        assert (await first.authenticate(issuer.token())).role is Role.VIEWER
        with pytest.raises(Unauthenticated):
            await first.authenticate(issuer.token(**others))
        await live.change(GatewaySettings(**settings | {"oidc_audience": "others", "oidc_roles_claim": "roles"}))
        second = authentication.find()
        assert second is not None
        assert (await second.authenticate(issuer.token(**others))).role is Role.OWNER
        assert (await first.authenticate(issuer.token())).role is Role.VIEWER, "what has begun goes on"
        claims: dict[str, Any] = {"oidc_roles_claim": "moiety_roles", "oidc_tenant_claim": "tenant"}
        await live.change(GatewaySettings(**settings | claims))
        third = authentication.find()
        assert third is not None
        with pytest.raises(Forbidden):
            await third.authenticate(issuer.token(tenant="no tenant's id"))
        await live.change(GatewaySettings(oidc_issuer="https://other.example.com", oidc_audience=AUDIENCE))
        fourth = authentication.find()
        assert fourth is not None and fourth is not third
        await live.change(GatewaySettings())
        assert authentication.find() is None
