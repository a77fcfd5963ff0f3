"""An answer that is not finite ends with an error code of its own; it is billed only where text was sent before."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import openai
import pytest

from moiety_platform.cli.engine_journals import compare
from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_wire.messages import Failed, FailureCode, ModelCard, Submit

from .conftest import NewCard, StartGateway

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
BODIES = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/completions": {"prompt": "hello"},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 8},
    "/v1/embeddings": {"input": "hello"},
}


def garbage(submit: Submit) -> Any:
    return Failed(submit.request_id, 1, FailureCode.NON_FINITE, "the model computed values that are not finite")


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_non_finite_value_before_the_first_token_is_not_billed_or_retried(
    start_gateway: StartGateway, new_card: NewCard, path: Any, stream: bool
) -> None:
    asked = []

    def answer(submit: Submit) -> Any:
        asked.append(submit.request_id)
        return garbage(submit)

    cards = [msgspec.structs.replace(new_card(f"engine-{i}"), embedding_width=4) for i in range(2)]
    engines = [FakeEngineClient(card, answer) for card in cards]
    async with start_gateway(engines) as gateway:
        more = {"stream": True} if stream and path != "/v1/embeddings" else {}
        status, _, body = await gateway.post(path, {"model": "tiny", **BODIES[path], **more})
        assert status == 502
        assert b"not finite" in body
        (row,) = await gateway.rows.wait_for(1)
        assert (row.outcome, row.http_status, row.error_code) == ("failed", 502, "non_finite_output")
        assert (row.prompt_tokens, row.output_tokens, row.cost_nanodollars) == (0, 0, 0)
    assert len(asked) == 1


async def test_tokens_sent_before_a_non_finite_value_are_billed_and_no_others(
    start_gateway: StartGateway, card: ModelCard
) -> None:
    def breaks(submit: Submit) -> Iterator[Any]:
        yield 65, "a"
        yield 66, "b"
        yield garbage(submit)

    engine = FakeEngineClient(card, breaks)
    async with start_gateway([engine]) as gateway:
        stream = await gateway.client.chat.completions.create(model="tiny", messages=HELLO, stream=True)
        text = ""
        with pytest.raises(openai.APIError) as caught:
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""
        assert (text, caught.value.code) == ("ab", "non_finite_output")
        (row,) = await gateway.rows.wait_for(1)
        assert (row.outcome, row.output_tokens) == ("failed", 2)
        assert row.prompt_tokens > 0
        status, _, body = await gateway.post("/v1/chat/completions", {"model": "tiny", "messages": HELLO})
        assert (status, json.loads(body)["error"]["code"]) == (502, "non_finite_output")
        row = (await gateway.rows.wait_for(2))[1]
        assert (row.prompt_tokens, row.output_tokens) == (0, 0)


def test_a_bill_that_was_waived_is_no_difference() -> None:
    row: dict[str, Any] = {"outcome": "failed", "error_code": "non_finite_output", "output_tokens": 0}
    counted = {"req": {"req-0": 5}}
    assert compare(counted, {"req": row})["differences"] == []
    assert compare(counted, {"req": row | {"error_code": "engine_refused"}})["differences"] == []
    assert len(compare(counted, {"req": row | {"error_code": "engine_failed"}})["differences"]) == 1
    assert len(compare(counted, {"req": row | {"output_tokens": 4}})["differences"]) == 1
