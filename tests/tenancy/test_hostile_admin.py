"""No request to the admin API is answered with 5xx.

Every route of its OpenAPI document gets hostile values in each place, on both databases, and administrators do the same
thing at once."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from tests.conftest import THOROUGH

from moiety_platform.administration.router import ADMIN_PATH
from moiety_platform.openapi.documents import DocumentPart, Documents
from moiety_platform.settings import GatewaySettings

from .admin_api_access import ASKS, World, fill, world

__all__ = ["world"]

pytestmark = pytest.mark.timeout(600)

TEXTS = (
    "", " ", "\x00", "a\x00b", "\x7f\x1b[31m", "\u3164", "\u202egnp", "\ufffe", "\U0010ffff", "Cafe\u0301", "%", "*",
    "'", '"', "../..", "null", "true", "-1", "0", "1e400", "NaN", "Infinity", str(2**31), str(2**63), str(-(2**63) - 1),
    "9" * 5000, "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "2026-13-01T00:00:00Z", "2026-01-01",
    "x" * 100_000,
)  # fmt: skip
IN_URLS = [quote(text, safe="") for text in TEXTS if len(text) < 10_000]
QUERY_BYTES = ("%ff", "%ed%a0%80", "%c0%80", "%")
JSON_VALUES = (
    *map(json.dumps, TEXTS),
    "null", "true", "[]", "{}", "[[]]", '{"a":1}', "0", "-1", "0.5", "1e-320", "1e308", "1e400", "-0.0", "NaN",
    "Infinity", "-Infinity", str(2**31), str(2**53 + 1), str(2**62), str(2**63 - 1), str(2**63), str(2**64),
    str(-(2**63) - 1), "9" * 4000,
    r'"\ud800"', r'"\udfff\ud800"', r'"a\u0000"', r'["\u0000"]', "[null]", "[1]", f'["{"x" * 300}"]',
    json.dumps(["m"] * 10_000), json.dumps([2**63]), json.dumps([-1, 0, 101]),
)  # fmt: skip
BODIES = (
    b"", b"\x00", b"\xff\xfe", b"null", b"[]", b"1", b'"x"', b"{", b"{}", b'{"a":1}', b"NaN", b"[" * 5000,
    b'{"a":' * 5000, b'\xef\xbb\xbf{}', b'{"name":"a","name":"b"}', rb'{"\ud800":1}', b'{"\xff":1}',
)  # fmt: skip
EVERY = 1 if THOROUGH else 8  # a place gets each value, or every eighth, and the next place those after them
ETAGS = ("", "*", '"', '"x"', 'W/"x"', "x" * 9000, '"\u00ff"')


class Caller:
    """Sends requests as an owner, and keeps those that were answered 5xx."""

    def __init__(self, world: World, http: httpx.AsyncClient) -> None:
        self._world, self._http = world, http
        self.failed: list[str] = []
        self.num_sent = 0

    async def send(
        self, method: str, path: str, *, query: str = "", body: bytes | None = None, etag: str | None = None
    ) -> int:
        headers = {"Authorization": f"Bearer {self._world.keys['owner']}"}
        if etag is not None:
            headers |= {"If-Match": etag, "If-None-Match": etag}
        if body is not None:
            headers["Content-Type"] = "application/json"
        url = httpx.URL(f"http://gateway{ADMIN_PATH}").copy_with(
            raw_path=f"{ADMIN_PATH}{path}{'?' if query else ''}{query}".encode("ascii")
        )
        encoded = {name.encode(): value.encode("latin-1") for name, value in headers.items()}
        self.num_sent += 1
        answer = await self._http.request(method, url, content=body, headers=list(encoded.items()))
        if answer.status_code >= 500:
            sent = f"{method} {path[:90]} ?{query[:90]} {(body or b'')[:160]!r} etag={etag!r}"
            self.failed.append(f"{sent} -> {answer.status_code} {answer.text[:200]}")
        return answer.status_code


@pytest.fixture
async def caller(world: World) -> AsyncIterator[Caller]:
    transport = httpx.ASGITransport(app=world.app)
    async with httpx.AsyncClient(transport=transport, timeout=60) as http:
        yield Caller(world, http)


def operations(world: World) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Each operation of the document: method, path below the admin API's, and what the document says of it."""
    document = Documents(GatewaySettings).get(world.app, DocumentPart.ADMIN)
    for path, methods in document["paths"].items():
        for method, told in methods.items():
            if method in ("get", "post", "put", "patch", "delete"):
                yield method.upper(), path.removeprefix(ADMIN_PATH), told


def valid_requests(world: World, route: str) -> list[tuple[dict[str, str], dict[str, str], dict[str, Any] | None]]:
    """Path values, query and body of each request in the table of roles that has this route."""
    values = {**world.b.__dict__, "new": "hostile"}
    return [
        (
            {name: fill(value, values) for name, value in ask.path.items()},
            {name: fill(value, values) for name, value in ask.query.items()},
            None if ask.body is None else {name: fill(value, values) for name, value in ask.body.items()},
        )
        for ask in ASKS
        if ask.route == route
    ]


