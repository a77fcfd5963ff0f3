"""Batches of embeddings with the real `openai` package against a gateway on loopback."""

from __future__ import annotations

import json
from typing import Any

from moiety_platform.engine_client.fake import FakeEngineClient

from .batch_requests import MODEL, results, submit, usage_rows, wait_for
from .conftest import NewCard, StartGateway

EMBEDDINGS = "/v1/embeddings"


def embedding_line(custom_id: str, given: Any, **body: Any) -> dict[str, Any]:
    asked = {"model": MODEL, "input": given, **body}
    return {"custom_id": custom_id, "method": "POST", "url": EMBEDDINGS, "body": asked}


async def test_embeddings_run_in_a_batch_for_half_the_price_and_are_those_of_a_live_request(
    start_gateway: StartGateway, new_card: NewCard
) -> None:
    engine = FakeEngineClient(new_card(embedding_width=8))
    async with start_gateway([engine], stores_usage=True) as gateway:
        await gateway.admin("PUT", "/prices", {"model": MODEL, "input": "2", "output": "8"})
        await gateway.admin("PATCH", "/classes/batch", {"price_factor": 0.5})  # as it is shipped
        asked = [("z", "abc", {}), ("y", ["abc", "de"], {"encoding_format": "base64"}), ("x", [[5], [6, 7]], {})]
        lines = [embedding_line(name, given, dimensions=4, **more) for name, given, more in asked]
        lines[1:1] = [embedding_line("wide", "a", dimensions=9), embedding_line("long", "a" * 600)]
        batch = await wait_for(gateway, await submit(gateway, lines, EMBEDDINGS), "completed")
        output = await results(gateway, batch.output_file_id)
        assert [one["custom_id"] for one in output] == ["z", "y", "x"]
        rows = {row.request_id: row for row in await usage_rows(gateway) if row.service_class == "batch"}
        for (_, given, more), one in zip(asked, output, strict=True):
            body = one["response"]["body"]
            whole: dict[str, Any] = {"model": MODEL, "input": given, "dimensions": 4, **more}
            status, _, live = await gateway.post(EMBEDDINGS, whole)
            assert (status, json.loads(live)) == (200, body)
            row = rows[one["response"]["request_id"]]
            assert (row.prompt_tokens, row.output_tokens) == (body["usage"]["prompt_tokens"], 0)
            assert (row.endpoint, row.cost_nanodollars) == (EMBEDDINGS, row.prompt_tokens * 1000)
        errors = await results(gateway, batch.error_file_id)
        assert [one["response"]["body"]["error"]["code"] for one in errors] == [
            "invalid_request",
            "context_length_exceeded",
        ]
        assert sum(row.cost_nanodollars for row in rows.values()) == batch.usage.input_tokens * 1000 == 11_000


async def test_a_line_whose_vectors_would_be_too_large_is_refused_before_any_is_made(
    start_gateway: StartGateway, new_card: NewCard
) -> None:
    engine = FakeEngineClient(new_card(embedding_width=100_000))
    async with start_gateway([engine]) as gateway:
        inputs = ["a"] * 20  # of two million numbers
        lines = [embedding_line("no", inputs), embedding_line("yes", inputs, dimensions=3), embedding_line("one", "a")]
        batch = await wait_for(gateway, await submit(gateway, lines, EMBEDDINGS), "completed")
        (error,) = await results(gateway, batch.error_file_id)
        assert (error["custom_id"], error["response"]["body"]["error"]["code"]) == ("no", "answer_too_large")
        assert len(engine.submits) == 21
        batch = await wait_for(gateway, await submit(gateway, [embedding_line("empty", [])], EMBEDDINGS), "failed")
        assert [(one.line, one.param) for one in batch.errors.data] == [(1, "input")]
