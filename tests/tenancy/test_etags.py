"""ETag and If-Match of the admin API prevent lost updates, on both databases."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from .conftest import Admin

JSON = dict[str, Any]


async def put_quota(admin: Any, demo: Any, cap: int = 5) -> JSON:
    limit = {"level": "tenant", "scope_id": demo.tenant_id, "kind": "tokens_per_day", "cap": cap}
    made: JSON = await admin.call("PUT", "quotas", 200, json=limit)
    return made


async def tag_of(admin: Any, path: str) -> str:
    response = await admin.http.get(path)
    assert response.status_code == 200, response.text
    tag: str = response.headers["etag"]
    assert tag.startswith('"') and tag.endswith('"') and len(tag) > 10
    return tag


async def send(admin: Any, method: str, path: str, if_match: str | None, fields: JSON | None = None) -> tuple[int, str]:
    """The status, and the error's code if it is one."""
    headers = {} if if_match is None else {"If-Match": if_match}
    response = await admin.http.request(method, path, json=fields, headers=headers)
    return response.status_code, response.json().get("error", {}).get("code", "")


FAILED = (412, "precondition_failed")


async def objects(admin: Any, demo: Any) -> list[tuple[str, str, str, JSON | None]]:
    """An object of each kind, and a change to it: (path, method, path of the change, body)."""
    quota = await put_quota(admin, demo)
    price = {"model": "org/m", "input": "1", "output": "2"}
    await admin.call("PUT", "prices", 200, json=price)
    await admin.call("POST", "classes", 201, json={"name": "gold", "rank": 0, "ttft_s": 1.0})
    gold, of_price = "classes/gold", "prices/one?model=org/m"
    tenant, of_quota = f"tenants/{demo.tenant_id}", f"quotas/{quota['id']}"
    limit = {name: quota[name] for name in ("level", "scope_id", "kind")}
    return [
        (tenant, "PATCH", tenant, {"weight": 3.0}),
        (gold, "PATCH", gold, {"price_factor": 2.0}),
        (gold, "DELETE", gold, None),
        (of_quota, "PUT", "quotas", {**limit, "cap": 6}),
        (of_quota, "DELETE", of_quota, None),
        (of_price, "PUT", "prices", {**price, "input": "3"}),
        (of_price, "DELETE", "prices?model=org/m", None),
        (f"keys/{demo.key_id}", "POST", f"keys/{demo.key_id}/rotate", {"grace_s": 60}),
        (f"keys/{demo.key_id}", "POST", f"keys/{demo.key_id}/revoke", None),
    ]


async def test_a_change_with_another_tag_is_refused_and_changes_nothing(admin: Any, demo: Any) -> None:
    for path, method, change, fields in await objects(admin, demo):
        tag = await tag_of(admin, path)
        for wrong in ('"0123456789abcdef"', "nonsense", "", f"W/{tag}", f'"a", "b{tag[1:]}'):
            assert await send(admin, method, change, wrong, fields) == FAILED, (change, wrong)
            assert await tag_of(admin, path) == tag
        assert (await send(admin, method, change, f'"another", {tag}', fields))[0] in (200, 201)
        after = await admin.http.get(path)
        assert after.status_code == 404 if method == "DELETE" else after.headers["etag"] != tag
        if method != "DELETE":
            assert await send(admin, method, change, tag, fields) == FAILED


async def test_without_a_condition_or_with_any_tag_a_change_is_made(admin: Any, demo: Any) -> None:
    path = f"tenants/{demo.tenant_id}"
    assert await send(admin, "PATCH", path, None, {"weight": 3.0}) == (200, "")
    assert await send(admin, "PATCH", path, "*", {"weight": 4.0}) == (200, "")
    project = f"projects/{demo.project_id}"
    assert await tag_of(admin, project) == await tag_of(admin, project)


async def test_a_missing_object_matches_no_etag(admin: Any, demo: Any) -> None:
    limit = {"level": "tenant", "scope_id": demo.tenant_id, "kind": "tokens_per_day", "cap": 5}
    price = {"model": "m", "input": "1", "output": "2"}
    for path, fields in (("quotas", limit), ("prices", price)):
        assert await send(admin, "PUT", path, "*", fields) == FAILED
        assert (await admin.call("GET", path, 200))["data"] == []
    assert await send(admin, "DELETE", "quotas/quo_x", "*") == (404, "not_found")
    for model in ("m", "%00", "x" * 1000):
        assert await send(admin, "GET", f"prices/one?model={model}", None) == (404, "not_found")
        assert await send(admin, "DELETE", f"prices?model={model}&service_class=%00", None) == (404, "not_found")


