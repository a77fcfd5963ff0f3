"""The OpenAPI documents against the gateway that serves them, by schemathesis: what they allow is taken, what they do
not is refused, and every answer is one that they tell of.

`MOIETY_OPENAPI_EXAMPLES=300` makes it search for long, with other requests each time; else it tries the same few.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import msgspec
import pytest
from tests.conftest import THOROUGH

from moiety_platform.db.session import Database
from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_platform.trace_store.models import SpanRecord
from moiety_wire.experts import ExpertLoad, TenantTokens, pack_counts
from moiety_wire.messages import ModelCard, Submit

from .conftest import RunningGateway, StartGateway, ToolCard

HOOKS = Path(__file__).with_name("openapi_hooks.py")
EXAMPLES = os.environ.get("MOIETY_OPENAPI_EXAMPLES")
OURS = "positive_data_acceptance,negative_data_rejection"  # the hooks have them, with what has to be excused
FEW = ["--max-examples", "5" if THOROUGH else "2", "--generation-deterministic"]
# With MOIETY_TEST_ALL, every bound of every field, every method and every missing header are tried here.
COVERED = {
    "public": ["tokenize", "list_batches", "delete_file", "list_models", "readyz"],
    "admin": ["create_tenant", "list_keys", "set_quota"],
}

CALL = '<tool_call>\n{"name": "tool0", "arguments": {"a": 1}}\n</tool_call>'

BATCH = "/v1/messages/batches/{message_batch_id}"
OF_ENDED = {f"GET {BATCH}/results", f"DELETE {BATCH}"}  # of a batch that has ended, which none does here
# Steps that depend on each other, and routes that take a token of a person: see tests/tenancy.
UPLOADED_OR_SIMULATED = r"^/admin/v1/(adapters|simulations|contract-checks|me|invitations)\b"


def call_a_tool(submit: Submit) -> list[tuple[Any, ...]]:
    return [(65, "<think>Hm.</think>"), (65, "Well."), (66, CALL)]


pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200 if EXAMPLES else 300)]


@pytest.mark.parametrize("part", ["public", "admin"])
async def test_the_api_is_what_its_document_says(
    start_gateway: StartGateway, tool_card: ToolCard, tmp_path: Path, part: str
) -> None:
    searches = [["--phases", "fuzzing", *FEW]]
    if THOROUGH:
        searches.append(["--phases", "coverage", *FEW, *_only(COVERED[part])])
    if EXAMPLES:
        searches = [["--phases", "coverage,fuzzing", "--max-examples", EXAMPLES, "--continue-on-failure"]]
    engine = FakeEngineClient(
        msgspec.structs.replace(
            tool_card("hermes"), model="tiny", embedding_width=8, labels=tuple("abcdefgh"), score_activation="softmax"
        ),
        call_a_tool,
    )
    engine.expert_loads[None] = ExpertLoad(1, 0, 0, (0,), 2, 1, pack_counts([3, 1]), [], [TenantTokens("t", 4)])
    engine.expert_ranks = 2
    idle: dict[str, Any] = {
        "batch_concurrency": 0,
        "max_open_batches_per_tenant": 10_000,
    }  # some are left to cancel
    async with start_gateway([engine], stores_usage=True, **idle) as gateway:
        answered = set()
        for search in searches:
            answered |= await _run_schemathesis(gateway, part, tmp_path, search)
        _, _, document = await gateway.request("GET", f"/schema/{part}.json")
    served = {label.rpartition(" ")[0] for label in answered if label.rpartition(" ")[2] in ("200", "201", "202")}
    assert served == _operations(json.loads(document), served=True) - OF_ENDED


async def test_every_document_is_served_as_json_and_as_a_page_without_a_key(gateway: RunningGateway) -> None:
    documents = {}
    for name in ("openapi", "public", "admin"):
        status, headers, body = await gateway.request("GET", f"/schema/{name}.json", headers={"Authorization": None})
        assert (status, headers["content-type"]) == (200, "application/vnd.oai.openapi+json")
        documents[name] = _operations(json.loads(body))
        page = await gateway.request("GET", f"/schema/{name}", headers={"Authorization": None})
        assert (page[0], page[1]["content-type"].partition(";")[0]) == (200, "text/html")
    assert (await gateway.request("GET", "/schema"))[0] == 200
    assert documents["openapi"] == documents["public"] | documents["admin"]
    assert not documents["public"] & documents["admin"]
    assert all(("/admin/" in one) == (one in documents["admin"]) for one in documents["openapi"])


async def test_a_document_has_the_bounds_of_the_gateway_that_serves_it(
    start_gateway: StartGateway, card: ModelCard
) -> None:
    async with start_gateway([FakeEngineClient(card)], max_choices=3, max_messages=7) as gateway:
        _, _, body = await gateway.request("GET", "/schema/public.json")
    fields = json.loads(body)["components"]["schemas"]["ChatBody"]["properties"]
    assert (fields["n"]["anyOf"][0]["maximum"], fields["messages"]["maxItems"]) == (3, 7)


async def test_every_path_documents_all_of_its_methods(gateway: RunningGateway) -> None:
    admin: dict[str, Any] = {"Authorization": f"Bearer {gateway.admin_key}"}
    for path, methods in (
        ("/v1/files", "GET, HEAD, OPTIONS, POST"),
        ("/v1/files/file_1", "DELETE, GET, HEAD, OPTIONS"),
        ("/admin/v1/prices", "DELETE, GET, HEAD, OPTIONS, PUT"),
        ("/admin/v1/webhooks", "GET, HEAD, OPTIONS, POST"),
    ):
        status, headers, _ = await gateway.request("OPTIONS", path, headers=admin)
        assert (status, headers["allow"]) == (204, methods)


ASKED = [{"role": "user", "content": "How warm is it?"}]
FUNCTION: dict[str, Any] = {"name": "tool0", "parameters": {"type": "object"}}
CHAT: dict[str, Any] = {
    "messages": ASKED,
    "tools": [{"type": "function", "function": FUNCTION}],
    "logprobs": True,
    "top_logprobs": 1,
}
INCLUDED: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
ANSWERED = [
    ("/v1/chat/completions", {**CHAT, "n": 2}),
    ("/v1/chat/completions", {**CHAT, "tool_choice": "none"}),
    ("/v1/chat/completions", {"messages": ASKED, "tools": [{"type": "custom", "custom": {"name": "tool0"}}]}),
    ("/v1/chat/completions", {"messages": ASKED, "functions": [FUNCTION]}),
    ("/v1/completions", {"prompt": "a", "logprobs": 1}),
    ("/v1/completions", {"prompt": "a", "echo": True}),
    ("/v1/messages", {"messages": ASKED, "max_tokens": 99, "tools": [{"name": "tool0", "input_schema": {}}]}),
    ("/v1/messages", {"messages": ASKED, "max_tokens": 1}),
    ("/v1/responses", {"input": ASKED, "tools": [{"type": "function", **FUNCTION}], **INCLUDED}),
    ("/v1/responses", {"input": ASKED, "tools": [{"type": "custom", "name": "tool0"}], "tool_choice": "auto"}),
    ("/v1/responses", {"input": "a", "max_output_tokens": 1, "store": True}),
    ("/v1/responses", {"input": "a", "text": {"format": {"type": "json_schema", "name": "a", "schema": {}}}}),
]


SEEN_ELSEWHERE = {f"response.shell_call_command.{kind}" for kind in ("added", "delta", "done")}  # by name of the tool


async def test_openapi_documents_contain_every_field_of_answers_and_events(
    start_gateway: StartGateway, thinking_card: ModelCard
) -> None:
    engine = FakeEngineClient(thinking_card)

    def break_off(submit: Submit) -> Iterator[Any]:
        yield from [(65, "x")] * 20
        engine.die()

    streams: dict[str, dict[str, Any]] = {path: {} for path, _ in ANSWERED}
    seen: dict[str, set[Any]] = {path: set() for path, _ in ANSWERED}
    async with start_gateway([engine]) as gateway:
        _, _, document = await gateway.request("GET", "/schema/public.json")
        document = _closed(json.loads(document))
        for path, body in ANSWERED:
            told = document["paths"][path]["post"]["responses"]
            streams[path] = told["200"]["content"]["text/event-stream"]["schema"]
            options = {"stream_options": {"include_usage": True}} if "completions" in path else {}
            for engine.script in (call_a_tool, break_off):
                await engine.start()
                status, _, answer = await gateway.post(path, {"model": "hermes", **body})
                name = told[str(status)].get("$ref", "").rpartition("/")[2]
                told_of = document["components"]["responses"][name] if name else told[str(status)]
                _check(told_of["content"]["application/json"]["schema"], json.loads(answer), document)
                await engine.start()
                status, _, answer = await gateway.post(path, {"model": "hermes", "stream": True, **options, **body})
                if status == 200:
                    seen[path] |= _check_events(streams[path], answer.decode(), document)
    told_of = {path: set(_by_name(stream)) for path, stream in streams.items()}
    told_of["/v1/responses"] -= SEEN_ELSEWHERE
    assert seen == told_of


def _closed(document: dict[str, Any]) -> Any:
    """Return the document with objects that have no fields but the declared ones."""
    for schema in document["components"]["schemas"].values():
        if "properties" in schema:
            schema["additionalProperties"] = False
    return document


def _by_name(stream: Any) -> Any:
    """Return the schemas of a stream's events by their names."""
    every = [one["properties"] for one in stream.get("anyOf", [stream])]
    return {one.get("event", {}).get("const"): one["data"].get("anyOf", [one["data"]]) for one in every}


