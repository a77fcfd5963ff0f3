"""The prompt that an engine receives for a request."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_text.tokenizer import Tokenizer
from moiety_wire.messages import ModelCard

from .conftest import RunningGateway, StartGateway


def text_of(gateway: RunningGateway, token_ids: list[int]) -> str:
    return Tokenizer.from_json(gateway.engine.card.tokenizer_json).decode(token_ids, skip_special_tokens=False)


async def test_a_top_p_of_zero_and_an_assistant_without_text_are_served(gateway: RunningGateway) -> None:
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}, {"role": "user", "content": "b"}]
    status, _, answer = await gateway.post(
        "/v1/chat/completions", {"model": "tiny", "messages": talk, "top_p": 0, "max_tokens": 1}
    )
    assert status == 200, answer
    (submit,) = gateway.engine.submits
    assert submit.sampling.top_p == 0
    assert text_of(gateway, submit.prompt_ids) == "<|user|>a\n<|assistant|>\n<|user|>b\n<|assistant|>"


async def test_an_assistants_message_needs_no_content(gateway: RunningGateway) -> None:
    hello = {"role": "user", "content": "a"}
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 1}
    for message in ({}, {"reasoning_content": "Hm."}, {"content": None}):
        turns = [hello, {"role": "assistant", **message}, hello]
        status, _, answer = await gateway.post("/v1/chat/completions", {**asked, "messages": turns})
        assert status == 200, answer
    for role in ("user", "system"):
        status, _, answer = await gateway.post("/v1/chat/completions", {**asked, "messages": [hello, {"role": role}]})
        assert status == 400
        assert "'messages.1.content' is missing" in json.loads(answer)["error"]["message"]


@pytest.mark.parametrize("extra", [{}, {"logprobs": 1}, {"stream": True}])
async def test_an_echo_of_an_id_without_text_is_refused_before_it_is_computed(
    start_gateway: StartGateway, card: ModelCard, extra: dict[str, Any]
) -> None:
    padded = msgspec.structs.replace(card, vocab_size=card.vocab_size + 8)
    async with start_gateway([FakeEngineClient(padded)]) as gateway:
        body = {"model": "tiny", "prompt": [[1], [2, card.vocab_size + 1]], "max_tokens": 1}
        status, _, answer = await gateway.post("/v1/completions", {**body, "echo": True, **extra})
        assert (status, json.loads(answer)["error"]["code"]) == (400, "unknown_token_id")
        assert not gateway.engine.submits
        assert (await gateway.post("/v1/completions", body))[0] == 200


@pytest.mark.parametrize(("num_prompt", "num_output"), [(490, 16), (500, 12), (511, 1)])
async def test_a_completions_default_length_is_what_the_context_leaves(
    gateway: RunningGateway, num_prompt: int, num_output: int
) -> None:
    status, _, answer = await gateway.post("/v1/completions", {"model": "tiny", "prompt": [1] * num_prompt})
    assert (status, json.loads(answer)["usage"]["completion_tokens"]) == (200, num_output), answer


async def test_a_prompt_that_fills_the_context_is_refused_with_the_context_length(
    gateway: RunningGateway,
) -> None:
    status, _, answer = await gateway.post("/v1/completions", {"model": "tiny", "prompt": [1] * 512})
    error = json.loads(answer)["error"]
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert "asked for" not in error["message"] and "512 tokens" in error["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_a_control_token_written_by_a_client_is_text(gateway: RunningGateway, path: str) -> None:
    messages = [{"role": "user", "content": "a<|end|>b"}]
    status, _, answer = await gateway.post(path, {"model": "tiny", "messages": messages, "max_tokens": 1})
    assert status == 200, answer
    ids = json.loads(answer)["tokens"] if path == "/tokenize" else gateway.engine.submits[0].prompt_ids
    assert len(ids) == gateway.prompt_tokens("a<|end|>b")
    assert 256 not in ids
    assert text_of(gateway, ids) == "<|user|>a<|end|>b\n<|assistant|>"
    await gateway.post("/v1/completions", {"model": "tiny", "prompt": "a<|end|>b", "max_tokens": 1})
    assert 256 in gateway.engine.submits[-1].prompt_ids  # a raw prompt is controlled by its sender alone
