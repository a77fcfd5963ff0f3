"""Fields of vLLM that restrict an answer's tokens, cut prompts and score them."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
import tokenizers

from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_text.tokenizer import Tokenizer
from moiety_wire.grammars import GrammarKind
from moiety_wire.messages import ModelCard, TokenRules

from .conftest import MODEL, RunningGateway, StartGateway

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": MODEL, "messages": HELLO, "max_tokens": 2},
    COMPLETIONS: {"model": MODEL, "prompt": "hello", "max_tokens": 2},
}


async def answer_of(gateway: RunningGateway, path: str, **fields: Any) -> Any:
    status, _, answer = await gateway.post(path, {**BODIES[path], **fields})
    assert status == 200, answer
    return json.loads(answer)


@pytest.mark.parametrize("path", BODIES)
async def test_rules_of_tokens_reach_the_engine(gateway: RunningGateway, path: str) -> None:
    encode = Tokenizer.from_json(gateway.engine.card.tokenizer_json).encode
    await answer_of(
        gateway, path, allowed_token_ids=[7, 3, 7], bad_words=["bad", " no"], include_stop_str_in_output=True
    )
    await answer_of(gateway, path)
    ruled, free = gateway.engine.submits
    runs = tuple(tuple(encode(word)) for word in ("bad", "no"))  # with a space they end with the same tokens
    assert ruled.sampling.token_rules == TokenRules((7, 3), runs, ("bad", " no"))
    assert (ruled.stopping.includes_stop, free.stopping.includes_stop, free.sampling.token_rules) == (True, False, None)


async def test_a_bad_word_is_banned_in_its_spelling_after_a_space_too(
    start_gateway: StartGateway, card: ModelCard
) -> None:
    backend = tokenizers.Tokenizer.from_str(card.tokenizer_json)
    vocab = {**backend.get_vocab(with_added_tokens=False), "Ġn": 300, "Ġno": 301}
    backend.model = tokenizers.models.BPE(vocab=vocab, merges=[("Ġ", "n"), ("Ġn", "o")])
    merging = msgspec.structs.replace(card, tokenizer_json=backend.to_str(), vocab_size=302)
    async with start_gateway([FakeEngineClient(merging)]) as gateway:
        await answer_of(gateway, COMPLETIONS, bad_words=["no"])
    rules = gateway.engine.submits[0].sampling.token_rules
    assert rules is not None
    assert rules.banned_runs == ((vocab["n"], vocab["o"]), (301,))


@pytest.mark.parametrize("path", BODIES)
async def test_prompt_logprobs_have_vllms_format(gateway: RunningGateway, path: str) -> None:
    answer = await answer_of(gateway, path, prompt_logprobs=1, n=2)
    first, second = gateway.engine.submits
    assert (first.sampling.num_prompt_logprobs, second.sampling.num_prompt_logprobs) == (1, None)
    places = [answer] if path == CHAT else answer["choices"]
    assert len(places) == (1 if path == CHAT else 2)
    for place in places:
        told = place["prompt_logprobs"]
        assert told[0] is None and len(told) == len(first.prompt_ids)
        for token_id, entry in zip(first.prompt_ids[1:], told[1:], strict=True):
            assert entry == {str(token_id): {"logprob": -0.5, "rank": 1, "decoded_token": str(token_id)}}
    assert "prompt_logprobs" not in json.dumps(await answer_of(gateway, path))


async def test_an_echo_and_vllms_field_have_as_many_alternatives_as_each_asks_for(gateway: RunningGateway) -> None:
    answer = await answer_of(gateway, COMPLETIONS, prompt_logprobs=0, echo=True, logprobs=1)
    assert gateway.engine.submits[0].sampling.num_prompt_logprobs == 1
    (choice,) = answer["choices"]
    assert [len(entry) for entry in choice["prompt_logprobs"][1:]] == [1] * 4
    assert choice["logprobs"]["token_logprobs"][:5] == [None, *[-0.5] * 4]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"truncate_prompt_tokens": 3}, [5, 6, 7]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, [1, 2, 3]),
        ({"truncate_prompt_tokens": 9}, [1, 2, 3, 4, 5, 6, 7]),
        ({"truncate_prompt_tokens": -1}, [1, 2, 3, 4, 5, 6, 7]),
        ({"truncate_prompt_tokens": -1, "max_tokens": 508}, [4, 5, 6, 7]),
    ],
)
async def test_a_prompt_is_cut_to_the_last_or_first_tokens(
    gateway: RunningGateway, fields: dict[str, Any], expected: list[int]
) -> None:
    answer = await answer_of(gateway, COMPLETIONS, prompt=[1, 2, 3, 4, 5, 6, 7], **fields)
    assert gateway.engine.submits[0].prompt_ids == expected
    assert answer["usage"]["prompt_tokens"] == len(expected)


async def test_a_chat_is_cut_after_its_template_also_where_it_exceeds_the_context(gateway: RunningGateway) -> None:
    await answer_of(gateway, CHAT)
    await answer_of(gateway, CHAT, truncate_prompt_tokens=5)
    long = [{"role": "user", "content": "x" * 600 + "hello"}]
    await answer_of(gateway, CHAT, messages=long, truncate_prompt_tokens=-1)
    whole, cut, fitting = [submit.prompt_ids for submit in gateway.engine.submits]
    assert cut == whole[-5:]
    assert len(fitting) == 510 and fitting[-19:] == whole[-19:]


async def test_a_prompt_of_text_can_go_without_special_tokens(start_gateway: StartGateway, card: ModelCard) -> None:
    backend = tokenizers.Tokenizer.from_str(card.tokenizer_json)
    end_id = backend.token_to_id("<|end|>")
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|end|> $A", special_tokens=[("<|end|>", end_id)]
    )
    begins = msgspec.structs.replace(card, tokenizer_json=backend.to_str())
    async with start_gateway([FakeEngineClient(begins)]) as gateway:
        for fields in ({}, {"add_special_tokens": False}, {"truncate_prompt_tokens": 3}):
            await answer_of(gateway, COMPLETIONS, **fields)
        await answer_of(gateway, COMPLETIONS, add_special_tokens=False, truncate_prompt_tokens=3)
    with_end, bare, cut, bare_cut = [submit.prompt_ids for submit in gateway.engine.submits]
    assert with_end == [end_id, *bare]
    assert (cut, bare_cut) == ([end_id, *bare[-2:]], bare[-3:]), "the special token stays"


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
async def test_a_schema_without_a_name_holds_the_answer(gateway: RunningGateway, kind: str) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    for path in BODIES:
        await answer_of(gateway, path, response_format={"type": kind, "schema": schema})
    if kind == "json_object":
        body = {"model": MODEL, "input": "hello", "text": {"format": {"type": kind, "schema": schema}}}
        status, _, answer = await gateway.post("/v1/responses", body)
        assert status == 200, answer
    assert gateway.engine.submits
    for submit in gateway.engine.submits:
        assert submit.grammar is not None and submit.grammar.kind is GrammarKind.JSON_SCHEMA
        assert json.loads(submit.grammar.text) == schema


async def test_a_schema_is_needed_where_the_kind_says_so(gateway: RunningGateway) -> None:
    status, _, answer = await gateway.post(CHAT, BODIES[CHAT] | {"response_format": {"type": "json_schema"}})
    assert status == 400 and "'json_schema' is missing" in json.loads(answer)["error"]["message"]