def _check_events(schema: dict[str, Any], stream: Any, document: dict[str, Any]) -> Any:
    """Check each event against its schema; return the names of the events."""
    told, names = _by_name(schema), set()
    for event in stream.strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in event.splitlines())
        names.add(fields.get("event"))
        payloads = told[fields.get("event")]
        if {"const": fields["data"]} not in payloads:
            wanted = [one["contentSchema"] for one in payloads if "contentSchema" in one]
            _check({"anyOf": wanted}, json.loads(fields["data"]), document)
    return names


def _check(schema: dict[str, Any], value: Any, document: dict[str, Any]) -> None:
    jsonschema_rs.validate({**schema, "components": document["components"]}, value)


def _only(operation_ids: Any) -> Any:
    return [word for one in operation_ids for word in ("--include-operation-id", one)]


def _operations(document: dict[str, Any], *, served: bool = False) -> Any:
    """Return all operations, or those that can have an answer other than an error."""
    return {
        f"{method.upper()} {path}"
        for path, item in document["paths"].items()
        for method, operation in item.items()
        if not served or _is_answered(path, operation)
    }


def _is_answered(path: str, operation: dict[str, Any]) -> bool:
    return not re.match(UPLOADED_OR_SIMULATED, path) and any(one.startswith("2") for one in operation["responses"])


