"""End users and tags that clients name reach the usage row, by whatever field their API has for them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest

from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_platform.usage.attribution import tags_of
from moiety_platform.usage.billing_context import decode_bill

from .conftest import NewCard, RunningGateway, StartGateway

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
CHAT, COMPLETIONS, MESSAGES, RESPONSES, EMBEDDINGS = (
    f"/v1/{name}" for name in ("chat/completions", "completions", "messages", "responses", "embeddings")
)
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO, "max_tokens": 2},
    COMPLETIONS: {"prompt": "hello", "max_tokens": 2},
    RESPONSES: {"input": "hello", "max_output_tokens": 16},
    MESSAGES: {"messages": HELLO, "max_tokens": 2},
    EMBEDDINGS: {"input": "hello"},
}
METADATA = {"feature": "chat", "not a tag": "x", "long": "x" * 100}


@pytest.mark.parametrize(
    ("path", "fields", "end_user", "tags"),
    [
        (CHAT, {"user": "ann"}, "ann", {}),
        (CHAT, {"user": "ann", "safety_identifier": "h4sh", "metadata": METADATA}, "h4sh", {"feature": "chat"}),
        (CHAT, {"metadata": {"team": "other"}}, None, {}),
        (CHAT, {"user": ""}, None, {}),
        (COMPLETIONS, {"user": "a\0b"}, "a\ufffdb", {}),
        (RESPONSES, {"user": "ann", "metadata": METADATA}, "ann", {"feature": "chat"}),
        (RESPONSES, {"safety_identifier": "h4sh"}, "h4sh", {}),
        (EMBEDDINGS, {"user": "ann"}, "ann", {}),
        (MESSAGES, {"metadata": {"user_id": "ann"}}, "ann", {}),
        (MESSAGES, {"metadata": {"user_id": '{"device_id":"d1","session_id":"s1"}'}}, "d1", {}),
        (MESSAGES, {}, None, {}),
    ],
)
async def test_a_request_is_attributed_to_whom_it_names(
    start_gateway: StartGateway, new_card: NewCard, path: str, fields: Any, end_user: str | None, tags: Any
) -> None:
    engine = FakeEngineClient(msgspec.structs.replace(new_card(), embedding_width=4))
    async with start_gateway([engine]) as gateway:
        body = {"model": "tiny", **BODIES[path], **fields}
        for header in ({}, {"X-Moiety-Tags": "team=search"}):
            assert (await gateway.post(path, body, headers=header))[0] == 200
        plain, tagged = await gateway.rows.wait_for(2)
        team = {"team": "other"} if fields.get("metadata") == {"team": "other"} else {}
        assert (plain.end_user, tags_of(plain.tags)) == (end_user, tags | team)
        assert (tagged.end_user, tags_of(tagged.tags)) == (end_user, tags | {"team": "search"})
        bill = decode_bill(engine.submits[-1].billing_context)
        assert (bill.row.end_user, bill.row.tags) == (tagged.end_user, tagged.tags), "what another gateway would store"


async def test_invalid_tags_are_refused_in_the_apis_error_format(gateway: RunningGateway) -> None:
    for path in (CHAT, MESSAGES):
        status, _, answer = await gateway.post(
            path, {"model": "tiny", **BODIES[path]}, headers={"X-Moiety-Tags": "no tags"}
        )
        error = json.loads(answer)["error"]
        assert (status, "such as team=search, feature=chat" in error["message"]) == (400, True)
    refused, _ = await gateway.rows.wait_for(2)
    assert (refused.outcome, refused.error_code, refused.tags) == ("rejected", "invalid_tags", None)


async def test_end_users_are_neither_in_metrics_nor_in_the_log(gateway: RunningGateway, logged: Any) -> None:
    body = {"model": "tiny", **BODIES[CHAT], "user": "ann-the-user"}
    await gateway.post(CHAT, body, headers={"X-Moiety-Tags": "team=secret-team"})
    await gateway.rows.wait_for(1)
    _, _, metrics = await gateway.request("GET", "/metrics")
    for name in ("ann-the-user", "secret-team"):
        assert name not in metrics.decode() and name not in logged.getvalue()


async def test_lines_of_a_batch_are_attributed_too(gateway: RunningGateway) -> None:
    body = {"model": "tiny", **BODIES[CHAT], "user": "ann", "metadata": {"feature": "night"}}
    line = {"custom_id": "a", "method": "POST", "url": CHAT, "body": body}
    file = await gateway.client.files.create(file=json.dumps(line).encode(), purpose="batch")
    batch = await gateway.client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    async with asyncio.timeout(60):
        while (found := await gateway.client.batches.retrieve(batch.id)).status != "completed":
            assert found.status in ("validating", "in_progress", "finalizing")
            await asyncio.sleep(0.05)
    listed = "/admin/v1/usage/requests?end_user=ann&tag=feature%3Dnight"
    _, _, answer = await gateway.request("GET", listed, key=gateway.admin_key)
    assert [row["tags"] for row in json.loads(answer)["data"]] == [{"feature": "night"}]
