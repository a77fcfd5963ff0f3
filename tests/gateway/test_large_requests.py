"""Large bodies are decoded and checked off the event loop, and only up to their first error."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from moiety_platform.inference import encoding_cost
from moiety_platform.inference import request_body as body_module
from moiety_platform.inference.model_texts import ModelText
from moiety_platform.inference.request_body import INLINE_BYTES
from moiety_platform.models_api import DetokenizeBody, TokenizeBody
from moiety_platform.openai_api.schemas import ChatBody, CompletionBody
from moiety_text.conversation import texts_of
from moiety_text.tokenizer import Tokenizer
from moiety_wire.messages import ModelCard

from .conftest import NewCard, RunningGateway

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
ONES = b",".join([b"1"] * 1_000_000)
LARGE = [
    (COMPLETIONS, b'{"model":"tiny","prompt":[' + ONES + b',"a"]}'),
    (CHAT, b'{"model":"tiny","messages":[' + ONES + b"]}"),
    (CHAT, b'{"model":"tiny","messages":[' + b",".join([b'{"role":"user","content":""}'] * 144_000) + b"]}"),
    ("/tokenize", b'{"messages":[' + ONES + b"]}"),
    ("/detokenize", b'{"tokens":[' + b",".join([b'"a"'] * 500_000) + b"]}"),
]


@pytest.fixture
def decoding_threads(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """The threads in which bodies were decoded, in order."""
    seen = []
    decode = body_module.decode_body

    def noted(*arguments: Any) -> Any:
        seen.append(threading.current_thread())
        return decode(*arguments)

    monkeypatch.setattr(body_module, "decode_body", noted)
    return seen


async def test_large_bad_bodies_are_refused_off_the_event_loop_while_others_are_answered(
    gateway: RunningGateway, decoding_threads: list[threading.Thread]
) -> None:
    num_healthy = 0
    for path, data in LARGE:
        assert len(data) > INLINE_BYTES
        posting = asyncio.create_task(gateway.post(path, data))
        while not posting.done():
            num_healthy += (await gateway.request("GET", "/healthz"))[0] == 200
        status, _, answer = await posting
        assert status == 400, answer[:300]
        assert len(answer) < 1000
    assert num_healthy >= len(LARGE)
    assert len(decoding_threads) == len(LARGE)
    assert threading.main_thread() not in decoding_threads


async def test_a_small_body_is_decoded_where_it_was_read(
    gateway: RunningGateway, decoding_threads: list[threading.Thread]
) -> None:
    await gateway.post(COMPLETIONS, {"model": "tiny", "prompt": "hi", "max_tokens": 1})
    assert decoding_threads == [threading.main_thread()]


@pytest.mark.parametrize(
    ("schema", "field", "entries", "most_errors"),
    [
        (CompletionBody, "prompt", [None] * 1000, 4),  # one for each form of a prompt
        (CompletionBody, "prompt", [["a"] * 10] * 100, 4),
        (ChatBody, "messages", [1] * 1000, 1),
        (ChatBody, "messages", [{}] * 1000, 3),  # the fields of the first one
        (ChatBody, "messages", [{"role": "user", "content": [1] * 1000}], 2),
        (ChatBody, "stop", [1] * 16, 2),
        (ChatBody, "stop_token_ids", ["a"] * 100, 1),
        (TokenizeBody, "messages", [1] * 1000, 1),
        (DetokenizeBody, "tokens", ["a"] * 1000, 1),
    ],
)
def test_validation_ends_at_the_first_bad_entry_of_a_list(
    schema: Any, field: str, entries: Any, most_errors: int
) -> None:
    good = {"model": "m", "prompt": "x", "messages": [{"role": "user", "content": ""}]}
    if schema is TokenizeBody:
        del good["prompt"]
    with pytest.raises(ValidationError) as caught:
        schema.model_validate_json(json.dumps({**good, field: entries}))
    assert caught.value.error_count() <= most_errors


async def test_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = len("<|end|>")
    limit = gateway.engine.card.max_context_tokens * longest
    for path, field in (
        (COMPLETIONS, "prompt"),
        ("/tokenize", "prompt"),
        (CHAT, "messages"),
        ("/tokenize", "messages"),
    ):
        text = "x" * (limit + longest)
        fields = {field: text if field == "prompt" else [{"role": "user", "content": text}]}
        status, _, answer = await gateway.post(path, {"model": "tiny", "max_tokens": 1, **fields})
        error = json.loads(answer)["error"]
        assert (status, error["code"]) == (400, "context_length_exceeded")
        assert "is too long: at least 51" in error["message"] and "context length is 512 tokens" in error["message"]


async def test_a_moderately_long_prompt_is_refused_with_its_exact_length(gateway: RunningGateway) -> None:
    status, _, answer = await gateway.post(COMPLETIONS, {"model": "tiny", "prompt": "x" * 600, "max_tokens": 7})
    error = json.loads(answer)["error"]
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert "has 600 tokens and 7 are asked for" in error["message"]
    status, _, answer = await gateway.post("/tokenize", {"prompt": "x" * 600})
    assert json.loads(answer)["count"] == 600


def note_threads(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """Return a list to which each text that is tokenized adds the thread that does it."""
    threads: list[threading.Thread] = []
    encode = Tokenizer.check_fits

    def noted(self: Any, text: str, max_tokens: int) -> Any:
        threads.append(threading.current_thread())
        return encode(self, text, max_tokens)

    monkeypatch.setattr(Tokenizer, "check_fits", noted)
    return threads


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": ""}] * 2000},
        {"messages": [{"role": "user", "content": "a", "name": "n" * 10_000}]},
        {"messages": [{"role": "user", "content": "a", "tool_call_id": "n" * 10_000}]},
        {"messages": [{"role": "user", "content": "a<|end|>b"}]},  # may build a second tokenizer
    ],
)
async def test_conversations_that_take_time_are_rendered_in_a_thread(
    new_card: NewCard, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any]
) -> None:
    threads = note_threads(monkeypatch)
    text = ModelText(new_card(max_context_tokens=100_000), inline_bytes=8192)
    for small in ([TokenizeBody(prompt="a").as_prompt()], ["x" * 8192]):
        await text.encode(small)
    assert set(threads) == {threading.main_thread()}
    threads.clear()
    await text.encode([TokenizeBody.model_validate_json(json.dumps(body)).as_prompt()])
    assert threads and threading.main_thread() not in threads


async def test_many_prompts_that_are_short_one_by_one_are_tokenized_in_a_thread(
    card: ModelCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = note_threads(monkeypatch)
    encoded = await ModelText(card, inline_bytes=8192).encode(["ab" * 200] * 100)
    assert [len(token_ids) for token_ids in encoded] == [400] * 100
    assert len(threads) == 100 and threading.main_thread() not in threads


async def test_a_prompt_of_many_texts_is_checked_in_the_event_loop_up_to_a_bound(
    card: ModelCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at = []

    def counted(value: Any) -> Iterator[str]:
        for text in texts_of(value):
            looked_at.append(threading.current_thread())
            yield text

    monkeypatch.setattr(encoding_cost, "texts_of", counted)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"enum": ["a"] * 15_000}}}
    body = {"messages": [{"role": "user", "content": "hello"}], "tools": [tool]}
    prompt = TokenizeBody.model_validate_json(json.dumps(body)).as_prompt()
    assert not encoding_cost.is_short([prompt], 8192, None)
    assert len(looked_at) <= 8192 + 1
