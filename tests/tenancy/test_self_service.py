# ruff: noqa: F811  fixtures are imported
"""Self-service: a developer makes keys within the policy of its tenant, and sees its own projects and keys only."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from tests.usage_rows import make_row

from moiety_platform.auth.schemas import NewKey
from moiety_platform.auth.service import create_key
from moiety_platform.clock import ManualClock
from moiety_platform.db.session import Database
from moiety_platform.tenants.schemas import NewProject, NewTenant
from moiety_platform.tenants.service import create_project, create_tenant
from moiety_platform.usage.store import insert_rows

from .conftest import PEPPER, Demo
from .people import People, people  # noqa: F401  a fixture

DAY_S = 86_400


@pytest.fixture
async def projects(database: Database, clock: ManualClock, demo: Demo) -> dict[str, str]:
    """Projects by name: `search` of the developers' tenant, and `theirs` of another."""
    async with database.write() as session:
        search = await create_project(session, NewProject(demo.tenant_id, "search"), clock.now())
        other = await create_tenant(session, NewTenant(name="globex"), clock.now())
        theirs = await create_project(session, NewProject(other.id, "theirs"), clock.now())
    return {"web": demo.project_id, "search": search.id, "theirs": theirs.id, "globex": other.id}


async def test_without_a_policy_developers_make_no_keys(people: People, demo: Demo) -> None:
    await people.join("ada", "developer", demo.tenant_id)
    assert (await people.call("ada", "GET", "me"))["key_policy"] is None
    body = {"name": "k", "project_id": demo.project_id}
    assert await people.refuse("ada", "POST", "me/keys", body) == (403, "key_policy")
    await people.call("owner", "PUT", "key-policies", {"tenant_id": demo.tenant_id, "makes_keys": False})
    assert await people.refuse("ada", "POST", "me/keys", body) == (403, "key_policy")


async def test_a_key_gets_the_most_that_the_policy_allows_and_never_more(
    people: People, demo: Demo, clock: ManualClock
) -> None:
    policy = {
        "tenant_id": demo.tenant_id, "max_keys": 3, "max_days": 30, "allowed_models": ["small", "large"],
        "limits": {"tokens_per_day": 1000, "money_per_month": 5_000_000_000},
    }  # fmt: skip
    await people.call("owner", "PUT", "key-policies", policy)
    user = await people.join("ada", "developer", demo.tenant_id)
    body = {"name": "k", "project_id": demo.project_id}
    made = await people.call("ada", "POST", "me/keys", body, 201)
    key = made["key"]
    assert (key["user_id"], key["allowed_models"], key["scopes"]) == (user["id"], ["large", "small"], ["inference"])
    assert key["expires_at"] == (clock.now() + timedelta(days=30)).isoformat().replace("+00:00", "Z")
    for more in (
        {"allowed_models": ["huge"]},
        {"expires_at": (clock.now() + timedelta(days=31)).isoformat()},
        {"limits": {"tokens_per_day": 1001}},
    ):
        assert (await people.refuse("ada", "POST", "me/keys", {**body, **more}))[0] == 400, more
    assert (await people.refuse("ada", "POST", "me/keys", {**body, "scopes": ["admin"]}))[0] == 400
    clock.advance(1)
    less = {"allowed_models": ["small"], "limits": {"tokens_per_day": 10, "requests_per_minute": 2}}
    await people.call("ada", "POST", "me/keys", {**body, **less}, 201)
    (first, second) = (await people.call("ada", "GET", "me/keys"))["data"]
    assert first["details"]["limits"] == {"money_per_month": 5_000_000_000, "tokens_per_day": 1000}
    assert second["details"]["limits"] == {
        "money_per_month": 5_000_000_000,
        "requests_per_minute": 2,
        "tokens_per_day": 10,
    }
    principal = await people.authenticator.authenticate(f"Bearer {made['secret']}")
    assert principal.allowed_models == frozenset({"large", "small"})


