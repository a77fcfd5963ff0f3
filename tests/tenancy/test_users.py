# ruff: noqa: F811  fixtures are imported
"""Users: invitations are good for one person and once, and a disabled user is refused everywhere at once."""

from __future__ import annotations

import time
from typing import Any

import pytest
from sqlalchemy import select

from moiety_platform.auth.users.models import User
from moiety_platform.clock import ManualClock
from moiety_platform.db.session import Database
from moiety_platform.errors import Forbidden, Unauthenticated
from moiety_platform.tenants.schemas import NewTenant
from moiety_platform.tenants.service import create_tenant

from .conftest import Demo
from .people import People, people  # noqa: F401  a fixture

HOUR_S = 3600


@pytest.fixture
async def other_tenant(database: Database, clock: ManualClock) -> str:
    async with database.write() as session:
        return (await create_tenant(session, NewTenant(name="globex"), clock.now())).id


async def test_an_invitation_gives_the_signed_in_person_its_role(people: People, demo: Demo) -> None:
    user, invitation = await people.invite("ada", "developer", demo.tenant_id, name="Ada")
    assert (user["state"], user["subject"]) == ("invited", None)
    assert await people.refuse("ada", "GET", "caller") == (403, "missing_role")
    accepted = await people.call("ada", "POST", "invitations/accept", {"invitation": invitation})
    assert (accepted["state"], accepted["subject"], accepted["issuer"]) == ("active", "ada", people.issuer.url)
    caller = await people.call("ada", "GET", "caller")
    assert (caller["role"], caller["tenant_id"], caller["user_id"]) == ("developer", demo.tenant_id, user["id"])
    assert caller["roles"] == [{"role": "developer", "tenant_id": demo.tenant_id, "tenant_name": "acme"}]
    entries = (await people.call("owner", "GET", "audit", object_id=user["id"]))["data"]
    assert [(entry["action"], entry["actor"]) for entry in entries if entry["actor"] != demo.admin_key_id] == [
        ("change", "oidc:ada")
    ]
    assert invitation not in str(entries)
    assert "invitation_hash" not in str(entries)


async def test_an_invitation_is_good_once_for_the_invited_address_until_it_ends(
    people: People, demo: Demo, clock: ManualClock, database: Database
) -> None:
    user, first = await people.invite("ada", "developer", demo.tenant_id)
    second = (await people.call("owner", "POST", f"users/{user['id']}/invitation", {"valid_hours": 2}, 201))["secret"]

    async def accept(who: str, invitation: str) -> Any:
        return await people.refuse(who, "POST", "invitations/accept", {"invitation": invitation})

    assert await accept("ada", first) == (410, "invitation_ended")  # replaced
    assert await accept("eve", second) == (403, "invitation_invalid")  # another address
    for wrong in (second[:-1] + ("0" if second[-1] != "0" else "1"), second.replace(".", ".9", 1), "inv_", "x" * 190):
        assert await accept("ada", wrong) == (403, "invitation_invalid"), wrong
    async with database.read() as session:
        (row,) = await session.scalars(select(User))
    assert row.invitation_hash is not None
    assert second.encode() not in row.invitation_hash
    clock.advance(2 * HOUR_S + 1)
    assert await accept("ada", second) == (410, "invitation_ended")
    third = (await people.call("owner", "POST", f"users/{user['id']}/invitation", expect=201))["secret"]
    assert (await people.call("ada", "POST", "invitations/accept", {"invitation": third}))["state"] == "active"
    assert await accept("ada", third) == (410, "invitation_ended")
    assert await people.refuse("owner", "POST", f"users/{user['id']}/invitation") == (409, "user_active")
    assert await accept("owner", third) == (401, "sign_in_required")  # a key accepts none


async def test_a_token_without_a_verified_address_accepts_by_the_invitation_alone(people: People, demo: Demo) -> None:
    _, invitation = await people.invite("ada", "viewer", demo.tenant_id)
    people.tokens["ada"] = people.token("ada", email=None)
    accepted = await people.call("ada", "POST", "invitations/accept", {"invitation": invitation})
    assert accepted["email"] == "ada@example.com"