async def _keep_trace(database: Database) -> Any:
    """Return the id of a trace that exists."""
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    async with database.write() as session:
        await session.merge(
            SpanRecord(trace_id=trace_id, span_id="1" * 16, name="chat tiny", kind=2, service="moiety-gateway",
                       tenant_id="", start_ns=1, end_ns=2, status=0, status_message="", attributes={}, events=[],
                       links=[], stored_ms=1)
        )  # fmt: skip
    return trace_id


async def _run_schemathesis(gateway: RunningGateway, part: Any, tmp_path: Path, search: Any) -> Any:
    """Run schemathesis; return the statuses of each operation. Fails with its output if it finds an error."""
    answered = tmp_path / "answered.json"
    key = gateway.admin_key if part == "admin" else gateway.key
    known: dict[str, Any] = {
        "SCHEMATHESIS_HOOKS": str(HOOKS),
        "PYTHONPATH": str(HOOKS.parents[2]),
        "MOIETY_URL": gateway.url,
        "MOIETY_KEY": gateway.key,
        "MOIETY_ADMIN_KEY": gateway.admin_key,
        "MOIETY_ANSWERED": str(answered),
        "MOIETY_TENANT_ID": gateway.keys.tenant_id,
        "MOIETY_TRACE_ID": await _keep_trace(gateway.database),
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "schemathesis.cli", "run", f"{gateway.url}/schema/{part}.json"),
        *("--header", f"Authorization: Bearer {key}", "--header", f"x-api-key: {key}"),
        *("--exclude-checks", OURS, "--request-timeout", "60", "--no-color"),
        *("--exclude-path-regex", UPLOADED_OR_SIMULATED),
        *search,
        cwd=tmp_path,
        env={**os.environ, **known},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    return set(json.loads(answered.read_text()))