async def test_a_tag_does_not_change_with_what_changes_by_itself(admin: Any, demo: Any, clock: Any) -> None:
    quota = await put_quota(admin, demo)
    made = await admin.call("POST", "keys", 201, json={
        "name": "brief", "project_id": demo.project_id, "expires_at": "2026-01-01T00:00:10Z"})  # fmt: skip
    paths = [f"quotas/{quota['id']}", f"keys/{made['key']['id']}"]
    before = [await tag_of(admin, path) for path in paths]
    clock.advance(3 * 24 * 3600)  # the key expires, the limit's window is another
    assert [await tag_of(admin, path) for path in paths] == before


async def test_an_answer_to_a_change_has_the_tag_for_the_next(admin: Any, demo: Any) -> None:
    path = f"tenants/{demo.tenant_id}"
    tag = await tag_of(admin, path)
    for weight in (3.0, 4.0):
        response = await admin.http.patch(path, json={"weight": weight}, headers={"If-Match": tag})
        assert response.status_code == 200
        tag = response.headers["etag"]
    assert tag == await tag_of(admin, path)


async def test_a_tenants_own_administrator_is_held_to_tags_and_sees_none_of_others(
    app: Any, admin: Any, demo: Any
) -> None:
    other = await admin.call("POST", "tenants", 201, json={"name": "globex"})
    project = await admin.call("POST", "projects", 201, json={"tenant_id": other["id"], "name": "theirs"})
    new = {"name": "own", "role": "tenant-admin", "tenant_id": other["id"]}
    own = Admin(app, (await admin.call("POST", "keys", 201, json=new))["secret"])
    limit = {"level": "project", "scope_id": project["id"], "kind": "tokens_per_day"}
    of_tenant = await put_quota(admin, demo)
    async with own.http:
        made = await own.call("PUT", "quotas", 200, json={**limit, "cap": 5})
        path = f"quotas/{made['id']}"
        tag = await tag_of(own, path)
        assert tag == await tag_of(admin, path)
        assert await send(own, "PUT", "quotas", '"another"', {**limit, "cap": 6}) == FAILED
        assert await send(own, "PUT", "quotas", tag, {**limit, "cap": 6}) == (200, "")
        assert await send(own, "DELETE", path, tag) == FAILED
        assert await send(own, "DELETE", path, await tag_of(own, path)) == (200, "")
        for theirs in (f"quotas/{of_tenant['id']}", f"keys/{demo.key_id}"):
            method, change = ("DELETE", theirs) if "quotas" in theirs else ("POST", f"{theirs}/revoke")
            for condition in ("*", '"another"', await tag_of(admin, theirs)):
                assert await send(own, method, change, condition) == (404, "not_found"), theirs
        their_limit = {"level": "tenant", "scope_id": other["id"], "kind": "tokens_per_day", "cap": 5}
        tenants_own = await admin.call("PUT", "quotas", 200, json=their_limit)
        assert await send(own, "DELETE", f"quotas/{tenants_own['id']}", '"another"') == (403, "missing_role")


@pytest.mark.parametrize("num_at_once", [8])
async def test_one_of_several_concurrent_changes_with_one_etag_succeeds(
    admin: Any, demo: Any, num_at_once: int
) -> None:
    quota = await put_quota(admin, demo)
    limit = {name: quota[name] for name in ("level", "scope_id", "kind")}
    for path, method, change, field in [
        (f"tenants/{demo.tenant_id}", "PATCH", f"tenants/{demo.tenant_id}", "weight"),
        (f"quotas/{quota['id']}", "PUT", "quotas", "cap"),
    ]:
        tag = await tag_of(admin, path)
        base = limit if field == "cap" else {}
        sent = [send(admin, method, change, tag, {**base, field: 10 + number}) for number in range(num_at_once)]
        found = await asyncio.gather(*sent)
        assert sorted(found) == [(200, "")] + [FAILED] * (num_at_once - 1)
        assert await tag_of(admin, path) != tag
