"""What reaches an engine as the prompt of a request."""

from __future__ import annotations

import json

import pytest

from moiety_text.tokenizer import Tokenizer


def text_of(gateway, token_ids) -> str:
    return Tokenizer.from_json(gateway.engine.card.tokenizer_json).decode(token_ids, skip_special_tokens=False)


async def test_a_top_p_of_zero_and_an_assistant_without_text_are_served(gateway):
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}, {"role": "user", "content": "b"}]
    status, _, answer = await gateway.post(
        "/v1/chat/completions", {"model": "tiny", "messages": talk, "top_p": 0, "max_tokens": 1}
    )
    assert status == 200, answer
    (submit,) = gateway.engine.submits
    assert submit.sampling.top_p == 0
    assert text_of(gateway, submit.prompt_ids) == "<|user|>a\n<|assistant|>\n<|user|>b\n<|assistant|>"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_a_control_token_written_by_a_client_is_text(gateway, path):
    messages = [{"role": "user", "content": "a<|end|>b"}]
    status, _, answer = await gateway.post(path, {"model": "tiny", "messages": messages, "max_tokens": 1})
    assert status == 200, answer
    ids = json.loads(answer)["tokens"] if path == "/tokenize" else gateway.engine.submits[0].prompt_ids
    assert len(ids) == gateway.prompt_tokens("a<|end|>b")
    assert 256 not in ids
    assert text_of(gateway, ids) == "<|user|>a<|end|>b\n<|assistant|>"
    await gateway.post("/v1/completions", {"model": "tiny", "prompt": "a<|end|>b", "max_tokens": 1})
    assert 256 in gateway.engine.submits[-1].prompt_ids  # a raw prompt is whole in its sender's hands
