"""Endpoints of the admin API with the roles that may call each, and a gateway with objects of two tenants."""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from litestar import Litestar
from litestar.handlers import HTTPRouteHandler
from pydantic import SecretStr
from sqlalchemy.ext.asyncio import AsyncSession
from tests.usage_rows import make_row

from moiety_platform.access.roles import Role
from moiety_platform.adapters.schemas import NewAdapter
from moiety_platform.adapters.service import create_adapter
from moiety_platform.administration.router import ADMIN_PATH
from moiety_platform.agent_runs.models import AgentRunRequest
from moiety_platform.agent_runs.store import join_run
from moiety_platform.agent_runs.terms import RunTerms
from moiety_platform.auth.key_policies.schemas import NewKeyPolicy
from moiety_platform.auth.key_policies.service import set_policy
from moiety_platform.auth.schemas import NewKey
from moiety_platform.auth.service import create_key
from moiety_platform.auth.users.schemas import NewUser
from moiety_platform.auth.users.service import create_user
from moiety_platform.bootstrap.composition import assembled
from moiety_platform.bootstrap.overrides import Overrides
from moiety_platform.clock import ManualClock
from moiety_platform.db.session import Database
from moiety_platform.jwt_issuers.schemas import NewJwtGrant, NewJwtIssuer
from moiety_platform.jwt_issuers.service import set_issuer
from moiety_platform.quota.kinds import LimitKind, LimitLevel
from moiety_platform.quota.schemas import NewQuota
from moiety_platform.quota.service import set_quota
from moiety_platform.reloading.source import SettingsSource
from moiety_platform.settings import SECTION, GatewaySettings
from moiety_platform.tenants.schemas import NewProject, NewTenant
from moiety_platform.tenants.service import create_project, create_tenant
from moiety_platform.trace_store.models import SpanRecord, TraceRecord
from moiety_platform.usage.store import insert_rows
from moiety_platform.webhooks.addresses import AddressPolicy

from .conftest import PEPPER, Admin


@dataclass(frozen=True)
class Ask:
    """One request of the admin API. `{…}` in it stands for an object of one tenant (a field of `Side`); `{new}` for a
    name that nothing has. `expect` has the status for an object of A and of B, by the columns of CALLERS."""

    route: str
    expect: str
    path: dict[str, str] = field(default_factory=dict)
    query: dict[str, str] = field(default_factory=dict)
    body: dict[str, Any] | None = None


