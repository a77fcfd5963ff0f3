"""Sampling parameters that a request leaves out are those that the model's authors recommend."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import pytest
from tests.gateway.conftest import MODEL, StartGateway

from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_wire.messages import ModelCard

DEFAULTS: dict[str, float] = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}
TEXT = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TEXT, "max_completion_tokens": 2},
    "/v1/completions": {"prompt": "hello", "max_tokens": 2},
    "/v1/responses": {"input": "hello", "max_output_tokens": 16},
    "/v1/messages": {"messages": TEXT, "max_tokens": 2},
}


@pytest.mark.parametrize("path", BODIES)
async def test_a_request_has_the_models_defaults_for_what_it_leaves_out(
    start_gateway: StartGateway, card: ModelCard, path: str
) -> None:
    engine = FakeEngineClient(msgspec.structs.replace(card, sampling_defaults=DEFAULTS))
    async with start_gateway([engine]) as gateway:
        headers = {"authorization": f"Bearer {gateway.key}"}
        async with httpx.AsyncClient(base_url=gateway.url, headers=headers) as client:
            for given in ({}, {"temperature": 0, "top_p": 1}):
                answer = await client.post(path, json={"model": MODEL} | BODIES[path] | given)
                assert answer.status_code == 200, answer.text
    default, given_one = (submit.sampling for submit in engine.submits)
    assert {name: getattr(default, name) for name in DEFAULTS} == DEFAULTS
    assert {name: getattr(given_one, name) for name in DEFAULTS} == DEFAULTS | {"temperature": 0, "top_p": 1}


async def test_a_response_says_with_what_it_was_sampled(start_gateway: StartGateway, card: ModelCard) -> None:
    engine = FakeEngineClient(msgspec.structs.replace(card, sampling_defaults=DEFAULTS))
    async with start_gateway([engine]) as gateway:
        headers = {"authorization": f"Bearer {gateway.key}"}
        async with httpx.AsyncClient(base_url=gateway.url, headers=headers) as client:
            body = {"model": MODEL, "top_p": 0.5} | BODIES["/v1/responses"]
            answer = (await client.post("/v1/responses", json=body)).json()
    assert (answer["temperature"], answer["top_p"]) == (0.6, 0.5)
