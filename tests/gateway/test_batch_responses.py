"""Batches of responses with the real `openai` package against a gateway on loopback."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from .batch_requests import results, submit, wait_for
from .conftest import RunningGateway
from .test_response_tool_kinds import StartCalling, call, start_calling  # noqa: F401  a fixture

RESPONSES = "/v1/responses"
ADD = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}}


def line(custom_id: str, **body: Any) -> dict[str, Any]:
    asked = {"model": "tiny", "input": "hello", "max_output_tokens": 3, **body}
    return {"custom_id": custom_id, "method": "POST", "url": RESPONSES, "body": asked}


async def test_lines_get_the_responses_of_live_requests_which_are_not_stored(gateway: RunningGateway) -> None:
    lines = [line("plain", instructions="be brief"), line("kept", store=True, background=True)]
    batch = await wait_for(gateway, await submit(gateway, lines, RESPONSES), "completed")
    output = await results(gateway, batch.output_file_id)
    first, second = (one["response"]["body"] for one in output)
    raw = await gateway.client.responses.with_raw_response.create(**lines[0]["body"])
    live = json.loads(raw.text)
    own = {"id", "created_at", "output", "service_tier", "completed_at"}
    assert {name: value for name, value in live.items() if name not in own} == {
        name: value for name, value in first.items() if name not in own
    }
    assert first["output"][0]["content"] == live["output"][0]["content"]
    assert (second["store"], second["background"], second["status"]) == (False, False, "incomplete")
    with pytest.raises(openai.NotFoundError):
        await gateway.client.responses.retrieve(second["id"])


async def test_calls_of_tools_are_items_of_a_lines_response(start_calling: StartCalling) -> None:  # noqa: F811
    async with start_calling(call("add", a=1)) as gateway:
        lines = [line("call", tools=[ADD], max_output_tokens=100)]
        batch = await wait_for(gateway, await submit(gateway, lines, RESPONSES), "completed")
        (output,) = await results(gateway, batch.output_file_id)
        (item,) = output["response"]["body"]["output"]
        assert (item["type"], item["name"], item["arguments"]) == ("function_call", "add", '{"a": 1}')


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"previous_response_id": "resp_1"}, "cannot continue a stored conversation"),
        ({"conversation": "conv_1"}, "cannot continue a stored conversation"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "item_reference"),
        ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "compaction"),
        ({"stream": True}, "'stream' cannot be true"),
    ],
)
async def test_a_line_that_needs_a_stored_conversation_or_a_stream_fails_the_batch(
    gateway: RunningGateway, changes: dict[str, Any], message: str
) -> None:
    batch = await wait_for(gateway, await submit(gateway, [line("bad", **changes)], RESPONSES), "failed")
    assert message in batch.errors.data[0].message