CALLERS = ("owner", "operator", "tenant-admin of A", "viewer", "viewer of A")
EVERYBODY = "200 200   200 200   200 200   200 200   200 200"
OWN_ONLY = "200 200   200 200   200 404   200 200   200 404"
ALL_READERS = "200 200   200 200   403 403   200 200   403 403"
OPERATORS = "200 200   200 200   403 403   403 403   403 403"
OPERATORS_FIND_NONE = "404 404   404 404   403 403   403 403   403 403"
OPERATORS_MAKE = "201 201   201 201   403 403   403 403   403 403"
WRITERS = "200 200   200 200   200 404   403 403   403 403"
WRITERS_MAKE = "201 201   201 201   201 404   403 403   403 403"
OWNERS_MAKE = "201 201   403 403   403 403   403 403   403 403"
OWNERS_CREATE = "201 201   403 403   403 404   403 403   403 403"
SIGN_IN = "401 401   401 401   401 401   401 401   401 401"  # a token of the identity provider accepts it
USERS_ONLY = "403 403   403 403   403 403   403 403   403 403"  # people who sign in: tests/tenancy/test_self_service.py
OWNERS_CHANGE = "200 200   403 403   403 404   403 403   403 403"  # objects of another tenant do not exist for them
OWNERS_ROTATE = "201 201   403 403   403 404   403 403   403 403"
OPERATORS_CHANGE = "200 200   200 200   403 404   403 403   403 403"
CONFLICTS = "409 409   409 409   409 404   403 403   403 403"
BAD_REQUESTS = "400 400   400 400   400 404   403 403   403 403"
TENANT_ADMINS = "403 403   403 403   200 404   403 403   403 403"
LORA = '{{"peft_type": "LORA", "r": 4}}'
LIMIT = {"kind": "tokens_per_day", "cap": 9}
CLASS = {"rank": 7, "ttft_s": 1.0}
ASKS = [
    Ask("GET /tenants", EVERYBODY, query={"name": "{tenant_name}"}),
    Ask("POST /tenants", OPERATORS_MAKE, body={"name": "{new}"}),
    Ask("GET /tenants/{tenant_id}", OWN_ONLY),
    Ask("PATCH /tenants/{tenant_id}", OPERATORS, body={"service_class": "priority", "weight": 9}),
    Ask("DELETE /tenants/{tenant_id}/data", "202 202   403 403   403 403   403 403   403 403",
        path={"tenant_id": "{spare_tenant_id}"}),
    Ask("GET /projects", OWN_ONLY, query={"tenant_id": "{tenant_id}"}),
    Ask("GET /projects", EVERYBODY, query={"name": "{project_name}"}),
    Ask("POST /projects", WRITERS_MAKE, body={"tenant_id": "{tenant_id}", "name": "{new}"}),
    Ask("GET /projects/{project_id}", OWN_ONLY),
    Ask("GET /keys", OWN_ONLY, query={"tenant_id": "{tenant_id}"}),
    Ask("GET /keys", OWN_ONLY, query={"project_id": "{project_id}"}),
    Ask("POST /keys", WRITERS_MAKE, body={"name": "k", "project_id": "{project_id}"}),
    Ask("POST /keys", OWNERS_MAKE, body={"name": "k", "role": "owner"}),
    Ask("POST /keys", OWNERS_MAKE, body={"name": "k", "role": "operator"}),
    Ask("POST /keys", OWNERS_MAKE, body={"name": "k", "role": "tenant-admin", "tenant_id": "{tenant_id}"}),
    Ask("POST /keys", OWNERS_MAKE, body={"name": "k", "role": "viewer", "tenant_id": "{tenant_id}"}),
    Ask("GET /keys/{key_id}", OWN_ONLY),
    Ask("GET /keys/{key_id}", OWN_ONLY, path={"key_id": "{admin_key_id}"}),
    Ask("POST /keys/{key_id}/revoke", WRITERS),
    Ask("POST /keys/{key_id}/rotate", WRITERS_MAKE),
    Ask("POST /keys/{key_id}/revoke", OWNERS_CHANGE, path={"key_id": "{admin_key_id}"}),
    Ask("POST /keys/{key_id}/rotate", OWNERS_ROTATE, path={"key_id": "{admin_key_id}"}),
    Ask("GET /users", OWN_ONLY, query={"tenant_id": "{tenant_id}"}),
    Ask("POST /users", WRITERS_MAKE,
        body={"email": "{new}@example.com", "role": "developer", "tenant_id": "{tenant_id}"}),
    Ask("POST /users", WRITERS_MAKE, body={"email": "{new}@example.com", "role": "viewer", "tenant_id": "{tenant_id}"}),
    Ask("POST /users", OWNERS_CREATE,
        body={"email": "{new}@example.com", "role": "tenant-admin", "tenant_id": "{tenant_id}"}),
    Ask("POST /users", OWNERS_MAKE, body={"email": "{new}@example.com", "role": "operator"}),
    Ask("GET /users/{user_id}", OWN_ONLY),
    Ask("PATCH /users/{user_id}", WRITERS, body={"name": "{new}"}),
    Ask("POST /users/{user_id}/invitation", WRITERS_MAKE),
    Ask("DELETE /users/{user_id}", WRITERS),
    Ask("GET /users/{user_id}", OWN_ONLY, path={"user_id": "{admin_user_id}"}),
    Ask("PATCH /users/{user_id}", OWNERS_CHANGE, path={"user_id": "{admin_user_id}"}, body={"name": "{new}"}),
    Ask("POST /users/{user_id}/invitation", OWNERS_ROTATE, path={"user_id": "{admin_user_id}"}),
    Ask("POST /invitations/accept", SIGN_IN, body={"invitation": "{new}"}),
    Ask("GET /key-policies", OWN_ONLY, query={"tenant_id": "{tenant_id}"}),
    Ask("PUT /key-policies", WRITERS, body={"tenant_id": "{tenant_id}", "max_keys": 7}),
    Ask("GET /key-policies/{tenant_id}", OWN_ONLY),
    Ask("DELETE /key-policies/{tenant_id}", WRITERS),
    Ask("GET /me", USERS_ONLY),
    Ask("GET /me/projects", USERS_ONLY),
    Ask("GET /me/usage", USERS_ONLY),
    Ask("GET /me/keys", USERS_ONLY),
    Ask("POST /me/keys", USERS_ONLY, body={"name": "k", "project_id": "{project_id}"}),
    Ask("POST /me/keys/{key_id}/rotate", USERS_ONLY),
    Ask("POST /me/keys/{key_id}/revoke", USERS_ONLY),
    Ask("GET /quotas", EVERYBODY, query={"scope_id": "{tenant_id}"}),
    Ask("GET /quotas", EVERYBODY, query={"scope_id": "{key_id}"}),
    Ask("PUT /quotas", OPERATORS, body={"level": "tenant", "scope_id": "{tenant_id}", **LIMIT}),
    Ask("PUT /quotas", WRITERS, body={"level": "project", "scope_id": "{project_id}", **LIMIT}),
    Ask("PUT /quotas", WRITERS, body={"level": "key", "scope_id": "{key_id}", **LIMIT}),
    Ask("GET /quotas", EVERYBODY, query={"tenant_id": "{tenant_id}"}),
    Ask("GET /quotas/leases", EVERYBODY),
    Ask("GET /quotas/{quota_id}", OWN_ONLY, path={"quota_id": "{tenant_quota_id}"}),
    Ask("GET /quotas/{quota_id}", OWN_ONLY, path={"quota_id": "{key_quota_id}"}),
    Ask("DELETE /quotas/{quota_id}", OPERATORS_CHANGE, path={"quota_id": "{tenant_quota_id}"}),
    Ask("DELETE /quotas/{quota_id}", WRITERS, path={"quota_id": "{project_quota_id}"}),
    Ask("DELETE /quotas/{quota_id}", WRITERS, path={"quota_id": "{key_quota_id}"}),
    Ask("GET /usage", EVERYBODY, query={"tenant_id": "{tenant_id}", "group_by": "tenant,project,key"}),
    Ask("GET /usage/requests", EVERYBODY, query={"key_id": "{key_id}"}),
    Ask("GET /usage/minutes", EVERYBODY, query={"tenant_id": "{tenant_id}", "group_by": "tenant,service_class"}),
    Ask("GET /usage/quotes", EVERYBODY, query={"tenant_id": "{tenant_id}"}),
    Ask("GET /usage/reconciliation", ALL_READERS),
    Ask("GET /spend", EVERYBODY, query={"tenant_id": "{tenant_id}", "group_by": "tenant,day"}),
    Ask("GET /spend/forecast", EVERYBODY, query={"tenant_id": "{tenant_id}"}),
    Ask("GET /requests", EVERYBODY, query={"tenant_id": "{tenant_id}"}),
    Ask("GET /requests", EVERYBODY, query={"request_id": "{request_id}"}),
    Ask("GET /requests/{request_id}", OWN_ONLY),
    Ask("GET /request-contents/logging/{tenant_id}", OWN_ONLY),
    Ask("PUT /request-contents/logging/{tenant_id}", TENANT_ADMINS, body={"keep_days": 3}),
    Ask("DELETE /request-contents/logging/{tenant_id}", TENANT_ADMINS),
    Ask("GET /request-contents/{request_id}", "403 403   403 403   404 404   403 403   403 403"),
    Ask("GET /spend/budgets", EVERYBODY, query={"tenant_id": "{tenant_id}"}),
    Ask("GET /overview", EVERYBODY),
    Ask("GET /caller", EVERYBODY),
    Ask("GET /audit", "200 200   403 403   200 200   403 403   200 200", query={"object_id": "{project_id}"}),
    Ask("GET /audit/verification", "200 200   403 403   403 403   403 403   403 403"),
    Ask("GET /engines", ALL_READERS),
    Ask("GET /settings", ALL_READERS),
    Ask("GET /experts", EVERYBODY, query={"tenant_id": "{tenant_id}"}),
    Ask("POST /experts/plan", "404 404   404 404   403 403   404 404   403 403", body={"model": "none"}),
    Ask("GET /traces", EVERYBODY, query={"tenant_id": "{tenant_id}"}),
    Ask("GET /traces/{trace_id}", OWN_ONLY),
    Ask("POST /engines/{engine_id}/sleep", OPERATORS_FIND_NONE, path={"engine_id": "none"}),
    Ask("POST /engines/{engine_id}/expert-ranks", OPERATORS_FIND_NONE,
        path={"engine_id": "none"}, body={"num_ranks": 2}),
    Ask("POST /engines/{engine_id}/wake", OPERATORS_FIND_NONE, path={"engine_id": "none"}),
    Ask("GET /webhooks", OPERATORS),
    Ask("POST /webhooks", OPERATORS_MAKE, body={"url": "https://example.com/{new}"}),
    Ask("DELETE /webhooks/{webhook_id}", OPERATORS),
    Ask("POST /webhooks/{webhook_id}/test", OPERATORS_FIND_NONE, path={"webhook_id": "none"}),
    Ask("GET /alerts", EVERYBODY),
    Ask("GET /models", EVERYBODY),
    Ask("GET /batches", EVERYBODY, query={"tenant_id": "{tenant_id}"}),
    Ask("GET /declarations", ALL_READERS),
    Ask("PUT /declarations", OPERATORS, body={"kind": "tenant", "name": "{new}", "source": "s"}),
    Ask("DELETE /declarations", OPERATORS_FIND_NONE, query={"kind": "tenant", "name": "{new}"}),
    Ask("GET /adapters", EVERYBODY, query={"tenant_id": "{tenant_id}"}),
    Ask("POST /adapters", WRITERS_MAKE,
        body={"tenant_id": "{tenant_id}", "model": "m", "name": "{new}", "config": LORA}),
    Ask("POST /adapters", OPERATORS_MAKE,
        body={"tenant_id": "{tenant_id}", "model": "m", "name": "{new}", "engine_adapter": "there"}),
    Ask("GET /adapters/{adapter_id}", OWN_ONLY),
    Ask("POST /adapters/{adapter_id}/parts", CONFLICTS, body={"start": 1, "data": "AAAA"}),
    Ask("POST /adapters/{adapter_id}/publish", BAD_REQUESTS),
    Ask("DELETE /adapters/{adapter_id}", WRITERS),
    Ask("GET /classes", EVERYBODY),
    Ask("GET /classes/{name}", EVERYBODY, path={"name": "flex"}),
    Ask("POST /classes", OPERATORS_MAKE, body={"name": "{new}", **CLASS}),
    Ask("PATCH /classes/{name}", OPERATORS, path={"name": "flex"}, body={"max_queue_s": 5}),
    Ask("DELETE /classes/{name}", OPERATORS, path={"name": "{class_name}"}),
    Ask("GET /spot-prices", EVERYBODY),
    Ask("GET /prices", EVERYBODY),
    Ask("PUT /prices", OPERATORS, body={"model": "m", "input": "1", "output": "1"}),
    Ask("DELETE /prices", OPERATORS, query={"model": "{priced_model}"}),
    Ask("GET /prices/one", EVERYBODY, query={"model": "{priced_model}"}),
    Ask("GET /guardrails", OPERATORS),
    Ask("PUT /guardrails", OPERATORS, body={"name": "g", "stage": "input", "detectors": ["secrets"]}),
    Ask("GET /guardrails/{name}", OPERATORS, path={"name": "{priced_model}"}),
    Ask("DELETE /guardrails/{name}", OPERATORS, path={"name": "{priced_model}"}),
    Ask("GET /issuers", OPERATORS),
    Ask("PUT /issuers", OPERATORS,
        body={"name": "i", "url": "https://i.example", "audience": "a", "grants": [{"project": "{project_id}"}]}),
    Ask("GET /issuers/{name}", OPERATORS, path={"name": "{priced_model}"}),
    Ask("DELETE /issuers/{name}", OPERATORS, path={"name": "{priced_model}"}),
    Ask("GET /runs", EVERYBODY, query={"tenant_id": "{tenant_id}"}),
    Ask("GET /runs/{run_id}", OWN_ONLY),
    Ask("GET /runs/{run_id}/trace", OWN_ONLY),
    Ask("POST /runs/{run_id}/stop", WRITERS),
    Ask("GET /routes", EVERYBODY),
    Ask("PUT /routes", OPERATORS, body={"name": "m", "targets": [{"model": "n"}]}),
    Ask("DELETE /routes", OPERATORS, query={"route": "{priced_model}"}),
    Ask("GET /routes/one", EVERYBODY, query={"route": "{priced_model}"}),
    Ask("DELETE /tenants/{tenant_id}/idempotency", WRITERS),
    Ask("GET /simulations", OPERATORS),
    Ask("POST /simulations", "400 400   400 400   403 403   403 403   403 403", body={"minutes": 5}),
    Ask("GET /simulations/{simulation_id}", OPERATORS_FIND_NONE, path={"simulation_id": "none"}),
    Ask("DELETE /simulations/{simulation_id}", OPERATORS_FIND_NONE, path={"simulation_id": "none"}),
    Ask("POST /contract-checks", "400 400   400 400   403 403   403 403   403 403", body={"hours": 0}),
]  # fmt: skip


