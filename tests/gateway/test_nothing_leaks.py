"""Marked prompts, answers and keys, sent through every path: in no span, no metric, no line of the log, nothing that
the admin API tells, and in the database only where a client's own is given back to it."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from pathlib import Path
from typing import Any

import httpx
from prometheus_client import generate_latest
from sqlalchemy import select

from moiety_platform.db.base import Base
from moiety_platform.db.session import Database
from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_platform.trace_store.models import TraceRecord
from moiety_platform.traces.exporters import store_exporter
from moiety_platform.traces.sender import SpanSender
from moiety_wire.messages import Failed, FailureCode, Submit

from .batch_requests import chat_line, submit, wait_for
from .conftest import NewCard, RunningGateway, StartGateway
from .test_trace_receiver import TOKEN, run_store

MARK = "zebracrossing"
PERSON = "ladybird"  # end user, and value of a tag: kept with the usage, and shown to administrators alone
TEXT = f"what is a {MARK}?"
FAILS = 7  # tokens at which the engine fails
PIXEL = base64.b64encode(MARK.encode()).decode()
USER = [{"role": "system", "content": TEXT}, {"role": "user", "content": TEXT, "name": MARK}]
TOOL = {"name": MARK, "description": TEXT, "parameters": {"type": "object", "properties": {MARK: {"type": "string"}}}}
CHAT = {"model": "tiny", "messages": USER, "max_tokens": 3, "stop": [MARK], "user": PERSON, "metadata": {"m": PERSON}}
KEPT_BY_DESIGN = {"objects", "batch_lines", "responses", "idempotent_requests"}  # a client's own, given back to it
HEADERS = {
    "Idempotency-Key": MARK, "traceparent": MARK, "tracestate": f"v={MARK}", "baggage": f"m={MARK}",
    "User-Agent": MARK, "X-Api-Key": MARK, "Cookie": MARK,
}  # fmt: skip

ASKS = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", CHAT | {"stream": True, "n": 2, "logprobs": True, "top_logprobs": 2}),
    ("/v1/chat/completions", CHAT | {"tools": [{"type": "function", "function": TOOL}]}),
    ("/v1/chat/completions", CHAT | {"model": MARK}),
    ("/v1/chat/completions", CHAT | {"max_tokens": 10**6}),
    ("/v1/chat/completions", CHAT | {MARK: MARK, "temperature": MARK}),
    ("/v1/chat/completions", CHAT | {"messages": [{"role": MARK, "content": TEXT}]}),
    ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": [{"type": "image_url", "u": PIXEL}]}]}),
    ("/v1/chat/completions", f'{{"model": "{MARK}'.encode()),
    ("/v1/completions", {"model": "tiny", "prompt": [TEXT, MARK], "max_tokens": 3, "stop": [TEXT]}),
    ("/v1/completions", {"model": "tiny", "prompt": TEXT, "max_tokens": FAILS}),
    ("/v1/messages", {"model": "tiny", "system": TEXT, "messages": USER[1:], "max_tokens": 3}),
    ("/v1/messages", {"model": "tiny", "messages": USER[1:], "max_tokens": 3, "stream": True}),
    ("/v1/messages", {"model": "tiny", "messages": [{"role": "user", "content": TEXT}], "max_tokens": 3}),
    ("/v1/responses", {"model": "tiny", "input": TEXT, "instructions": TEXT, "store": True, "max_output_tokens": 3}),
    ("/v1/responses", {"model": "tiny", "input": TEXT, "previous_response_id": MARK}),
    ("/v1/embeddings", {"model": "tiny", "input": [TEXT, MARK]}),
    ("/tokenize", {"model": "tiny", "prompt": TEXT}),
    ("/v1/files", TEXT.encode()),
    (f"/{MARK}", CHAT),
]  # fmt: skip


def answer(submit: Submit) -> Any:
    """Answer with the prompt's words, or with the error of an engine that fails."""
    if submit.stopping.max_tokens == FAILS:
        return Failed(submit.request_id, 0, FailureCode.ENGINE_FAILED, TEXT)
    return [(65, MARK) for _ in range(submit.stopping.max_tokens)]


