"""Every route refuses query parameters that it does not have, that are given twice or that are empty. The routes are
those of the OpenAPI document, so a new route is checked without a line here."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from .conftest import RunningGateway

METHODS = ("get", "post", "put", "patch", "delete", "head")
SENT_BY_CLIENTS = ["/v1/messages", "/v1/messages/count_tokens", "/v1/models", "/v1/models/tiny"]


@pytest.fixture
async def operations(gateway: RunningGateway) -> list[tuple[str, str, dict[str, Any]]]:
    _, _, document = await gateway.request("GET", "/schema/openapi.json")
    return [
        (method.upper(), re.sub(r"\{[^}]*\}", "x", path), operation)
        for path, item in json.loads(document)["paths"].items()
        for method, operation in item.items()
        if method in METHODS
    ]


async def ask(gateway: RunningGateway, method: str, path: str, query: str) -> tuple[Any, ...]:
    key = gateway.admin_key if path.startswith("/admin/") else gateway.key
    status, _, body = await gateway.request(method, f"{path}?{query}", key=key)
    return status, json.loads(body)["error"] if method != "HEAD" and status >= 400 else {}


def code_of(error: Any) -> Any:
    """The stable code, which is among the details of Anthropic's errors."""
    return error.get("code", error.get("details", {}).get("error_code"))


async def test_every_route_refuses_a_parameter_that_it_does_not_have(
    gateway: RunningGateway, operations: list[tuple[str, str, dict[str, Any]]]
) -> None:
    assert len(operations) > 60
    for method, path, operation in operations:
        known = sorted(one["name"] for one in operation.get("parameters", ()) if one["in"] == "query")
        for query in ("tenant=other", "x%00y=1", "%ff=1", "limit%20=1"):
            status, error = await ask(gateway, method, path, query)
            assert status == 400, (method, path, query, error)
            if method != "HEAD":
                assert code_of(error) in ("unknown_query_parameter", None), (method, path, error)
                assert all(name in error["message"] for name in known), (method, path, error)


async def test_every_route_refuses_a_parameter_that_is_given_twice_or_is_empty(
    gateway: RunningGateway, operations: list[tuple[str, str, dict[str, Any]]]
) -> None:
    seen = set()
    for method, path, operation in operations:
        for one in operation.get("parameters", ()):
            if one["in"] != "query":
                continue
            name = one["name"]
            seen.add(name)
            for query, code in (
                (f"{name}=1&{name}=1", "repeated_query_parameter"),
                (f"{name}=", "empty_query_parameter"),
                (f"{name}", "empty_query_parameter"),
            ):
                status, error = await ask(gateway, method, path, query)
                assert (status, code_of(error)) == (400, code), (method, path, query, error)
    assert {"tenant_id", "limit", "cursor", "since", "name"} <= seen


async def test_one_tenants_usage_is_asked_for_by_the_parameter_that_there_is(gateway: RunningGateway) -> None:
    status, error = await ask(gateway, "GET", "/admin/v1/usage", "tenant=other")
    assert (status, error["param"]) == (400, "tenant")
    assert "tenant_id" in error["message"]
    assert (await ask(gateway, "GET", "/admin/v1/usage", "tenant_id=other"))[0] == 200


async def test_query_parameters_of_anthropics_client_are_accepted(gateway: RunningGateway) -> None:
    body = json.dumps({"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}).encode()
    for path in SENT_BY_CLIENTS:
        method, data = ("POST", body) if "messages" in path else ("GET", b"")
        status, _, answer = await gateway.request(method, f"{path}?beta=true", data)
        assert status == 200, (path, answer)


@pytest.mark.parametrize(
    "path", ["/v1/messages/batches", "/v1/conversations/conv_1/items", "/v1/responses/resp_1/input_items"]
)
async def test_a_list_without_a_valid_key_is_refused_for_the_key_whatever_its_parameters(
    gateway: RunningGateway, path: str
) -> None:
    for key in ("mty_unknown.unknown", gateway.key):
        status, _, _ = await gateway.request("GET", f"{path}?limit=0", key=key)
        assert status == (400 if key == gateway.key else 401)
