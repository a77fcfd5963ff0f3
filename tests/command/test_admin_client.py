"""How commands find what they are told by name or id, and what a file's names become."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from moiety_platform.cli.admin_client import AdminClient
from moiety_platform.cli.apply.document import read_document
from moiety_platform.cli.apply.spec import read_declared_objects
from moiety_platform.cli.errors import CommandError

FIRST, SECOND = f"ten_{'a' * 20}", f"ten_{'b' * 20}"
TENANTS = [{"id": FIRST, "name": "first"}, {"id": SECOND, "name": FIRST}]  # as an earlier release allowed
PROJECTS = [
    {"id": "prj_1", "name": "web", "tenant_id": FIRST},
    {"id": "prj_2", "name": "prj_1", "tenant_id": FIRST},
    {"id": "prj_3", "name": "prj_1", "tenant_id": SECOND},
]


def answer(request: httpx.Request) -> httpx.Response:
    kind, _, wanted = request.url.path.removeprefix("/admin/v1/").partition("/")
    rows: list[dict[str, Any]] = TENANTS if kind == "tenants" else PROJECTS
    if wanted:
        found = [row for row in rows if row["id"] == wanted]
        error = {"message": "none", "type": "x", "param": f"{kind[:-1]}_id", "code": "not_found"}
        return httpx.Response(200, json=found[0]) if found else httpx.Response(404, json={"error": error})
    query = {name: value for name, value in request.url.params.items() if name in ("name", "tenant_id")}
    data = [row for row in rows if all(row[name] == value for name, value in query.items())]
    return httpx.Response(200, json={"data": data, "next_cursor": None})


@pytest.fixture
def client() -> AdminClient:
    return AdminClient(httpx.Client(transport=httpx.MockTransport(answer), base_url="http://gateway"))


def test_a_tenant_named_like_anothers_id_never_takes_its_place(client: AdminClient) -> None:
    assert client.find_tenant(FIRST)["id"] == FIRST
    assert client.find_tenant("first")["id"] == FIRST
    assert client.find_tenant(SECOND)["id"] == SECOND
    assert client.find_project(FIRST, "prj_1")["id"] == "prj_1"
    assert client.find_project(FIRST, "web")["id"] == "prj_1"
    assert client.find_project(SECOND, "prj_1")["id"] == "prj_3"  # the other is not this tenant's


@pytest.mark.parametrize("find", [AdminClient.find_tenant, lambda client, name: client.find_project(FIRST, name)])
def test_missing_objects_are_reported(client: AdminClient, find: Callable[[AdminClient, str], Any]) -> None:
    with pytest.raises(CommandError, match="no"):
        find(client, "nothing")


def test_a_file_that_writes_a_name_in_another_unicode_form_wants_it_as_the_gateway_keeps_it(tmp_path: Path) -> None:
    (tmp_path / "declared.yaml").write_text("tenants:\n  - {name: Cafe\u0301}\n")
    (tenant,) = read_declared_objects(read_document(tmp_path / "declared.yaml"))
    assert tenant.fields == {"name": "Caf\u00e9"}
