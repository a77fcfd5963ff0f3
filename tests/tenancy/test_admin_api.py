"""The admin API over HTTP, on both databases."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from litestar import Litestar
from tests.usage_rows import make_row

from moiety_platform.auth.keys import parse_key
from moiety_platform.clock import ManualClock
from moiety_platform.db.session import Database
from moiety_platform.usage.store import insert_rows

from .conftest import Admin, Demo

ROUTES = [
    ("GET", "tenants"),
    ("POST", "tenants"),
    ("PATCH", "tenants/x"),
    ("GET", "projects"),
    ("POST", "projects"),
    ("GET", "keys"),
    ("POST", "keys"),
    ("POST", "keys/x/revoke"),
    ("POST", "keys/x/rotate"),
    ("GET", "usage"),
    ("GET", "usage/requests"),
    ("GET", "overview"),
    ("GET", "extra"),
    ("GET", "classes"),
    ("POST", "classes"),
    ("PATCH", "classes/x"),
    ("DELETE", "classes/x"),
]


async def test_no_route_is_open_to_anyone_but_administrators(app: Litestar, demo: Demo) -> None:
    async with Admin(app, "").http as stranger, Admin(app, demo.key).http as tenant:
        for method, path in ROUTES:
            assert (await stranger.request(method, path)).status_code == 401, path
            refused = await tenant.request(method, path)
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "missing_scope"), path


async def test_a_tenant_is_made_found_changed_and_suspended(admin: Admin, app: Litestar) -> None:
    made = await admin.call("POST", "tenants", 201, json={"name": "globex", "service_class": "priority"})
    assert (made["status"], made["weight"], made["service_class"]) == ("active", 1.0, "priority")
    assert await admin.call("GET", f"tenants/{made['id']}", 200) == made
    found = await admin.call("GET", "tenants", 200, params={"name": "globex"})
    assert found == {"data": [made], "next_cursor": None}
    changed = await admin.call("PATCH", f"tenants/{made['id']}", 200, json={"status": "suspended", "weight": 3})
    assert changed == {**made, "status": "suspended", "weight": 3.0}
    assert await admin.call("PATCH", f"tenants/{made['id']}", 200, json={}) == changed


async def test_a_name_is_taken_once(admin: Admin, demo: Demo) -> None:
    refused = await admin.call("POST", "tenants", 409, json={"name": "acme"})
    assert refused["error"]["code"] == "name_taken"
    other = await admin.call("POST", "tenants", 201, json={"name": "other"})
    for more in ({}, {"service_class": "flex", "weight": 2, "status": "suspended"}):
        await admin.call("PATCH", f"tenants/{other['id']}", 409, json={"name": "acme", **more})
    await admin.call("POST", "projects", 409, json={"tenant_id": demo.tenant_id, "name": "web"})
    await admin.call("POST", "projects", 201, json={"tenant_id": other["id"], "name": "web"})


async def test_a_key_is_shown_once_works_and_is_dead_at_once_when_revoked(
    admin: Admin, app: Litestar, demo: Demo, clock: ManualClock
) -> None:
    request: dict[str, Any] = {"name": "ci", "project_id": demo.project_id, "allowed_models": ["b", "a", "a"]}
    made = await admin.call("POST", "keys", 201, json=request)
    text, key = made["secret"], made["key"]
    assert parse_key(text) is not None
    assert key["hint"] == text[-4:]
    assert (key["scopes"], key["allowed_models"], key["status"]) == (["inference"], ["a", "b"], "active")
    listed = await admin.http.get("keys")
    assert text.split(".")[1] not in listed.text
    assert key in listed.json()["data"]
    async with Admin(app, text).http as tenant:
        assert (await tenant.get("overview")).status_code == 403  # authenticated
        revoked = await admin.call("POST", f"keys/{key['id']}/revoke", 200)
        assert revoked["status"] == "revoked"
        assert (await tenant.get("overview")).status_code == 401
    clock.advance(5)
    assert await admin.call("POST", f"keys/{key['id']}/revoke", 200) == revoked
    assert (await admin.call("POST", f"keys/{key['id']}/rotate", 409))["error"]["code"] == "key_not_active"


async def test_a_key_is_rotated_once_and_both_work_through_the_grace(admin: Admin, app: Litestar, demo: Demo) -> None:
    made = await admin.call("POST", f"keys/{demo.key_id}/rotate", 201, json={"grace_s": 60})
    old = await admin.call("GET", f"keys/{demo.key_id}", 200)
    assert old["replaced_by"] == made["key"]["id"]
    assert old["expires_at"] == "2026-01-01T00:01:00Z"
    assert made["key"]["project_id"] == demo.project_id
    for text in (demo.key, made["secret"]):
        async with Admin(app, text).http as tenant:
            assert (await tenant.get("overview")).status_code == 403
    assert (await admin.call("POST", f"keys/{demo.key_id}/rotate", 409))["error"]["code"] == "key_rotated"


async def test_rotating_without_a_grace_ends_the_old_key_at_once(admin: Admin, app: Litestar, demo: Demo) -> None:
    await admin.call("POST", f"keys/{demo.key_id}/rotate", 201, json={"grace_s": 0})
    async with Admin(app, demo.key).http as tenant:
        assert (await tenant.get("overview")).status_code == 401


async def test_administrators_cannot_lock_themselves_out(admin: Admin, demo: Demo, clock: ManualClock) -> None:
    soon = (clock.now() + timedelta(hours=1)).isoformat()
    refused = await admin.call("POST", f"keys/{demo.admin_key_id}/revoke", 409)
    assert refused["error"]["code"] == "last_admin_key"
    second = await admin.call("POST", "keys", 201, json={"name": "second", "role": "owner", "expires_at": soon})
    assert (second["key"]["scopes"], second["key"]["role"]) == (["admin"], "owner")
    clock.advance(7200)
    await admin.call("POST", f"keys/{demo.admin_key_id}/revoke", 409)
    await admin.call("POST", "keys", 201, json={"name": "third", "role": "operator"})
    await admin.call("POST", f"keys/{demo.admin_key_id}/revoke", 409)  # operators cannot make owners
    await admin.call("POST", "keys", 201, json={"name": "fourth", "role": "owner"})
    await admin.call("POST", f"keys/{demo.admin_key_id}/revoke", 200)


async def test_a_caller_learns_what_its_role_may_do(admin: Admin, app: Litestar, demo: Demo) -> None:
    me = await admin.call("GET", "caller", 200)
    assert (me["role"], me["tenant_id"], "admin_keys.write" in me["may"]) == ("owner", None, True)
    new: dict[str, Any] = {"name": "boss", "role": "tenant-admin", "tenant_id": demo.tenant_id}
    made = await admin.call("POST", "keys", 201, json=new)
    boss = Admin(app, made["secret"])
    async with boss.http:
        mine = await boss.call("GET", "caller", 200)
    assert (mine["role"], mine["tenant_id"]) == ("tenant-admin", demo.tenant_id)
    assert ("keys.write" in mine["may"], "tenants.write" in mine["may"]) == (True, False)


async def test_keys_and_projects_are_listed_by_tenant(admin: Admin, demo: Demo) -> None:
    other = await admin.call("POST", "tenants", 201, json={"name": "other"})
    project = await admin.call("POST", "projects", 201, json={"tenant_id": other["id"], "name": "p"})
    made = await admin.call("POST", "keys", 201, json={"name": "k", "project_id": project["id"]})
    assert (await admin.call("GET", "keys", 200, params={"tenant_id": other["id"]}))["data"] == [made["key"]]
    assert (await admin.call("GET", "keys", 200, params={"project_id": project["id"]}))["data"] == [made["key"]]
    assert (await admin.call("GET", "projects", 200, params={"tenant_id": other["id"]}))["data"] == [project]
    assert await admin.call("GET", f"projects/{project['id']}", 200) == project


BAD_REQUESTS: list[tuple[str, str, Any, int]] = [
    ("POST", "tenants", {}, 400),
    ("POST", "tenants", [], 400),
    ("POST", "tenants", {"name": ""}, 400),
    ("POST", "tenants", {"name": "x" * 101}, 400),
    ("POST", "tenants", {"name": "a\x00b"}, 400),
    ("POST", "tenants", {"name": "a\nb"}, 400),
    ("POST", "tenants", {"name": " a"}, 400),
    ("POST", "tenants", {"name": 7}, 400),
    ("POST", "tenants", {"name": None}, 400),
    ("POST", "tenants", {"name": "a", "nmae": "b"}, 400),
    ("POST", "tenants", {"name": "a", "weight": 0}, 400),
    ("POST", "tenants", {"name": "a", "weight": -1}, 400),
    ("POST", "tenants", {"name": "a", "weight": 1e300}, 400),
    ("POST", "tenants", {"name": "a", "weight": "heavy"}, 400),
    ("POST", "tenants", {"name": "a", "weight": "2"}, 400),
    ("POST", "tenants", {"name": "a", "service_class": "gold"}, 400),
    ("PATCH", "tenants/{tenant}", {"status": "asleep"}, 400),
    ("PATCH", "tenants/{tenant}", {"status": None}, 400),
    ("PATCH", "tenants/nobody", {"weight": 2}, 404),
    ("GET", "tenants/nobody", None, 404),
    ("GET", "tenants/" + "x" * 5000, None, 404),
    ("GET", "tenants/%00", None, 404),
    ("GET", "tenants/%F0%9F%99%82", None, 404),
    ("GET", "tenants/%FF%FE", None, 404),
    ("GET", "tenants?limit=0", None, 400),
    ("GET", "tenants?limit=501", None, 400),
    ("GET", "tenants?limit=many", None, 400),
    ("GET", "tenants?limit=null", None, 400),
    ("GET", "keys?role=null", None, 400),
    ("GET", "usage?since=0", None, 400),
    ("GET", "tenants?limit=99999999999999999999999", None, 400),
    ("GET", "tenants?cursor=%00", None, 400),
    ("GET", "tenants?cursor=AAAA", None, 400),
    ("GET", "tenants?cursor=" + "A" * 3000, None, 400),
    ("GET", "tenants?cursor=OTk5OTk5OTk5OTk5OTk5OTk5OTk5OTphYmM", None, 400),
    ("GET", "tenants?name=%00", None, 400),
    ("POST", "projects", {"tenant_id": "nobody", "name": "p"}, 404),
    ("POST", "projects", {"tenant_id": "{tenant}", "name": ""}, 400),
    ("POST", "projects", {"tenant_id": {"$ne": 1}, "name": "p"}, 400),
    ("GET", "projects?tenant_id=nobody", None, 404),
    ("GET", "projects/nobody", None, 404),
    ("POST", "keys", {"name": "k", "project_id": "nobody"}, 404),
    ("POST", "keys", {"name": "k", "project_id": "{project}", "scopes": ["admin"]}, 400),
    ("POST", "keys", {"name": "k"}, 400),
    ("POST", "keys", {"name": "k", "role": "king"}, 400),
    ("POST", "keys", {"name": "k", "role": "owner", "tenant_id": "{tenant}"}, 400),
    ("POST", "keys", {"name": "k", "role": "operator", "tenant_id": "{tenant}"}, 400),
    ("POST", "keys", {"name": "k", "role": "tenant-admin"}, 400),
    ("POST", "keys", {"name": "k", "role": "viewer", "tenant_id": "nobody"}, 404),
    ("POST", "keys", {"name": "k", "role": "viewer", "project_id": "{project}"}, 400),
    ("POST", "keys", {"name": "k", "tenant_id": "{tenant}", "project_id": "{project}"}, 400),
    ("POST", "keys", {"name": "k", "role": "owner", "scopes": ["inference"]}, 400),
    ("POST", "keys", {"name": "k", "role": "owner", "scopes": []}, 400),
    ("POST", "keys", {"name": "k", "role": "viewer", "scopes": ["admin"]}, 400),
    ("POST", "keys", {"name": "k", "role": "owner", "expires_at": "2020-01-01T00:00:00Z"}, 400),
    ("POST", "keys", {"name": "k", "role": "owner", "expires_at": "2030-01-01T00:00:00"}, 400),
    ("POST", "keys", {"name": "k", "role": "owner", "expires_at": "tomorrow"}, 400),
    ("GET", "keys?role=king", None, 400),
    ("POST", "keys", {"name": "k", "project_id": "{project}", "allowed_models": []}, 400),
    ("POST", "keys", {"name": "k", "project_id": "{project}", "allowed_models": ["\x00"]}, 400),
    ("POST", "keys", {"name": "k", "project_id": "{project}", "allowed_models": ["m"] * 101}, 400),
    ("GET", "keys/nobody", None, 404),
    ("POST", "keys/nobody/revoke", None, 404),
    ("POST", "keys/nobody/rotate", None, 404),
    ("POST", "keys/{key}/rotate", {"grace_s": -1}, 400),
    ("POST", "keys/{key}/rotate", {"grace_s": 10**30}, 400),
    ("GET", "usage?group_by=colour", None, 400),
    ("GET", "usage?group_by=hour,hour", None, 400),
    ("GET", "usage?since=yesterday", None, 400),
    ("GET", "usage?since=2026-01-01T00:00:00", None, 400),
    ("GET", "usage?since=2026-01-02T00:00:00Z&until=2026-01-01T00:00:00Z", None, 400),
    ("GET", "usage?until=0001-01-01T00:00:00Z", None, 400),
    ("GET", "usage?until=0001-01-01T00:00:00%2B14:00", None, 400),
    ("GET", "usage?tenant_id=%00", None, 400),
    ("GET", "usage/requests?model=" + "m" * 300, None, 400),
]


async def test_bad_input_is_refused_with_a_reason_and_never_a_500(admin: Admin, demo: Demo) -> None:
    names = {"{tenant}": demo.tenant_id, "{project}": demo.project_id, "{key}": demo.key_id}
    wrong: list[str] = []
    for method, pattern, body, status in BAD_REQUESTS:
        path, options = pattern, {}
        for name, value in names.items():
            path = path.replace(name, value)
        if isinstance(body, dict):
            options["json"] = {
                field: names.get(given, given) if isinstance(given, str) else given for field, given in body.items()
            }
        elif body is not None:
            options["json"] = body
        response = await admin.http.request(method, path, **options)
        if response.status_code != status or not response.json()["error"]["message"]:
            wrong.append(f"{method} {pattern[:80]} {body}: {response.status_code} {response.text[:200]}")
    assert wrong == []


@pytest.mark.parametrize("path", ["tenants", "projects", "keys"])
async def test_bodies_that_are_not_what_they_should_be_are_refused(admin: Admin, path: str) -> None:
    for body in (b"", b"{", b"\xff\xfe", b'{"name": "\\ud800"}', b'{"weight": NaN, "name": "a"}', b"0", b"null"):
        response = await admin.http.post(path, content=body, headers={"Content-Type": "application/json"})
        assert response.status_code == 400, (body, response.text)
        assert response.json()["error"]["message"]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.text(max_size=130), weight=st.one_of(st.floats(allow_nan=False, allow_infinity=False), st.integers()))
async def test_tenants_are_created_with_any_valid_name_and_weight_or_refused(
    admin: Admin, name: str, weight: float
) -> None:
    response = await admin.http.post("tenants", json={"name": name, "weight": weight})
    assert response.status_code in {201, 400, 409}, response.text
    if response.status_code == 201:
        assert response.json()["name"] == name
        assert (await admin.http.get(f"tenants?name={quote(name)}")).json()["data"] == [response.json()]


async def test_pages_together_hold_every_tenant_once_in_order(admin: Admin, clock: ManualClock, demo: Demo) -> None:
    made = [demo.tenant_id]
    for number in range(9):
        clock.advance(number % 3)  # some are made at the same moment
        made.append((await admin.call("POST", "tenants", 201, json={"name": f"t{number}"}))["id"])
    for limit in (1, 3, 7, 10, 100):
        seen: list[dict[str, str]] = []
        parameters: dict[str, Any] = {"limit": limit}
        while True:
            page = await admin.call("GET", "tenants", 200, params=parameters)
            assert len(page["data"]) <= limit
            seen += page["data"]
            if page["next_cursor"] is None:
                break
            parameters["cursor"] = page["next_cursor"]
        assert sorted(tenant["id"] for tenant in seen) == sorted(made)
        assert [tenant["created_at"] for tenant in seen] == sorted(tenant["created_at"] for tenant in seen)


@pytest.fixture
async def usage(database: Database, demo: Demo, clock: ManualClock) -> None:
    """Twelve requests: six in each of two hours, of two models, three of them not well ended."""
    rows = []
    for number in range(12):
        outcome = {3: "failed", 4: "rejected", 5: "disconnected"}.get(number, "stop")
        rows.append(
            make_row(
                f"r{number:02}",
                tenant_id=demo.tenant_id,
                project_id=demo.project_id,
                key_id=demo.key_id,
                model="m1" if number % 2 else "m2",
                started_at=clock.now() - timedelta(minutes=90 if number < 6 else 30),
                outcome=outcome,
                ttft_ms=None if outcome == "rejected" else 10.0 + number,
                num_preemptions=number % 4 if number < 8 else 0,
                slo_attained=None if outcome == "disconnected" else outcome == "stop" and number > 0,
            )
        )
    async with database.write() as session:
        await insert_rows(session, rows)


@pytest.mark.usefixtures("usage")
async def test_usage_sums_by_any_grouping(admin: Admin, demo: Demo) -> None:
    (total,) = (await admin.call("GET", "usage", 200))["data"]
    assert total["group"] == {}
    assert total["totals"] == {
        "requests": 12,
        "failed": 1,
        "rejected": 1,
        "disconnected": 1,
        "prompt_tokens": 120,
        "cached_tokens": 48,
        "output_tokens": 84,
        "mean_ttft_ms": pytest.approx(sum(10 + n for n in range(12) if n != 4) / 11),
        "mean_duration_ms": 40.0,
        "preemptions": 12,
        "cost_nanodollars": 0,
        "attainment": pytest.approx(8 / 11),
        "speculative_tokens": 0,
        "speculative_used_tokens": 0,
        "credit_nanodollars": 0,
        "num_guarantees": 0,
        "num_guarantees_met": 0,
        "expert_read_bytes": 0,
        "expert_moved_bytes": 0,
    }
    by_tenant = (await admin.call("GET", "usage", 200, params={"group_by": "tenant"}))["data"]
    assert [part["group"] for part in by_tenant] == [{"tenant_id": demo.tenant_id, "tenant_name": "acme"}]
    by_key = (await admin.call("GET", "usage", 200, params={"group_by": "key"}))["data"]
    assert by_key[0]["group"] == {"key_id": demo.key_id, "key_name": "k"}
    grouped = (await admin.call("GET", "usage", 200, params={"group_by": "model,hour"}))["data"]
    assert [(part["group"]["hour"], part["group"]["model"], part["totals"]["requests"]) for part in grouped] == [
        ("2025-12-31T22:00:00Z", "m1", 3),
        ("2025-12-31T22:00:00Z", "m2", 3),
        ("2025-12-31T23:00:00Z", "m1", 3),
        ("2025-12-31T23:00:00Z", "m2", 3),
    ]
    filtered = (await admin.call("GET", "usage", 200, params={"model": "m1", "since": "2025-12-31T23:00:00Z"}))["data"]
    assert filtered[0]["totals"]["requests"] == 3


@pytest.mark.usefixtures("usage")
async def test_requests_are_listed_newest_first_each_once(admin: Admin, demo: Demo) -> None:
    seen: list[str] = []
    parameters: dict[str, Any] = {"limit": 5, "tenant_id": demo.tenant_id}
    for _ in range(3):
        page = await admin.call("GET", "usage/requests", 200, params=parameters)
        seen += [request["request_id"] for request in page["data"]]
        parameters["cursor"] = page["next_cursor"]
    assert page["next_cursor"] is None
    assert seen == [f"r{number:02}" for number in (*range(11, 5, -1), *range(5, -1, -1))]
    failed = await admin.call("GET", "usage/requests", 200, params={"outcome": "failed"})
    assert [request["request_id"] for request in failed["data"]] == ["r03"]


async def test_usage_of_nothing_is_zero(admin: Admin) -> None:
    (total,) = (await admin.call("GET", "usage", 200))["data"]
    assert total["totals"]["requests"] == total["totals"]["output_tokens"] == 0
    assert total["totals"]["mean_ttft_ms"] is None
    assert (await admin.call("GET", "usage", 200, params={"group_by": "tenant"}))["data"] == []


@pytest.mark.usefixtures("usage")
async def test_the_overview_counts(admin: Admin) -> None:
    overview = await admin.call("GET", "overview", 200)
    assert (overview["tenants_active"], overview["tenants_suspended"], overview["projects"]) == (1, 0, 1)
    assert (overview["keys_active"], overview["keys_total"]) == (2, 2)
    assert overview["last_hour"]["requests"] == 6
    assert overview["last_24_hours"]["requests"] == 12


@pytest.mark.parametrize("question", ["usage", "usage/requests"])
@pytest.mark.parametrize(
    "parameters",
    [{"since": "0001-01-01T00:00:00+14:00"}, {"until": "9999-12-31T23:59:59-14:00"}, {"since": "2026-01-01T00:00:00"}],
    ids=repr,
)
async def test_a_time_that_utc_cannot_hold_is_refused(admin: Admin, question: str, parameters: dict[str, str]) -> None:
    answer = await admin.call("GET", question, 400, params=parameters)
    assert answer["error"]["param"] == next(iter(parameters))


async def test_an_end_of_a_key_that_utc_cannot_hold_is_refused(admin: Admin) -> None:
    body: dict[str, Any] = {"name": "k", "role": "owner", "expires_at": "9999-12-31T23:59:59-14:00"}
    answer = await admin.call("POST", "keys", 400, json=body)
    assert answer["error"]["param"] == "expires_at"


@pytest.mark.parametrize("route", ["tenants", "projects", "keys", "keys/x/rotate"])
@pytest.mark.parametrize(
    "body", [b"[" * 100_000, b'{"name":' * 50_000 + b"1" + b"}" * 50_000], ids=["lists", "objects"]
)
async def test_a_deeply_nested_body_is_refused(admin: Admin, route: str, body: bytes) -> None:
    answer = await admin.call("POST", route, 400, content=body, headers={"Content-Type": "application/json"})
    assert answer["error"]["code"] == "json_too_deep"