async def test_a_disabled_user_is_refused_with_all_its_credentials_and_enabled_again(
    people: People, demo: Demo
) -> None:
    await people.call("owner", "PUT", "key-policies", {"tenant_id": demo.tenant_id})
    user = await people.join("ada", "developer", demo.tenant_id)
    body = {"name": "mine", "project_id": demo.project_id}
    key = (await people.call("ada", "POST", "me/keys", body, 201))["secret"]
    assert (await people.authenticator.authenticate(f"Bearer {key}")).project_id == demo.project_id
    disabled = await people.call("owner", "PATCH", f"users/{user['id']}", {"state": "disabled"})
    assert disabled["state"] == "disabled"
    for method, path in (("GET", "caller"), ("GET", "me"), ("GET", "me/keys")):
        assert await people.refuse("ada", method, path) == (403, "user_disabled")
    people.tokens["ada"] = people.token("ada", moiety_roles=["owner"])
    assert await people.refuse("ada", "GET", "tenants") == (403, "user_disabled")  # claims do not help
    with pytest.raises(Forbidden, match="disabled") as refused:
        await people.authenticator.authenticate(f"Bearer {key}")
    assert refused.value.code == "user_disabled"
    assert await people.refuse("owner", "POST", f"users/{user['id']}/invitation") == (409, "user_disabled")
    await people.call("owner", "PATCH", f"users/{user['id']}", {"state": "active"})
    assert (await people.call("ada", "GET", "caller"))["role"] == "developer"
    await people.authenticator.authenticate(f"Bearer {key}")
    await people.call("owner", "DELETE", f"users/{user['id']}")
    with pytest.raises(Unauthenticated, match="revoked"):
        await people.authenticator.authenticate(f"Bearer {key}")


async def test_a_disabled_invitation_is_not_accepted(people: People, demo: Demo) -> None:
    user, invitation = await people.invite("ada", "developer", demo.tenant_id)
    await people.call("owner", "PATCH", f"users/{user['id']}", {"state": "disabled"})
    refused = await people.refuse("ada", "POST", "invitations/accept", {"invitation": invitation})
    assert refused == (410, "invitation_ended")
    enabled = await people.call("owner", "PATCH", f"users/{user['id']}", {"state": "active"})
    assert enabled["state"] == "invited"


async def test_a_person_with_several_roles_names_the_tenant(people: People, demo: Demo, other_tenant: str) -> None:
    await people.join("ada", "developer", demo.tenant_id)
    people.clock.advance(1)
    globex = await people.join("ada", "tenant-admin", other_tenant)
    assert (await people.call("ada", "GET", "caller"))["tenant_id"] == demo.tenant_id  # the oldest
    caller = await people.call("ada", "GET", "caller", tenant=other_tenant)
    assert (caller["role"], caller["tenant_id"]) == ("tenant-admin", other_tenant)
    assert {role["tenant_name"] for role in caller["roles"]} == {"acme", "globex"}
    assert await people.refuse("ada", "GET", "caller", tenant="ten_none") == (403, "tenant_unknown")
    _, again = await people.invite("ada2", "viewer", other_tenant)
    people.tokens["ada"] = people.token("ada", email="ada2@example.com")
    refused = await people.refuse("ada", "POST", "invitations/accept", {"invitation": again})
    assert refused == (409, "user_exists")
    await people.call("owner", "PATCH", f"users/{globex['id']}", {"state": "disabled", "everywhere": True})
    assert await people.refuse("ada", "GET", "caller") == (403, "user_disabled")
    assert await people.refuse("ada", "GET", "caller", tenant=demo.tenant_id) == (403, "user_disabled")