def in_path(path: str, values: dict[str, Any]) -> str:
    return re.sub(r"{(\w+)}", lambda found: quote(str(values.get(found[1], "x")), safe=""), path)


def joined(query: dict[str, str]) -> str:
    return "&".join(f"{name}={quote(value, safe='')}" for name, value in query.items())


def encoded(body: dict[str, Any], name: str, value: str) -> bytes:
    """The body as JSON, with this text in place of a field's value."""
    fields = {**{field: json.dumps(one) for field, one in body.items()}, name: value}
    return ("{" + ",".join(f"{json.dumps(field)}:{one}" for field, one in fields.items()) + "}").encode()


def body_fields(told: dict[str, Any], document_schemas: dict[str, Any]) -> list[str]:
    content = told.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    schema = document_schemas.get(content.get("$ref", "").rpartition("/")[2], content)
    return list(schema.get("properties", {}))


class TenantRoundRobin:
    """Hands out the values for one place after the other, so that each value is sent to some of them."""

    def __init__(self) -> None:
        self._turn = 0

    def of(self, values: Sequence[Any]) -> Sequence[Any]:
        self._turn += 1
        return values[self._turn % EVERY :: EVERY]


@pytest.mark.parametrize("dialect", [pytest.param("sqlite", marks=pytest.mark.thorough), "postgresql"], indirect=True)
async def test_no_value_in_any_parameter_of_any_route_makes_a_5xx(world: World, caller: Caller) -> None:
    known, turns = {**world.a.__dict__}, TenantRoundRobin()
    in_paths = (*filter(None, IN_URLS), *QUERY_BYTES, world.b.tenant_id, world.b.tenant_name)
    for method, path, told in operations(world):
        requests = valid_requests(world, f"{method} {path}") or [({}, {}, None)]
        paths, query, body = requests[0]
        content = None if body is None else json.dumps(body).encode()
        for name in re.findall(r"{(\w+)}", path):
            for text in turns.of(in_paths):
                hostile = path.replace(f"{{{name}}}", text)
                await caller.send(method, in_path(hostile, known | paths), query=joined(query), body=content)
        if method != "GET":
            for etag in turns.of(ETAGS):
                await caller.send(method, in_path(path, known | paths), query=joined(query), body=content, etag=etag)
            continue
        names = [one["name"] for one in told.get("parameters", []) if one["in"] == "query"]
        for name in names:
            others = {one: value for one, value in query.items() if one != name}
            for text in turns.of((*IN_URLS, *QUERY_BYTES)):
                more = f"{joined(others)}&" if others else ""
                await caller.send(method, in_path(path, known | paths), query=f"{more}{name}={text}")
    assert not caller.failed, "\n".join(caller.failed)
    assert caller.num_sent > 1000 // EVERY


@pytest.mark.parametrize("dialect", [pytest.param("sqlite", marks=pytest.mark.thorough), "postgresql"], indirect=True)
async def test_no_value_in_any_field_of_any_body_makes_a_5xx(world: World, caller: Caller) -> None:
    schemas = Documents(GatewaySettings).get(world.app, DocumentPart.ADMIN)["components"]["schemas"]
    known, turns = {**world.a.__dict__}, TenantRoundRobin()
    for method, path, told in operations(world):
        if "requestBody" not in told:
            continue
        fields = body_fields(told, schemas)
        requests = valid_requests(world, f"{method} {path}") or [({}, {}, {})]
        for paths, query, body in requests[:2]:
            where = in_path(path, known | paths)
            for content in turns.of(BODIES):
                await caller.send(method, where, query=joined(query), body=content)
            for name in sorted({*fields, *(body or {})}):
                for value in turns.of(JSON_VALUES):
                    await caller.send(method, where, query=joined(query), body=encoded(body or {}, name, value))
    assert not caller.failed, "\n".join(caller.failed)
    assert caller.num_sent > 1000 // EVERY


async def test_administrators_that_do_the_same_thing_at_once_get_conflicts_and_no_5xx(
    world: World, caller: Caller
) -> None:
    known = {**world.a.__dict__}
    for method, path, _ in operations(world):
        if method == "GET":
            continue
        for paths, query, body in valid_requests(world, f"{method} {path}"):
            content = None if body is None else json.dumps(body).encode()
            where = in_path(path, known | paths)
            await asyncio.gather(*(caller.send(method, where, query=joined(query), body=content) for _ in range(4)))
    assert not caller.failed, "\n".join(caller.failed)


async def test_one_of_several_concurrent_tenants_with_one_name_is_created(world: World, caller: Caller) -> None:
    made = [caller.send("POST", "/tenants", body=json.dumps({"name": name}).encode()) for name in ("One", "ONE") * 5]
    assert sorted(await asyncio.gather(*made)) == [201] + [409] * 9