@dataclass(frozen=True)
class Side:
    """What one tenant has. The ids of things that requests use up are those of the newest ones."""

    tenant_id: str
    tenant_name: str
    project_id: str
    project_name: str
    request_id: str
    trace_id: str
    key_id: str = ""
    admin_key_id: str = ""
    tenant_quota_id: str = ""
    project_quota_id: str = ""
    key_quota_id: str = ""
    class_name: str = ""
    priced_model: str = ""
    webhook_id: str = ""
    adapter_id: str = ""
    run_id: str = ""
    user_id: str = ""
    admin_user_id: str = ""
    spare_tenant_id: str = ""
    secrets: tuple[str, ...] = ()

    def ids(self) -> set[str]:
        """Return the ids that no other tenant may see."""
        names = (
            "tenant_id",
            "tenant_name",
            "project_id",
            "project_name",
            "request_id",
            "key_id",
            "admin_key_id",
            "user_id",
            "admin_user_id",
            "trace_id",
            "adapter_id",
            "run_id",
        )
        quotas = ("tenant_quota_id", "project_quota_id", "key_quota_id")
        return {getattr(self, name) for name in (*names, *quotas)}


_numbers = count()


@dataclass
class World:
    """Two tenants, and a caller of every kind."""

    app: Litestar
    database: Database
    clock: ManualClock
    a: Side
    b: Side
    keys: dict[str, str]

    async def restock(self, side: Side) -> Side:
        """The side with keys, limits, a class and a price that no request has used up."""
        new, now = f"x-{next(_numbers)}", self.clock.now()
        async with self.database.write() as session:
            key, text = await create_key(session, NewKey(name=new, project_id=side.project_id), PEPPER, now)
            viewer = NewKey(name=new, role=Role.VIEWER, tenant_id=side.tenant_id)
            admin_key, admin_text = await create_key(session, viewer, PEPPER, now)
            scopes = {LimitLevel.TENANT: side.tenant_id, LimitLevel.PROJECT: side.project_id, LimitLevel.KEY: key.id}
            email = f"{new}@example.com"
            user = await create_user(session, NewUser(email, Role.DEVELOPER, side.tenant_id), now)
            admin_user = await create_user(session, NewUser(f"a-{email}", Role.TENANT_ADMIN, side.tenant_id), now)
            await set_policy(session, NewKeyPolicy(side.tenant_id))
            spare = await create_tenant(session, NewTenant(name=new), now)
            adapter = await create_adapter(session, NewAdapter(side.tenant_id, "m", new, LORA.format()))
            issuer = NewJwtIssuer(new, f"https://{new}.example", "a", [NewJwtGrant(side.project_id)])
            await set_issuer(session, issuer, AddressPolicy(), now)
            quotas = [
                (await set_quota(session, NewQuota(level, scope_id, LimitKind.REQUESTS_PER_MINUTE, 5), now)).id
                for level, scope_id in scopes.items()
            ]
        owner = Admin(self.app, self.keys["owner"])
        async with owner.http:
            await owner.call("POST", "classes", 201, json={"name": new, **CLASS})
            await owner.call("PUT", "prices", 200, json={"model": new, "input": "1", "output": "1"})
            guardrail = {"name": new, "stage": "input", "detectors": ["secrets"]}
            await owner.call("PUT", "guardrails", 200, json=guardrail)
            await owner.call("PUT", "routes", 200, json={"name": new, "targets": [{"model": "m"}]})
            if side.webhook_id:  # their number is limited
                await owner.http.delete(f"webhooks/{side.webhook_id}")
            hook = await owner.call("POST", "webhooks", 201, json={"url": f"https://example.com/{new}"})
        secrets = (*side.secrets, text.secret, admin_text.secret)
        return replace(
            side,
            key_id=key.id,
            admin_key_id=admin_key.id,
            user_id=user.id,
            admin_user_id=admin_user.id,
            tenant_quota_id=quotas[0],
            project_quota_id=quotas[1],
            key_quota_id=quotas[2],
            class_name=new,
            priced_model=new,
            webhook_id=hook["webhook"]["id"],
            adapter_id=adapter.id,
            spare_tenant_id=spare.id,
            secrets=secrets,
        )