async def test_a_suspended_tenant_is_skipped_for_a_person_with_another_role(
    people: People, demo: Demo, other_tenant: str
) -> None:
    await people.join("ada", "developer", demo.tenant_id)
    people.clock.advance(1)
    await people.join("ada", "developer", other_tenant)
    await people.call("owner", "PATCH", f"tenants/{demo.tenant_id}", {"status": "suspended"})
    assert (await people.call("ada", "GET", "caller"))["tenant_id"] == other_tenant
    assert await people.refuse("ada", "GET", "caller", tenant=demo.tenant_id) == (403, "tenant_suspended")
    await people.call("owner", "PATCH", f"tenants/{other_tenant}", {"status": "suspended"})
    assert await people.refuse("ada", "GET", "caller") == (403, "tenant_suspended")


async def test_an_address_that_is_not_verified_does_not_restrict_an_invitation(people: People, demo: Demo) -> None:
    _, invitation = await people.invite("ada", "viewer", demo.tenant_id)
    body = {"invitation": invitation}
    for verified in (True, "true"):
        people.tokens["eve"] = people.token("eve", email_verified=verified)
        assert await people.refuse("eve", "POST", "invitations/accept", body) == (403, "invitation_invalid")
    people.tokens["eve"] = people.token("eve", email_verified="false")
    assert (await people.call("eve", "POST", "invitations/accept", body))["subject"] == "eve"


async def test_a_tenants_administrator_manages_its_developers_and_no_administrators(
    people: People, demo: Demo, other_tenant: str
) -> None:
    await people.join("boss", "tenant-admin", demo.tenant_id)
    foreign = await people.join("eve", "developer", other_tenant)
    new = {"email": "dev@example.com", "role": "developer", "tenant_id": demo.tenant_id}
    developer = await people.call("boss", "POST", "users", new, 201)
    await people.call("boss", "POST", f"users/{developer['id']}/invitation", expect=201)
    raise_role = {"role": "tenant-admin"}
    assert await people.refuse("boss", "PATCH", f"users/{developer['id']}", raise_role) == (403, "missing_role")
    assert (await people.call("owner", "GET", f"users/{developer['id']}"))["role"] == "developer"
    assert await people.refuse("boss", "POST", "users", {**new, "email": "x@y", **raise_role}) == (403, "missing_role")
    assert await people.refuse("boss", "GET", f"users/{foreign['id']}") == (404, "not_found")
    assert {user["email"] for user in (await people.call("boss", "GET", "users"))["data"]} == {
        "boss@example.com",
        "dev@example.com",
    }
    everywhere = {"state": "disabled", "everywhere": True}
    assert (await people.refuse("boss", "PATCH", f"users/{developer['id']}", everywhere))[0] == 400
    taken = {**new, "email": "DEV@example.com"}
    assert await people.refuse("owner", "POST", "users", taken) == (409, "user_exists")
    assert (await people.call("owner", "POST", "users", {**taken, "tenant_id": other_tenant}, 201))[
        "state"
    ] == "invited"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"email": "nobody"}, "email"),
        ({"email": "a b@c"}, "email"),
        ({"tenant_id": None}, "tenant_id"),
        ({"role": "owner"}, "tenant_id"),
        ({"role": "viewer", "project_ids": ["prj_x"]}, "project_ids"),
        ({"project_ids": []}, "project_ids"),
        ({"name": "a\nb"}, "name"),
    ],
)
async def test_bad_users_are_refused_with_the_field(
    people: People, demo: Demo, fields: dict[str, Any], param: str
) -> None:
    body = {"email": "a@example.com", "role": "developer", "tenant_id": demo.tenant_id, **fields}
    answer = await people.ask("owner", "POST", "users", body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_a_key_cannot_be_a_developer(people: People, demo: Demo) -> None:
    body = {"name": "k", "role": "developer", "tenant_id": demo.tenant_id}
    answer = await people.ask("owner", "POST", "keys", body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "role")


async def test_tokens_of_users_still_end(people: People, demo: Demo) -> None:
    await people.join("ada", "viewer", demo.tenant_id)
    people.tokens["ada"] = people.token("ada", exp=int(time.time()) - HOUR_S)
    assert await people.refuse("ada", "GET", "caller") == (401, "token_expired")
