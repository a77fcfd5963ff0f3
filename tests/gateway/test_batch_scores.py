"""Batches of scores, ranks and classes with the real `openai` package against a gateway on loopback."""

from __future__ import annotations

import json
from typing import Any

import pytest

from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_wire.messages import ModelCard

from .batch_requests import MODEL, results, submit, usage_rows, wait_for
from .conftest import StartGateway
from .test_scores import RERANK_PATHS, length_logit, with_segments

PAIR = {"text_1": "ab", "text_2": ["abc", "abcdef"]}
DOCUMENTS = {"query": "q", "documents": ["abc", {"text": "abcdefgh"}, "xyz"], "top_n": 2}


def batch_line(custom_id: str, url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": MODEL, **body}}


def without_id(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name not in ("id", "created")}


@pytest.mark.parametrize(
    ("url", "labels", "activation", "asked"),
    [
        ("/v1/score", ("relevant",), "sigmoid", PAIR),
        ("/v1/score", (), "", PAIR),  # cosines
        *((path, ("relevant",), "sigmoid", DOCUMENTS) for path in RERANK_PATHS),
        ("/v1/rerank", (), "", DOCUMENTS),
        ("/v1/classify", ("no", "yes", "maybe"), "softmax", {"input": ["abc", "de"]}),
    ],
)
async def test_a_line_has_the_answer_of_a_live_request_for_the_price_of_a_batch(
    start_gateway: StartGateway, card: ModelCard, url: str, labels: tuple[str, ...], activation: str, asked: Any
) -> None:
    made = with_segments(card, labels=labels, score_activation=activation, embedding_width=0 if labels else 8)
    engine = FakeEngineClient(made, vector=length_logit)
    async with start_gateway([engine], stores_usage=True) as gateway:
        await gateway.admin("PUT", "/prices", {"model": MODEL, "input": "2", "output": "8"})
        await gateway.admin("PATCH", "/classes/batch", {"price_factor": 0.5})
        lines = [batch_line("a", url, **asked), batch_line("long", url, **asked, truncate_prompt_tokens=1)]
        batch = await wait_for(gateway, await submit(gateway, lines, url), "completed")
        (one,) = await results(gateway, batch.output_file_id)
        body = one["response"]["body"]
        status, _, live = await gateway.post(url, {"model": MODEL, **asked})
        assert (status, without_id(json.loads(live))) == (200, without_id(body))
        (row,) = [row for row in await usage_rows(gateway) if row.service_class == "batch" and row.prompt_tokens]
        num_tokens = body["usage"]["prompt_tokens"]
        assert (row.endpoint, row.prompt_tokens, row.output_tokens) == (url, num_tokens, 0)
        assert row.cost_nanodollars == num_tokens * 1000 and batch.usage.input_tokens == num_tokens
        (error,) = await results(gateway, batch.error_file_id)
        assert (error["custom_id"], error["response"]["status_code"]) == ("long", 400)


async def test_results_that_would_be_too_large_are_refused_before_any_is_made(
    start_gateway: StartGateway, card: ModelCard
) -> None:
    labels = tuple(f"label {number}" for number in range(100_000))
    engine = FakeEngineClient(with_segments(card, labels=labels, score_activation="softmax"))
    async with start_gateway([engine], stores_usage=True) as gateway:
        lines = [batch_line("many", "/v1/classify", input=["a"] * 20)]  # two million numbers
        batch = await wait_for(gateway, await submit(gateway, lines, "/v1/classify"), "completed")
        (error,) = await results(gateway, batch.error_file_id)
        assert error["response"]["body"]["error"]["code"] == "answer_too_large"
        status, _, answer = await gateway.post("/v1/classify", {"model": MODEL, "input": ["a"] * 200})
        assert (status, json.loads(answer)["error"]["code"]) == (400, "answer_too_large")
        assert not engine.submits


async def test_a_line_that_the_model_cannot_serve_fails_by_itself(start_gateway: StartGateway, card: ModelCard) -> None:
    async with start_gateway([FakeEngineClient(card)], stores_usage=True) as gateway:
        lines = [batch_line("a", "/v1/rerank", **DOCUMENTS)]
        batch = await wait_for(gateway, await submit(gateway, lines, "/v1/rerank"), "completed")
        (error,) = await results(gateway, batch.error_file_id)
        assert error["response"]["body"]["error"]["code"] == "score_not_supported"