async def test_a_developer_has_at_most_the_keys_that_the_policy_allows_however_it_asks(
    people: People, demo: Demo, clock: ManualClock
) -> None:
    await people.call("owner", "PUT", "key-policies", {"tenant_id": demo.tenant_id, "max_keys": 2})
    await people.join("ada", "developer", demo.tenant_id)
    body = {"name": "k", "project_id": demo.project_id}
    answers = await asyncio.gather(*(people.ask("ada", "POST", "me/keys", body) for _ in range(5)))
    assert sorted(answer.status_code for answer in answers) == [201, 201, 409, 409, 409]
    mine = (await people.call("ada", "GET", "me/keys"))["data"]
    rotated = await people.call("ada", "POST", f"me/keys/{mine[0]['id']}/rotate", {"grace_s": 60}, 201)
    assert rotated["key"]["user_id"] == mine[0]["user_id"]
    assert (await people.call("ada", "GET", "me"))["num_active_keys"] == 3, "the rotated key works for a minute"
    await people.call("ada", "POST", f"me/keys/{mine[1]['id']}/revoke")
    assert await people.refuse("ada", "POST", "me/keys", body) == (409, "too_many_keys")
    clock.advance(61)
    assert (await people.call("ada", "GET", "me"))["num_active_keys"] == 1
    await people.call("ada", "POST", "me/keys", body, 201)


async def test_rotations_do_not_give_a_developer_more_keys_than_one_beyond_the_policy(
    people: People, demo: Demo, clock: ManualClock
) -> None:
    await people.call("owner", "PUT", "key-policies", {"tenant_id": demo.tenant_id, "max_keys": 1})
    await people.join("ada", "developer", demo.tenant_id)
    made = await people.call("ada", "POST", "me/keys", {"name": "k", "project_id": demo.project_id}, 201)
    grace = {"grace_s": 30 * DAY_S}
    rotated = await people.call("ada", "POST", f"me/keys/{made['key']['id']}/rotate", grace, 201)
    newest = rotated["key"]["id"]
    assert await people.refuse("ada", "POST", f"me/keys/{newest}/rotate", grace) == (409, "too_many_keys")
    for secret in (made["secret"], rotated["secret"]):
        await people.authenticator.authenticate(f"Bearer {secret}")
    await people.call("ada", "POST", f"me/keys/{made['key']['id']}/revoke")
    clock.advance(1)
    answers = await asyncio.gather(*(people.ask("ada", "POST", f"me/keys/{newest}/rotate", grace) for _ in range(3)))
    assert sorted(answer.status_code for answer in answers) == [201, 409, 409]
    await people.call("owner", "PUT", "key-policies", {"tenant_id": demo.tenant_id, "max_keys": 0})
    clock.advance(31 * DAY_S)
    (last,) = [key for key in (await people.call("ada", "GET", "me/keys"))["data"] if key["status"] == "active"]
    assert await people.refuse("ada", "POST", f"me/keys/{last['id']}/rotate") == (409, "too_many_keys")


async def test_a_key_beyond_a_stricter_policy_is_not_rotated_but_can_be_revoked(people: People, demo: Demo) -> None:
    await people.call("owner", "PUT", "key-policies", {"tenant_id": demo.tenant_id})
    await people.join("ada", "developer", demo.tenant_id)
    key = (await people.call("ada", "POST", "me/keys", {"name": "k", "project_id": demo.project_id}, 201))["key"]
    for stricter in ({"allowed_models": ["small"]}, {"max_days": 1}, {"makes_keys": False}):
        await people.call("owner", "PUT", "key-policies", {"tenant_id": demo.tenant_id, **stricter})
        assert await people.refuse("ada", "POST", f"me/keys/{key['id']}/rotate") == (403, "key_policy"), stricter
    assert (await people.call("ada", "POST", f"me/keys/{key['id']}/revoke"))["status"] == "revoked"


async def test_a_developer_reaches_its_projects_and_own_keys_only(
    people: People, demo: Demo, projects: dict[str, str], database: Database, clock: ManualClock
) -> None:
    await people.call("owner", "PUT", "key-policies", {"tenant_id": demo.tenant_id})
    await people.call("owner", "PUT", "key-policies", {"tenant_id": projects["globex"]})
    await people.join("ada", "developer", demo.tenant_id, project_ids=[projects["web"]])
    await people.join("bob", "developer", demo.tenant_id)
    await people.join("eve", "developer", projects["globex"])
    rows = [
        make_row(f"r-{name}", tenant_id=tenant, project_id=projects[name], model=f"{name}-model",
                 started_at=clock.now(), key_id=demo.key_id)
        for name, tenant in (("web", demo.tenant_id), ("search", demo.tenant_id), ("theirs", projects["globex"]))
    ]  # fmt: skip
    async with database.write() as session:
        await insert_rows(session, rows)
    bobs = (await people.call("bob", "POST", "me/keys", {"name": "b", "project_id": projects["web"]}, 201))["key"]["id"]
    clock.advance(1)
    for who, reached in (("ada", {"web"}), ("bob", {"web", "search"}), ("eve", {"theirs"})):
        shown = (await people.call(who, "GET", "me/projects"))["data"]
        assert {project["name"] for project in shown} == reached
        assert all(project["month"]["requests"] == 1 for project in shown)
        usage = await people.call(who, "GET", "me/usage", group_by="model")
        assert {group["group"]["model"] for group in usage["data"]} == {f"{name}-model" for name in reached}
        for name in {"web", "search", "theirs"} - reached:
            body = {"name": "k", "project_id": projects[name]}
            assert await people.refuse(who, "POST", "me/keys", body) == (404, "not_found")
    for who in ("ada", "eve"):
        assert (await people.call(who, "GET", "me/keys"))["data"] == []
        for key_id in (bobs, demo.key_id):
            for action in ("rotate", "revoke"):
                assert await people.refuse(who, "POST", f"me/keys/{key_id}/{action}") == (404, "not_found")
    assert (await people.refuse("ada", "GET", "me/usage", group_by="key"))[0] == 400
    for path in ("tenants", "projects", "keys", "users", "usage", "requests", "quotas", "overview", "spend", "audit"):
        assert await people.refuse("ada", "GET", path) == (403, "missing_role"), path


