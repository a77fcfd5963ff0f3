# ruff: noqa: F811  fixtures are imported
"""Developers by the groups or claims of their tokens: they become users at their first sign-in, and make keys."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from tests.token_issuer import AUDIENCE

from moiety_platform.access.group_roles import parse_group_roles
from moiety_platform.auth.authenticator import TTL_S
from moiety_platform.auth.oidc import OidcTerms, OidcVerifier
from moiety_platform.bootstrap.oidc_authentication import limit_keys_by_roles
from moiety_platform.clock import ManualClock
from moiety_platform.db.session import Database
from moiety_platform.errors import Forbidden
from moiety_platform.live_settings import LiveSettings
from moiety_platform.settings import GatewaySettings
from moiety_platform.tenants.schemas import NewTenant
from moiety_platform.tenants.service import create_tenant

from .conftest import Demo
from .people import People, people  # noqa: F401  a fixture

DAY_S = 86_400.0


@pytest.fixture
async def ada(people: People, demo: Demo) -> People:
    """The people; the tokens of ada give her the role of a developer in the tenant, which lets developers make keys."""
    people.tokens["ada"] = people.token("ada", moiety_roles=["developer"], moiety_tenant=demo.tenant_id)
    await people.call("owner", "PUT", "key-policies", {"tenant_id": demo.tenant_id, "max_keys": 2})
    return people


async def users(people: People, demo: Demo) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await people.call("owner", "GET", "users", tenant_id=demo.tenant_id))["data"]
    return found


async def test_a_developer_by_its_token_is_a_user_from_the_first_sign_in_on(ada: People, demo: Demo) -> None:
    caller = await ada.call("ada", "GET", "caller")
    (user,) = await users(ada, demo)
    assert (caller["user_id"], caller["role"], caller["tenant_id"]) == (user["id"], "developer", demo.tenant_id)
    assert (user["email"], user["subject"], user["state"]) == ("ada@example.com", "ada", "active")
    assert user["accepted_at"] is None
    assert {"self_service.read", "self_service.write_keys"} <= set(caller["may"])
    body = {"name": "laptop", "project_id": demo.project_id}
    made = await ada.call("ada", "POST", "me/keys", body, 201)
    assert made["key"]["user_id"] == user["id"]
    assert [one["id"] for one in (await ada.call("ada", "GET", "me/keys"))["data"]] == [made["key"]["id"]]
    assert len(await users(ada, demo)) == 1
    entries = (await ada.call("owner", "GET", "audit", object_id=user["id"]))["data"]
    assert [(one["actor"], one["action"]) for one in entries] == [("oidc:ada", "create")]


async def test_several_first_requests_at_once_make_one_user(ada: People, demo: Demo) -> None:
    answers = await asyncio.gather(*(ada.call("ada", "GET", "caller") for _ in range(8)))
    (user,) = await users(ada, demo)
    assert {one["user_id"] for one in answers} == {user["id"]}


async def test_a_token_without_the_role_is_refused_and_one_with_it_finds_the_user_again(
    ada: People, demo: Demo
) -> None:
    first = await ada.call("ada", "GET", "caller")
    with_role = ada.tokens.pop("ada")
    assert await ada.refuse("ada", "GET", "caller") == (403, "missing_role")
    assert await ada.refuse("ada", "GET", "me/keys") == (403, "missing_role")
    ada.tokens["ada"] = ada.token("ada", moiety_roles=["viewer"], moiety_tenant=demo.tenant_id)
    viewer = await ada.call("ada", "GET", "caller")
    assert (viewer["role"], viewer["user_id"]) == ("viewer", None)
    ada.tokens["ada"] = with_role
    assert (await ada.call("ada", "GET", "caller"))["user_id"] == first["user_id"]


async def test_a_disabled_developer_is_refused_whatever_its_token_says(ada: People, demo: Demo) -> None:
    user_id = (await ada.call("ada", "GET", "caller"))["user_id"]
    await ada.call("owner", "PATCH", f"users/{user_id}", {"state": "disabled"})
    assert await ada.refuse("ada", "GET", "caller") == (403, "user_disabled")
    ada.tokens["ada"] = ada.token("ada", moiety_roles=["tenant-admin"], moiety_tenant=demo.tenant_id)
    assert await ada.refuse("ada", "GET", "caller") == (403, "user_disabled")
    await ada.call("owner", "PATCH", f"users/{user_id}", {"state": "active"})
    assert (await ada.call("ada", "GET", "caller"))["role"] == "tenant-admin"


async def test_a_role_that_an_administrator_gives_stays_without_the_groups(ada: People, demo: Demo) -> None:
    user_id = (await ada.call("ada", "GET", "caller"))["user_id"]
    await ada.call("owner", "PATCH", f"users/{user_id}", {"role": "viewer"})
    assert (await ada.call("ada", "GET", "caller"))["role"] == "viewer"
    del ada.tokens["ada"]
    assert (await ada.call("ada", "GET", "caller"))["role"] == "viewer"


async def refused_key(ada: People, text: str) -> str | None:
    """Return why a key is refused, None if it is not. The gateway reads keys again after TTL_S."""
    ada.clock.advance(TTL_S + 1)
    try:
        await ada.authenticator.authenticate(f"Bearer {text}")
    except Forbidden as error:
        return error.code
    return None


async def test_keys_stop_at_the_first_token_without_the_role_and_work_again_with_it(ada: People, demo: Demo) -> None:
    tenant: dict[str, Any] = {"moiety_tenant": demo.tenant_id}
    made = await ada.call("ada", "POST", "me/keys", {"name": "k", "project_id": demo.project_id}, 201)
    with_role = ada.tokens["ada"]
    assert await refused_key(ada, made["secret"]) is None
    ada.tokens["ada"] = ada.token("ada")  # has no claim with roles, which some tokens lack
    assert await ada.refuse("ada", "GET", "caller") == (403, "missing_role")
    ada.tokens["ada"] = ada.token("ada", moiety_roles=["tenant-admin"], **tenant)
    assert (await ada.call("ada", "GET", "caller"))["role"] == "tenant-admin"
    ada.tokens["ada"] = ada.token("ada", moiety_roles=[], moiety_tenant="ten_other")
    assert await ada.refuse("ada", "GET", "caller") == (403, "missing_role")
    assert await refused_key(ada, made["secret"]) is None
    ada.tokens["ada"] = ada.token("ada", moiety_roles=["viewer"], **tenant)
    assert (await ada.call("ada", "GET", "caller"))["role"] == "viewer"
    assert await refused_key(ada, made["secret"]) == "user_role_ended"
    (user,) = await users(ada, demo)
    assert user["role_ended_at"] is not None
    ada.tokens["ada"] = with_role
    await ada.call("ada", "GET", "caller")
    assert await refused_key(ada, made["secret"]) is None


async def test_a_token_from_before_the_end_of_the_role_does_not_make_keys_valid_again(
    ada: People, clock: ManualClock, demo: Demo
) -> None:
    def use(role: str, age_s: float) -> None:
        issued_s = int(clock.now().timestamp() - age_s)
        ada.tokens["ada"] = ada.token("ada", moiety_roles=[role], moiety_tenant=demo.tenant_id, iat=issued_s)

    use("developer", 120)
    made = await ada.call("ada", "POST", "me/keys", {"name": "k", "project_id": demo.project_id}, 201)
    use("viewer", 240)  # older than the one that gave the role
    assert (await ada.call("ada", "GET", "caller"))["role"] == "viewer"
    assert await refused_key(ada, made["secret"]) is None
    use("viewer", 60)
    await ada.call("ada", "GET", "caller")
    use("developer", 120)
    assert (await ada.call("ada", "GET", "caller"))["role"] == "developer"
    assert await refused_key(ada, made["secret"]) == "user_role_ended"
    use("developer", 0)
    await ada.call("ada", "GET", "caller")
    assert await refused_key(ada, made["secret"]) is None


async def test_keys_stop_when_the_role_was_not_seen_for_long(ada: People, demo: Demo) -> None:
    made = await ada.call("ada", "POST", "me/keys", {"name": "k", "project_id": demo.project_id}, 201)
    ada.authenticator.role_days = 30
    ada.clock.advance(29 * DAY_S)
    assert await refused_key(ada, made["secret"]) is None
    ada.clock.advance(DAY_S)
    assert await refused_key(ada, made["secret"]) == "user_role_ended"
    ada.authenticator.role_days = 0
    assert await refused_key(ada, made["secret"]) is None
    ada.authenticator.role_days = 30
    ada.tokens["ada"] = ada.token("ada", moiety_roles=["developer"], moiety_tenant=demo.tenant_id)
    await ada.call("ada", "GET", "caller")
    assert await refused_key(ada, made["secret"]) is None
    ada.clock.advance(31 * DAY_S)
    (user,) = await users(ada, demo)
    await ada.call("owner", "PATCH", f"users/{user['id']}", {"role": "developer"})
    assert await refused_key(ada, made["secret"]) is None, "an administrator has given the role"


async def test_the_days_of_keys_follow_the_setting(ada: People) -> None:
    settings = GatewaySettings()
    live = LiveSettings(settings)
    limit_keys_by_roles(settings, live, ada.authenticator)
    assert ada.authenticator.role_days == 30
    await live.change(settings.model_copy(update={"oidc_key_days": 7.0}))
    assert ada.authenticator.role_days == 7


async def test_a_deleted_developer_comes_back_without_its_keys(ada: People, demo: Demo) -> None:
    user_id = (await ada.call("ada", "GET", "caller"))["user_id"]
    made = await ada.call("ada", "POST", "me/keys", {"name": "k", "project_id": demo.project_id}, 201)
    await ada.call("owner", "DELETE", f"users/{user_id}")
    again = await ada.call("ada", "GET", "caller")
    assert again["user_id"] not in (None, user_id)
    assert (await ada.call("ada", "GET", "me/keys"))["data"] == []
    assert (await ada.call("owner", "GET", f"keys/{made['key']['id']}"))["status"] == "revoked"


async def test_an_address_is_needed_and_that_of_an_invited_person_is_not_taken(people: People, demo: Demo) -> None:
    terms: dict[str, Any] = {"moiety_roles": ["developer"], "moiety_tenant": demo.tenant_id}
    await people.invite("eve", "tenant-admin", demo.tenant_id)
    people.tokens["eve"] = people.token("eve", **terms)
    people.tokens["bob"] = people.token("bob", email=None, **terms)
    people.tokens["tom"] = people.token("tom", email_verified=False, **terms)
    for who in ("eve", "bob", "tom"):
        caller = await people.call(who, "GET", "caller")
        assert (caller["role"], caller["user_id"]) == ("developer", None), who
        assert await people.refuse(who, "GET", "me") == (403, "missing_role")
    (invited,) = await users(people, demo)
    assert (invited["state"], invited["subject"]) == ("invited", None)


async def test_an_invited_user_is_the_one_whose_tokens_have_a_role(people: People, demo: Demo) -> None:
    user = await people.join("ada", "viewer", demo.tenant_id)
    people.tokens["ada"] = people.token("ada", moiety_roles=["developer"], moiety_tenant=demo.tenant_id)
    caller = await people.call("ada", "GET", "caller")
    assert (caller["role"], caller["user_id"]) == ("viewer", user["id"])


async def test_a_developer_by_its_token_with_a_role_in_another_tenant_chooses_between_them(
    ada: People, database: Database, clock: ManualClock, demo: Demo
) -> None:
    async with database.write() as session:
        other = await create_tenant(session, NewTenant(name="globex"), clock.now())
    first = await ada.call("ada", "GET", "caller")
    joined = await ada.join("ada", "viewer", other.id)
    caller = await ada.call("ada", "GET", "caller")
    assert (caller["user_id"], caller["role"]) == (joined["id"], "viewer")
    assert {one["tenant_id"] for one in caller["roles"]} == {demo.tenant_id, other.id}
    for tenant_id, user_id in ((demo.tenant_id, first["user_id"]), (other.id, joined["id"])):
        chosen = await ada.call("ada", "GET", "caller", tenant=tenant_id)
        assert (chosen["tenant_id"], chosen["user_id"]) == (tenant_id, user_id)
    ada.tokens["ada"] = ada.token("ada")
    assert await ada.refuse("ada", "GET", "caller", tenant=demo.tenant_id) == (403, "missing_role")


async def test_a_request_that_names_another_tenant_than_the_token_is_refused(ada: People, demo: Demo) -> None:
    assert (await ada.call("ada", "GET", "caller", tenant=demo.tenant_id))["tenant_id"] == demo.tenant_id
    for role in ("developer", "tenant-admin"):
        ada.tokens["ada"] = ada.token("ada", moiety_roles=[role], moiety_tenant=demo.tenant_id)
        assert await ada.refuse("ada", "GET", "caller", tenant="ten_other") == (403, "tenant_unknown")
    ada.tokens["ada"] = ada.token("ada", moiety_roles=["owner"])
    assert (await ada.call("ada", "GET", "caller", tenant="ten_other"))["role"] == "owner"


async def test_an_accepted_role_is_not_replaced_by_one_of_the_token_for_the_deployment(ada: People, demo: Demo) -> None:
    await ada.call("ada", "GET", "caller")
    await ada.join("ada", "viewer", None)
    ada.tokens["ada"] = ada.token("ada", moiety_roles=["owner"])
    assert (await ada.call("ada", "GET", "caller"))["role"] == "viewer"
    assert await ada.refuse("ada", "GET", "caller", tenant=demo.tenant_id) == (403, "tenant_unknown")


async def test_groups_give_developers_of_several_tenants_one_user_in_each(
    people: People, database: Database, clock: ManualClock, demo: Demo
) -> None:
    async with database.write() as session:
        other = await create_tenant(session, NewTenant(name="globex"), clock.now())
    roles = parse_group_roles({"web": f"developer:{demo.tenant_id}", "lab": "developer:globex"})
    terms = OidcTerms(people.issuer.url, AUDIENCE, "moiety_roles", "moiety_tenant", "groups", roles)
    async with httpx.AsyncClient() as http:
        verifier = OidcVerifier(terms, database, http, clock)
        found = [await verifier.authenticate(people.token("ada", groups=[group])) for group in ("web", "lab", "web")]
        of_both = people.token("ada", groups=["web", "lab"])
        chosen = [await verifier.authenticate(of_both, tenant_id) for tenant_id in (demo.tenant_id, other.id)]
        with pytest.raises(Forbidden) as refusal:
            await verifier.authenticate(of_both)
        await verifier.close()
    assert [one.tenant_id for one in found] == [demo.tenant_id, other.id, demo.tenant_id]
    assert found[0].user_id == found[2].user_id != found[1].user_id
    assert all(one.user_id is not None for one in found)
    assert chosen == found[:2], "the header names one of the tenants"
    assert refusal.value.code == "several_tenants"
