"""Access to stored responses: callers other than keys of the project that may use the model get 404 on every route."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from litestar import Litestar

from moiety_platform.access.roles import Role
from moiety_platform.auth.authenticator import Authenticator
from moiety_platform.auth.schemas import NewKey
from moiety_platform.auth.service import create_key
from moiety_platform.clock import ManualClock
from moiety_platform.db.session import Database
from moiety_platform.responses_api.items import Continued
from moiety_platform.responses_api.limits import ConversationLimits
from moiety_platform.responses_api.response_service import ResponseService
from moiety_platform.settings import GatewaySettings
from moiety_platform.tenants.schemas import NewProject
from moiety_platform.tenants.service import create_project

from .admin_api_access import make_side, real_app
from .conftest import PEPPER

KEPT, NEVER = ("resp_" + digit * 32 for digit in "10")
ITEM = {"id": "msg_1", "type": "message", "role": "user", "content": [{"type": "input_text", "text": "zebra"}]}

ROUTES = {
    "GET /v1/responses/{id}": None,
    "GET /v1/responses/{id}/input_items": None,
    "POST /v1/responses/{id}/cancel": None,
    "POST /v1/responses": {"model": "m", "input": "x", "previous_response_id": "{id}"},
    "DELETE /v1/responses/{id}": None,
}
OWN = "200 200 400 503 200"  # what was found cannot be cancelled, and no engine is there to continue it
UNKNOWN = "404 404 404 404 404"
REFUSED = "403 403 403 403 403"
CALLERS = {
    "another project of A": UNKNOWN,
    "for another model": UNKNOWN,
    "B": UNKNOWN,
    "owner": REFUSED,
    "operator": REFUSED,
    "tenant-admin of A": REFUSED,
    "viewer": REFUSED,
    "viewer of A": REFUSED,
    "no key": "401 401 401 401 401",
    "another key of the project": OWN,
}


async def make_keys(database: Database, clock: ManualClock) -> dict[str, str]:
    """A key of every caller, and the one that creates the response."""
    a, b = [await make_side(database, clock, name) for name in ("acme", "globex")]
    async with database.write() as session:
        other = await create_project(session, NewProject(a.tenant_id, "other"), clock.now())
        made = {
            "creator": NewKey("k", project_id=a.project_id),
            "another key of the project": NewKey("k", project_id=a.project_id, allowed_models=["m"]),
            "another project of A": NewKey("k", project_id=other.id),
            "for another model": NewKey("k", project_id=a.project_id, allowed_models=["n"]),
            "B": NewKey("k", project_id=b.project_id),
            "owner": NewKey("k", role=Role.OWNER),
            "operator": NewKey("k", role=Role.OPERATOR),
            "tenant-admin of A": NewKey("k", role=Role.TENANT_ADMIN, tenant_id=a.tenant_id),
            "viewer": NewKey("k", role=Role.VIEWER),
            "viewer of A": NewKey("k", role=Role.VIEWER, tenant_id=a.tenant_id),
        }
        return {who: (await create_key(session, new, PEPPER, clock.now()))[1].text for who, new in made.items()}


@pytest.fixture
async def keys(database: Database, clock: ManualClock) -> dict[str, str]:
    """The callers' keys, and a response of the creator's."""
    keys = await make_keys(database, clock)
    creator = await Authenticator(database, PEPPER, clock).authenticate(f"Bearer {keys['creator']}")
    service = ResponseService(database, ConversationLimits.of(GatewaySettings()))
    body = b'{"id":"%b","output":[],"text":"zebra"}' % KEPT.encode()
    assert await service.keep(creator, KEPT, "m", Continued(), [ITEM], body)
    return keys


def client_of(app: Litestar, headers: dict[str, str]) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=app)
    return httpx.AsyncClient(transport=transport, base_url="http://gateway", headers=headers)


@pytest.mark.parametrize("who", CALLERS)
async def test_a_response_is_found_as_the_table_says(
    database: Database, clock: ManualClock, keys: dict[str, str], tmp_path: Path, who: str
) -> None:
    headers = {"Authorization": f"Bearer {keys[who]}"} if who in keys else {}
    async with real_app(database, clock, tmp_path) as app, client_of(app, headers) as http:

        async def send(route: str, response_id: str) -> httpx.Response:
            method, path = route.split(" ")
            body = ROUTES[route] and {**ROUTES[route], "previous_response_id": response_id}
            return await http.request(method, path.replace("{id}", response_id), json=body)

        for route, status in zip(ROUTES, CALLERS[who].split(), strict=True):
            unknown = await send(route, NEVER)
            answer = await send(route, KEPT)
            assert answer.status_code == int(status), (route, answer.text)
            assert ("zebra" in answer.text) == (status == "200" and "GET" in route)
            if status == "404":
                assert (unknown.status_code, unknown.text) == (404, answer.text.replace(KEPT, NEVER)), route
