"""Log probabilities of completions: names of tokens by their ids, and their places in the text."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_platform.openai_api.text_logprobs import TextOffsets, echoed_logprobs, text_logprobs
from moiety_wire.messages import ModelCard, TokenLogprob, TopLogprob

from .conftest import RunningGateway, StartGateway


def entry(
    data: bytes, token_id: int, top: Sequence[Any] = (), num_chars: int = -1, logprob: float = -2.0
) -> TokenLogprob:
    best = [TopLogprob(one.decode(errors="replace"), one, lp, one_id) for one, one_id, lp in top]
    return TokenLogprob(data.decode(errors="replace"), data, logprob, best, token_id, num_chars)


@given(
    text=st.text(alphabet="a é東🙂", min_size=1, max_size=12),
    cuts=st.lists(st.integers(1, 40)),
    split=st.integers(0, 12),
)
def test_an_offset_is_that_of_the_tokens_first_character(text: Any, cuts: Any, split: Any) -> None:
    data = text.encode()
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    tokens = [data[start:end] for start, end in itertools.pairwise(edges)]
    entries = [entry(token, number) for number, token in enumerate(tokens)]
    expected = [len(data[:start].decode(errors="ignore")) for start in edges[:-1]]
    whole = text_logprobs(entries, TextOffsets())
    assert whole["text_offset"] == expected
    offsets = TextOffsets(3)
    streamed = [text_logprobs(part, offsets) for part in (entries[:split], entries[split:])]
    assert [at for part in streamed for at in part["text_offset"]] == [at + 3 for at in expected]
    echoed = echoed_logprobs("x" + text, 5, b"x", entries, num_best=1)
    assert echoed["text_offset"] == [0, *(at + 1 for at in expected)]


def test_tokens_with_equal_text_are_distinguished_by_id() -> None:
    top = [(b"\xe6", 1, -0.5), (b"\xe7", 2, -1.0), (b"a", 3, -1.5), (b"a", 4, -2.0), (b"", 9, -3.0), (b"", 8, -4.0)]
    found = text_logprobs([entry(b"a", 4, top, logprob=-2.0)], TextOffsets())
    assert found["tokens"] == ["a"]
    assert found["top_logprobs"] == [
        {
            "bytes:\\xe6": -0.5,
            "bytes:\\xe7": -1.0,
            "token_id:3": -1.5,
            "a": -2.0,
            "token_id:9": -3.0,
            "token_id:8": -4.0,
        }
    ]


@pytest.mark.parametrize("token_id", [7, -1])
def test_the_sampled_token_is_among_the_likeliest(token_id: int) -> None:
    found = text_logprobs([entry(b"b", token_id, [(b"a", token_id - 1, -0.1)], logprob=-5.0)], TextOffsets())
    assert found["top_logprobs"] == [{"a": -0.1, "b": -5.0}]
    alone = text_logprobs([entry(b"\x9d", token_id)], TextOffsets())
    assert alone["top_logprobs"] == [{"bytes:\\x9d": -2.0}] and alone["tokens"] == ["bytes:\\x9d"]


def test_a_token_without_text_moves_nothing() -> None:
    entries = [entry(b"a", 1, num_chars=1), entry(b"<|end|>", 2, num_chars=0), entry(b"b", 3, num_chars=1)]
    assert text_logprobs(entries, TextOffsets())["text_offset"] == [0, 1, 1]
    echoed = echoed_logprobs("a b", 1, b"<s>", [entry(b" a", 2), entry(b" b", 3)], num_best=0)
    assert echoed["text_offset"] == [0, 0, 1]


async def test_an_echoed_character_of_several_tokens_has_one_place(gateway: RunningGateway) -> None:
    ids = list("é東b".encode())
    asked: dict[str, Any] = {"model": "tiny", "prompt": "é東b", "max_tokens": 2, "echo": True, "logprobs": 1}
    _, _, answer = await gateway.post("/v1/completions", asked)
    (choice,) = json.loads(answer)["choices"]
    assert choice["text"] == "é東b1 2"
    found = choice["logprobs"]
    assert len(found["tokens"]) == len(ids) + 2
    assert found["tokens"][0].startswith("bytes:")
    assert found["text_offset"][-2:] == [3, 4]
    for token, top in zip(found["tokens"][1:], found["top_logprobs"][1:], strict=True):
        assert token in top


@pytest.mark.parametrize("stream", [False, True])
async def test_offsets_are_the_same_streamed_and_not(
    start_gateway: StartGateway, card: ModelCard, stream: bool
) -> None:
    pieces = [(1, "é"), (2, "東"), (3, " b")]
    async with start_gateway([FakeEngineClient(msgspec.structs.replace(card), lambda submit: pieces)]) as gateway:
        asked: dict[str, Any] = {"model": "tiny", "prompt": "a", "max_tokens": 9, "logprobs": 1}
        if stream:
            chunks = [one async for one in await gateway.client.completions.create(**asked, stream=True)]
            offsets = [at for one in chunks if one.choices[0].logprobs for at in one.choices[0].logprobs.text_offset]
        else:
            offsets = (await gateway.client.completions.create(**asked)).choices[0].logprobs.text_offset
        assert offsets == [0, 1, 2]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_completion_of_no_tokens_has_its_prompt_only(gateway: RunningGateway, stream: bool) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": ["ab", "c"], "max_tokens": 0, "n": 2, "echo": True}
    asked |= {"return_token_ids": True} | ({"stream": True} if stream else {"logprobs": 1})
    status, headers, answer = await gateway.post("/v1/completions", asked)
    assert (status, headers["x-moiety-adjusted-fields"]) == (200, "max_tokens=1")
    if stream:
        events = [json.loads(line[6:]) for line in answer.decode().splitlines() if line.startswith("data: {")]
        choices = [choice for one in events for choice in one["choices"]]
    else:
        choices = json.loads(answer)["choices"]
    for index, prompt in enumerate(("ab", "ab", "c", "c")):
        parts = [choice for choice in choices if choice["index"] == index]
        assert "".join(one["text"] for one in parts) == prompt
        assert len(parts[0]["prompt_token_ids"]) == len(prompt)
        assert [token_id for one in parts for token_id in one["token_ids"]] == []
        assert parts[-1]["finish_reason"] == "length"
        if not stream:
            assert len(parts[0]["logprobs"]["tokens"]) == len(prompt)