@asynccontextmanager
async def real_app(
    database: Database, clock: ManualClock, folder: Path, *more: HTTPRouteHandler
) -> AsyncIterator[Litestar]:
    """The gateway's own application, without an engine, with further routes of the admin API."""
    settings = GatewaySettings(
        data_dir=folder,
        key_pepper=SecretStr(PEPPER.decode()),
        max_adapter_bytes=10_000,
        max_adapter_bytes_per_tenant=15_000,
    )
    source = SettingsSource.open(None, SECTION, lambda: settings)
    async with assembled(source, Overrides(clock=clock, database=database, admin_routes=more)) as gateway:
        yield gateway.app


async def make_side(database: Database, clock: ManualClock, name: str) -> Side:
    now = clock.now()
    async with database.write() as session:
        tenant = await create_tenant(session, NewTenant(name=name), now)
        project = await create_project(session, NewProject(tenant.id, f"{name}-project"), now)
        row = make_row(f"r-{name}", tenant_id=tenant.id, project_id=project.id, started_at=now, model=f"{name}-model")
        await insert_rows(session, [row])
        trace = TraceRecord(
            trace_id=secrets.token_hex(16), span_id=secrets.token_hex(8), request_id=row.request_id,
            tenant_id=tenant.id, service_class="standard", operation="chat", model=f"{name}-model", started_at=now,
            duration_ms=1.0, outcome="stop", kept_for="rate", stored_ms=0,
        )  # fmt: skip
        session.add(trace)
        session.add(span_of(trace, engine=f"tcp://{name}-engine:1"))
        run_id = await begin_run(session, tenant.id, name, row.request_id, datetime.now(UTC))  # old ones are deleted
    return Side(tenant.id, name, project.id, project.name, row.request_id, trace.trace_id, run_id=run_id)