async def test_prompts_answers_and_keys_are_only_where_clients_get_them_back(
    start_gateway: StartGateway, new_card: NewCard, logged: io.StringIO, tmp_path: Path
) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()
    async with run_store(folder) as store:
        sender = SpanSender("store", store_exporter(store.endpoint, TOKEN), "g", interval_s=0.01)
        engine = FakeEngineClient(new_card(embedding_width=8), answer)
        async with start_gateway([engine], sender, stores_usage=True) as gateway:
            statuses = [await send_everything(gateway), await send_everything(gateway, f"mty_{'0' * 16}.{MARK}")]
            batch = await submit(gateway, [chat_line(f"{MARK}-{number}", TEXT) for number in range(3)])
            await wait_for(gateway, batch, "completed")
            searched = ("GET", f"/admin/v1/traces?tenant_id={MARK}", b"", gateway.admin_key)
            statuses.append({(await gateway.request(*searched))[0]})
            made = await make_keys(gateway)
            statuses.append({(await gateway.post("/v1/chat/completions", CHAT, key))[0] for key in made})
            told = await read_admin_api(gateway)
            tables = await read_tables(gateway.database)
            tables["objects"] = "".join(await asyncio.to_thread(read_files, tmp_path / "objects"))
            metrics = generate_latest(gateway.metrics.registry).decode()
            keys = [key.rpartition(".")[2] for key in (gateway.key, gateway.admin_key, *made)]
        await asyncio.to_thread(sender.close)
        num_traces = await store.count(TraceRecord, 16)
        async with httpx.AsyncClient() as http:
            metrics += (await http.get(f"{store.url}/metrics")).text
    stored = b"".join(file.read_bytes() for file in folder.iterdir()).decode("latin-1")
    assert statuses[0] >= {200, 400, 404, 502} and statuses[1:] == [{401, 404}, {200}, {200, 403}]
    assert num_traces >= 16 and "chat tiny" in stored and "moiety_requests_total" in metrics
    assert '"event":"request"' in logged.getvalue()
    asked_for = {name: text for name, text in tables.items() if name not in KEPT_BY_DESIGN}
    for secret in (MARK, PIXEL, *keys, TOKEN):
        found = {"spans": stored, "log": logged.getvalue(), "metrics": metrics, "admin API": told, **asked_for}
        assert [where for where, text in found.items() if secret in text] == [], secret
    everywhere = {"spans": stored, "log": logged.getvalue(), "metrics": metrics, "admin API": told, **asked_for}
    assert [where for where, text in everywhere.items() if PERSON in text] == ["admin API", "usage"]
    assert len(found) > 25 and all(MARK in tables[name] for name in KEPT_BY_DESIGN)
    for secret in keys:
        assert [name for name, text in tables.items() if secret in text] == [], secret


async def send_everything(gateway: RunningGateway, key: str | None = None) -> set[int]:
    """Send every request; return the statuses."""
    found = set()
    for number, (path, body) in enumerate(ASKS):
        headers = HEADERS | {"Idempotency-Key": f"{MARK}-{number}", "Content-Type": "application/json"}
        if "messages" in path and key is None:  # where that header is the key
            headers["X-Api-Key"] = gateway.key
        status, _, _ = await gateway.post(path, body, key, headers)
        found.add(status)
    return found


async def make_keys(gateway: RunningGateway) -> list[str]:
    """Create a key for inference and one of an administrator by the admin API, and rotate each; return the texts of all
    four."""

    async def call(path: str, body: object) -> Any:
        status, _, answer = await gateway.request(
            "POST", f"/admin/v1{path}", json.dumps(body).encode(), gateway.admin_key
        )
        assert status == 201, answer
        return json.loads(answer)

    _, _, listed = await gateway.request("GET", "/admin/v1/projects", b"", gateway.admin_key)
    project = json.loads(listed)["data"][0]["id"]
    asked = ({"name": "one", "project_id": project}, {"name": "another", "role": "viewer"})
    made = [await call("/keys", body) for body in asked]
    made += [await call(f"/keys/{one['key']['id']}/rotate", {"grace_s": 60}) for one in made]
    return [one["secret"] for one in made]


async def read_admin_api(gateway: RunningGateway) -> str:
    """All that it tells without being asked for one thing, which is what the dashboard's pages are made of."""
    told = ""
    _, _, schema = await gateway.request("GET", "/schema/admin.json", b"", gateway.admin_key)
    for path, item in json.loads(schema)["paths"].items():
        if "{" not in path and "get" in item:
            needed = "&".join(f"{one['name']}=x" for one in item["get"].get("parameters", []) if one["required"])
            status, _, answer = await gateway.request("GET", f"{path}?{needed}", b"", gateway.admin_key)
            assert status in (200, 403 if path.startswith("/admin/v1/me") else 404, 404), (path, status)
            told += f"{path}: {answer.decode()}\n"
    return told


def read_files(folder: Path) -> list[str]:
    return [path.read_text(encoding="latin-1") for path in folder.rglob("*") if path.is_file()]


async def read_tables(database: Database) -> dict[str, str]:
    """All rows of each table, as text."""
    async with database.read() as session:
        return {
            table.name: "\n".join(map(str, (await session.execute(select(table))).all()))
            for table in Base.metadata.sorted_tables
        }
