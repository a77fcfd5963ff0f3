"""Access of every role to every endpoint of the admin API, with objects of its own and of another tenant.

The routes are the application's own: a route that `admin_api_access.ASKS` lacks fails the test."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from litestar import Litestar, get
from litestar.routes import HTTPRoute
from sqlalchemy import update

from moiety_platform.administration.router import ADMIN_PATH
from moiety_platform.auth.guard import UnguardedRoute
from moiety_platform.clock import ManualClock
from moiety_platform.db.session import Database
from moiety_platform.inference.shape_limits import DEFAULT_SHAPE
from moiety_platform.openapi.documents import DocumentPart, make_document
from moiety_platform.trace_store.models import SpanRecord, TraceRecord

from .admin_api_access import ASKS, CALLERS, LIMIT, Ask, Side, World, call, real_app, span_of, world
from .conftest import Admin

pytestmark = pytest.mark.every_value

__all__ = ["call", "world"]  # fixtures

USES_UP = ("DELETE", "POST /keys/{key_id}")
NOBODY = Side(
    *(
        "ten_nobodynobodynobodyno",
        "padding_row",
        "prj_nobodynobodynobodyno",
        "nothing",
        "r-none",
        "0" * 32,
        "n" * 16,
        "m" * 16,
    ),
    *("quo_nonenonenonenonenon1", "quo_nonenonenonenonenon2", "quo_nonenonenonenonenon3"),
    adapter_id="ada_nobodynobodynobodyno",
    run_id="run_nobodynobodynobodyno",
    user_id="usr_nobodynobodynobody11",
    admin_user_id="usr_nobodynobodynobody22",
)


def routes_of(app: Litestar) -> Iterator[str]:
    for route in app.routes:
        if isinstance(route, HTTPRoute) and route.path.startswith(ADMIN_PATH):
            for method in route.route_handler_map:
                if method != "OPTIONS":
                    yield f"{method} {re.sub(r':[a-z]+}', '}', route.path.removeprefix(ADMIN_PATH))}"


def test_every_route_of_the_admin_api_is_in_the_table(world: World) -> None:
    assert sorted(set(routes_of(world.app))) == sorted({ask.route for ask in ASKS})


async def test_an_endpoint_that_does_not_say_who_may_call_it_is_not_served(
    database: Database, clock: ManualClock, tmp_path: Path
) -> None:
    @get("/open")
    async def anyone() -> None:
        return None

    with pytest.raises(UnguardedRoute, match="names no action"):
        async with real_app(database, clock, tmp_path, anyone):
            pass


@pytest.mark.parametrize("who", CALLERS)
async def test_every_endpoint_answers_every_role_as_the_table_says(world: World, call: Any, who: str) -> None:
    wrong = []
    bound = who.endswith("of A")
    for ask in ASKS:
        statuses = ask.expect.split()
        for index, name in enumerate("ab"):
            side = getattr(world, name)
            answer = await call(who, ask, side)
            expected = int(statuses[2 * CALLERS.index(who) + index])
            if answer.is_success and ask.route.startswith(USES_UP):
                setattr(world, name, await world.restock(side))
            if answer.status_code != expected:
                wrong.append(f"{ask} {name}: {answer.status_code} {answer.text}")
            if expected == 403 and answer.json()["error"]["code"] != "missing_role":
                wrong.append(f"{ask} {name}: {answer.text}")
            if expected == 404 and hidden(answer, side) != hidden(await call(who, ask, NOBODY), NOBODY):
                wrong.append(f"{ask}: what is another's is not answered as what does not exist")
            if bound and (seen := [thing for thing in world.b.ids() if thing in answer.text and name == "a"]):
                wrong.append(f"{ask}: shows {seen} of the other tenant")
            told = answer.text.replace('"curve_secret_key"', "")  # a name of which only its presence is reported
            if ask.route.startswith("GET") and any(secret in told for secret in (*world.a.secrets, "secret_")):
                wrong.append(f"{ask}: shows a secret")
    assert wrong == []


def hidden(answer: httpx.Response, side: Side) -> str:
    """The answer without the ids that were asked for, and without its request id."""
    text = answer.text
    for thing in side.ids():
        text = text.replace(thing, "…")
    return text


@pytest.mark.parametrize(
    ("who", "status", "code"),
    [
        ("inference key of A", 403, "missing_scope"),
        ("no key", 401, "missing_api_key"),
    ],
)
async def test_requests_without_access_are_refused(world: World, call: Any, who: str, status: int, code: str) -> None:
    for ask in ASKS:
        answer = await call(who, ask, world.a)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), ask


OF_ALL = (
    "/engines",
    "/usage/reconciliation",
    "/webhooks",
    "/audit/verification",
    "/simulations",
    "/declarations",
    "/settings",
    "/guardrails",
    "/issuers",
    *("/me", "/me/projects", "/me/usage", "/me/keys"),  # of users, whom no key is
)  # objects that belong to no tenant


@pytest.mark.parametrize("who", ["tenant-admin of A", "viewer of A"])
async def test_lists_hold_only_the_own_tenants_objects_whatever_is_asked(world: World, call: Any, who: str) -> None:
    first = await call("owner", Ask("GET /tenants", "", query={"limit": "1"}), world.b)
    filters = {
        "tenant_id": world.b.tenant_id, "project_id": world.b.project_id, "key_id": world.b.key_id,
        "scope_id": world.b.tenant_id, "object_id": world.b.project_id, "name": "globex", "model": "globex-model",
        "cursor": first.json()["next_cursor"], "after": "0", "limit": "500", "role": "viewer", "outcome": "stop",
        "group_by": "tenant,project,key,model", "since": "2020-01-01T00:00:00Z", "until": "2030-01-01T00:00:00Z",
        "service_class": "standard", "step": "5", "before": "1000", "lease_state": "live",
        "minutes": "5", "engine_id": "none", "end_user": "someone", "tag": "team=search",
        "request_id": world.b.request_id, "reason": "rate", "route": "best", "min_ms": "0", "max_ms": "9",
        "user_id": world.b.user_id, "email": "a@example.com", "details": "true",
        "status": "2xx", "error_code": "engine_failed", "slo": "none",
    }  # fmt: skip
    for route, names in filters_of(world.app):
        own = {name: filters[name] for name in names}  # one that is not known here fails the test
        if own.keys() >= {"end_user", "since"}:  # these are asked for of a month at most
            own |= {"since": "2025-12-20T00:00:00Z", "until": "2026-01-10T00:00:00Z"}
        if route == "/usage/minutes":
            own["group_by"] = "tenant,service_class"  # it has no others
        needed = {name: filters[name] for name, is_needed in names.items() if is_needed}
        for query in [needed, own, *({**needed, name: value} for name, value in own.items())]:
            answer = await call(who, Ask(f"GET {route}", "", query=query), world.b)
            assert answer.status_code in ((403,) if route in OF_ALL else (200, 404)), (route, query, answer.text)
            shown = [thing for thing in (*world.b.ids(), *world.b.secrets, "globex") if thing in answer.text]
            assert shown == [], (route, query)
    everything = await call(who, Ask("GET /usage", "", query={"group_by": "tenant"}), world.a)
    assert [group["group"]["tenant_id"] for group in everything.json()["data"]] == [world.a.tenant_id]
    overview = (await call(who, Ask("GET /overview", ""), world.a)).json()
    assert (overview["tenants_active"], overview["projects"], overview["last_hour"]["requests"]) == (1, 1, 1)


def filters_of(app: Litestar) -> Iterator[tuple[str, dict[str, bool]]]:
    """The lists of the admin API, and what each of them can be asked by, or must be."""
    for path, item in make_document(app, DocumentPart.ADMIN, DEFAULT_SHAPE)["paths"].items():
        if "{" not in path and "get" in item:
            parameters = item["get"].get("parameters", [])
            yield path.removeprefix(ADMIN_PATH), {one["name"]: one["required"] for one in parameters}


async def test_machines_and_other_requests_in_a_trace_are_operators_business(world: World, call: Any) -> None:
    for who, is_told in (("owner", True), ("viewer", True), ("tenant-admin of A", False), ("viewer of A", False)):
        told = (await call(who, Ask("GET /traces/{trace_id}", ""), world.a)).text
        words = ("acme-engine", "somebody-else", "upstream-words", "upstream.status")
        assert [word in told for word in words] == [is_told] * len(words), who
        assert world.a.request_id in told


async def test_the_steps_of_engines_that_a_request_ran_in_are_operators_business(world: World, call: Any) -> None:
    async with world.database.write() as session:
        step = TraceRecord(tenant_id="", trace_id="e" * 32, span_id="e" * 16, request_id="r-step")
        other = TraceRecord(tenant_id=world.b.tenant_id, trace_id="d" * 32, span_id="d" * 16, request_id="r-other")
        session.add_all([span_of(one, engine="acme-engine") for one in (step, other)])
        links = [{"trace_id": one.trace_id, "span_id": one.span_id} for one in (step, other)]
        own = update(SpanRecord).where(SpanRecord.trace_id == world.a.trace_id).values(links=links)
        await session.execute(own)
    for who, seen in (("owner", 2), ("viewer", 2), ("tenant-admin of A", 0), ("viewer of A", 0)):
        told = (await call(who, Ask("GET /traces/{trace_id}", ""), world.a)).json()
        assert (len(told["linked"]), len(told["spans"]) > 0) == (seen, True), who


async def test_a_client_that_takes_anothers_trace_id_sees_its_own_spans_only(world: World, call: Any) -> None:
    async with world.database.write() as session:
        own = TraceRecord(tenant_id=world.a.tenant_id, trace_id=world.b.trace_id, span_id="1" * 16, request_id="r-own")
        session.add(span_of(own, engine="e"))
    spans = (await call("viewer of A", Ask("GET /traces/{trace_id}", ""), world.b)).json()["spans"]
    assert [span["attributes"]["moiety.request_id"] for span in spans] == ["r-own"]
    everything = (await call("viewer", Ask("GET /traces/{trace_id}", ""), world.b)).json()["spans"]
    assert len(everything) == 2


async def test_a_refusal_says_which_role_is_needed(world: World, call: Any) -> None:
    make_owner = Ask("POST /keys", "", body={"name": "k", "role": "owner"})
    told = {who: (await call(who, make_owner, world.a)).json()["error"]["message"] for who in CALLERS[1:]}
    assert "needs the role 'owner'; yours is 'operator'." in told["operator"]
    assert "'tenant-admin' of one tenant" in told["tenant-admin of A"]
    refused = await call("viewer", Ask("POST /projects", "", body={"tenant_id": "{tenant_id}", "name": "n"}), world.a)
    assert "'owner', 'operator' or 'tenant-admin' of one tenant" in refused.json()["error"]["message"]


async def test_a_key_keeps_its_tenant_through_rotation_and_rotates_to_no_more_than_it_was(
    world: World, call: Any
) -> None:
    rotated = await call("owner", Ask("POST /keys/{key_id}/rotate", "", path={"key_id": "{admin_key_id}"}), world.a)
    key = rotated.json()["key"]
    assert (key["role"], key["tenant_id"], key["scopes"]) == ("viewer", world.a.tenant_id, ["admin:viewer"])
    world.keys["rotated"] = rotated.json()["secret"]
    assert (await call("rotated", Ask("GET /tenants/{tenant_id}", ""), world.b)).status_code == 404
    assert (await call("rotated", Ask("POST /tenants", "", body={"name": "{new}"}), world.a)).status_code == 403


async def test_a_tenants_administrator_reads_its_tenants_audit_entries_and_no_others(world: World, call: Any) -> None:
    for who, side in (("tenant-admin of A", world.a), ("operator", world.a), ("owner", world.b)):
        made = await call(who, Ask("POST /keys", "", body={"name": "k", "project_id": "{project_id}"}), side)
        limit = {"level": "key", "scope_id": made.json()["key"]["id"], **LIMIT}
        set_up = await call(who, Ask("PUT /quotas", "", body=limit), side)
        await call(who, Ask(f"DELETE /quotas/{set_up.json()['id']}", ""), side)
        await call(who, Ask("DELETE /tenants/{tenant_id}/idempotency", ""), side)
    await call("owner", Ask("PATCH /classes/flex", "", body={"max_queue_s": 5}), world.a)
    own = (await call("tenant-admin of A", Ask("GET /audit", ""), world.a)).json()
    everything = (await call("owner", Ask("GET /audit", ""), world.a)).json()
    told = [(entry["actor_role"], entry["action"], entry["object_kind"]) for entry in own["data"]]
    steps = [("create", "api_keys"), ("create", "quotas"), ("delete", "quotas"), ("delete", "idempotent_requests")]
    assert told == [(role, *step) for role in ("tenant-admin", "operator") for step in steps]
    assert [entry for entry in everything["data"] if entry["seq"] in {e["seq"] for e in own["data"]}] == own["data"]
    assert (own["whole"], everything["whole"]) == (False, True)
    assert {entry["actor_role"] for entry in everything["data"]} == {"owner", "operator", "tenant-admin"}


async def test_a_suspended_tenants_administrators_are_refused_too(world: World, call: Any) -> None:
    suspend = Ask("PATCH /tenants/{tenant_id}", "", body={"status": "suspended"})
    assert (await call("operator", suspend, world.a)).status_code == 200
    refused = await call("tenant-admin of A", Ask("GET /tenants", ""), world.a)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "tenant_suspended")
    assert (await call("viewer", Ask("GET /tenants", ""), world.a)).status_code == 200


async def test_a_revoked_key_is_refused_by_every_replica_within_two_seconds(
    world: World, database_url: str, tmp_path: Path
) -> None:
    other = Database.open(database_url)
    async with real_app(other, world.clock, tmp_path / "other") as replica:
        keys = ("viewer", "tenant-admin of A", "inference key of A")
        for who in keys:
            async with Admin(world.app, world.keys[who]).http as here, Admin(replica, world.keys[who]).http as there:
                path = "/v1/models" if "inference" in who else "tenants"
                path = f"http://gateway{path}" if path.startswith("/") else path
                assert [(await one.get(path)).status_code for one in (here, there)] == [200, 200]
                owner = Admin(world.app, world.keys["owner"])
                async with owner.http:
                    await owner.call("POST", f"keys/{world.keys[who][4:20]}/revoke", 200)
                assert (await here.get(path)).status_code == 401
                world.clock.advance(2.0)
                refused = await there.get(path)
                assert (refused.status_code, refused.json()["error"]["code"]) == (401, "key_revoked")
    await other.close()