async def begin_run(session: AsyncSession, tenant_id: str, name: str, request_id: str, now: datetime) -> str:
    """Begin an agent run with one request; return its id."""
    run = await join_run(session, tenant_id, RunTerms(f"{name}-run"), began_at=now, now=now)
    session.add(
        AgentRunRequest(
            run_id=run.id, request_id=request_id, tenant_id=tenant_id, trace_id="0" * 32, endpoint="/", model="m",
            started_at=now, outcome="open", tokens=1, nano=1, prompt_tokens=0, cached_tokens=0, output_tokens=0,
        )
    )  # fmt: skip
    return run.id


def span_of(trace: TraceRecord, engine: str) -> SpanRecord:
    """Return the span of the request itself."""
    attributes = {"moiety.tenant_id": trace.tenant_id, "moiety.request_id": trace.request_id, "moiety.engine": engine}
    attributes |= {"moiety.upstream.status": "418", "moiety.upstream.message": "upstream-words"}
    return SpanRecord(
        trace_id=trace.trace_id, span_id=trace.span_id, name="chat m", kind=2, service="moiety-gateway",
        tenant_id=trace.tenant_id, start_ns=1, end_ns=2, status=0, status_message="", attributes=attributes,
        events=[{"name": "moiety.preempted", "unix_ns": 1, "attributes": {"moiety.beneficiary": "somebody-else"}}],
        links=[], stored_ms=0,
    )  # fmt: skip