async def test_keys_beyond_the_new_rights_of_a_user_are_revoked(
    people: People, demo: Demo, projects: dict[str, str]
) -> None:
    await people.call("owner", "PUT", "key-policies", {"tenant_id": demo.tenant_id})
    user = await people.join("ada", "developer", demo.tenant_id)
    for name in ("web", "search"):
        await people.call("ada", "POST", "me/keys", {"name": name, "project_id": projects[name]}, 201)

    async def active() -> set[str]:
        keys = (await people.call("owner", "GET", "keys", user_id=user["id"]))["data"]
        return {key["name"] for key in keys if key["status"] == "active"}

    assert await active() == {"web", "search"}
    await people.call("owner", "PATCH", f"users/{user['id']}", {"project_ids": [projects["web"]]})
    assert await active() == {"web"}
    foreign = {"project_ids": [projects["theirs"]]}
    assert (await people.refuse("owner", "PATCH", f"users/{user['id']}", foreign))[0] == 400
    await people.call("owner", "PATCH", f"users/{user['id']}", {"role": "viewer"})
    assert await active() == set()


async def test_details_of_a_key_are_its_last_use_cost_and_quotas(
    people: People, demo: Demo, database: Database, clock: ManualClock
) -> None:
    now = clock.now()
    rows = [
        make_row(f"r{number}", tenant_id=demo.tenant_id, project_id=demo.project_id, key_id=demo.key_id,
                 started_at=now + timedelta(seconds=number), cost_nanodollars=7)
        for number in range(3)
    ]  # fmt: skip
    async with database.write() as session:
        await insert_rows(session, rows)
        unused, _ = await create_key(session, NewKey("unused", demo.project_id), PEPPER, now)
    body = {"name": "limited", "project_id": demo.project_id, "limits": {"tokens_per_day": 9}}
    limited = (await people.call("owner", "POST", "keys", body, 201))["key"]["id"]
    clock.advance(DAY_S)
    listed = await people.call("owner", "GET", "keys", project_id=demo.project_id, details="true")
    details: dict[str, Any] = {key["id"]: key["details"] for key in listed["data"]}
    last = (now + timedelta(seconds=2)).isoformat().replace("+00:00", "Z")
    assert details[demo.key_id] == {
        "last_used_at": last,
        "month_requests": 3,
        "month_cost_nanodollars": 21,
        "limits": {},
    }
    assert details[unused.id]["last_used_at"] is None
    assert details[limited]["limits"] == {"tokens_per_day": 9}
    rotated = (await people.call("owner", "POST", f"keys/{limited}/rotate", expect=201))["key"]["id"]
    one = await people.call("owner", "GET", f"keys/{rotated}", details="true")
    assert one["details"]["limits"] == {"tokens_per_day": 9}
    assert (await people.call("owner", "GET", f"keys/{rotated}"))["details"] is None
    assert (await people.refuse("owner", "GET", "keys", details="yes"))[0] == 400


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_keys": -1}, "max_keys"),
        ({"max_days": 0}, "max_days"),
        ({"allowed_models": []}, "allowed_models"),
        ({"limits": {"tokens_per_day": -1}}, "limits"),
    ],
)
async def test_bad_policies_are_refused_with_the_field(
    people: People, demo: Demo, fields: dict[str, Any], param: str
) -> None:
    answer = await people.ask("owner", "PUT", "key-policies", {"tenant_id": demo.tenant_id, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