@pytest.fixture
async def world(database: Database, clock: ManualClock, tmp_path: Path) -> AsyncIterator[World]:
    a, b = [await make_side(database, clock, name) for name in ("acme", "globex")]
    made = {
        "owner": NewKey("owner", role=Role.OWNER),
        "operator": NewKey("operator", role=Role.OPERATOR),
        "tenant-admin of A": NewKey("admin", role=Role.TENANT_ADMIN, tenant_id=a.tenant_id),
        "viewer": NewKey("viewer", role=Role.VIEWER),
        "viewer of A": NewKey("viewer", role=Role.VIEWER, tenant_id=a.tenant_id),
        "inference key of A": NewKey("client", project_id=a.project_id),
    }
    async with database.write() as session:
        keys = {who: (await create_key(session, new, PEPPER, clock.now()))[1].text for who, new in made.items()}
    async with real_app(database, clock, tmp_path) as app:
        built = World(app, database, clock, a, b, keys)
        built.a, built.b = await built.restock(a), await built.restock(b)
        yield built


@pytest.fixture
async def call(world: World) -> AsyncIterator[Any]:
    """`await call(who, ask, side)`: the answer to the request about that side's objects."""
    transport = httpx.ASGITransport(app=world.app)
    async with httpx.AsyncClient(transport=transport, base_url=f"http://gateway{ADMIN_PATH}") as http:

        async def send(who: str, ask: Ask, side: Side) -> httpx.Response:
            method, path = ask.route.split(" ")
            values = {**side.__dict__, "new": f"x-{next(_numbers)}"}
            for name in re.findall(r"{(\w+)}", path):
                path = path.replace(f"{{{name}}}", fill(ask.path.get(name, f"{{{name}}}"), values))
            return await http.request(
                method, path,
                params={name: fill(value, values) for name, value in ask.query.items()},
                json=None if ask.body is None else {name: fill(value, values) for name, value in ask.body.items()},
                headers={"Authorization": f"Bearer {world.keys[who]}"} if who in world.keys else {},
            )  # fmt: skip

        yield send


def fill(value: Any, values: dict[str, Any]) -> Any:
    if isinstance(value, list):
        return [fill(one, values) for one in value]
    if isinstance(value, dict):
        return {name: fill(one, values) for name, one in value.items()}
    return value.format(**values) if isinstance(value, str) else value
