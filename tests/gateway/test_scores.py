"""`/v1/score`, `/v1/rerank` and `/v1/classify`: answers, usage, refusals and ignored fields."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import tokenizers

from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_wire.messages import ModelCard, Submit

from .conftest import RunningGateway, StartGateway

MODEL = "tiny"
RERANK_PATHS = ("/v1/rerank", "/v2/rerank", "/rerank")


def with_segments(card: ModelCard, **changes: Any) -> ModelCard:
    """The card of an encoder, whose tokenizer marks the segments of pairs."""
    tokenizer = tokenizers.Tokenizer.from_str(card.tokenizer_json)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A <|end|>", pair="$A <|end|> $B:1 <|end|>:1", special_tokens=[("<|end|>", 256)]
    )
    return msgspec.structs.replace(card, tokenizer_json=tokenizer.to_str(), generates=False, **changes)


def length_logit(submit: Submit, width: int) -> list[float]:
    """Return one logit, the tokens of the second segment minus 5; for several labels, the token count for the
    second."""
    if width == 1:
        return [len(submit.prompt_ids) - submit.second_segment_at - 5.0]
    return [0.0, float(len(submit.prompt_ids)), *[0.0] * (width - 2)]


@pytest.fixture
async def ranker(start_gateway: StartGateway, card: ModelCard) -> AsyncIterator[RunningGateway]:
    made = with_segments(card, labels=("relevant",), score_activation="sigmoid")
    async with start_gateway([FakeEngineClient(made, vector=length_logit)]) as running:
        yield running


@pytest.fixture
async def embedder(start_gateway: StartGateway, card: ModelCard) -> AsyncIterator[RunningGateway]:
    def vector(submit: Submit, width: int) -> list[float]:
        angle = submit.prompt_ids[0] / 50
        return [math.cos(angle), math.sin(angle), *[0.0] * (width - 2)]

    async with start_gateway([FakeEngineClient(with_segments(card, embedding_width=8), vector=vector)]) as running:
        yield running


async def ask(gateway: RunningGateway, path: str, **body: Any) -> Any:
    status, _, answer = await gateway.post(path, {"model": MODEL, **body})
    found = json.loads(answer)
    assert status == 200, found
    return found


def sigmoid(value: float) -> Any:
    return pytest.approx(1 / (1 + math.exp(-value)), abs=1e-6)


async def test_a_cross_encoder_scores_one_text_with_each_of_several(ranker: RunningGateway) -> None:
    answer = await ask(ranker, "/v1/score", text_1="ab", text_2=["abc", "abcdef"])
    assert answer["data"] == [
        {"object": "score", "index": 0, "score": sigmoid(-1)},
        {"object": "score", "index": 1, "score": sigmoid(2)},
    ]
    assert (answer["object"], answer["model"]) == ("list", MODEL) and answer["id"].startswith("score-")
    assert answer["usage"] == {"prompt_tokens": 17, "total_tokens": 17}
    assert [(s.embed, s.second_segment_at, s.stopping.max_tokens) for s in ranker.engine.submits] == [(True, 3, 0)] * 2
    (row,) = await ranker.rows.wait_for(1)
    assert (row.endpoint, row.outcome, row.num_choices, row.prompt_tokens) == ("/v1/score", "stop", 2, 17)


async def test_lists_of_one_length_are_scored_entry_by_entry(ranker: RunningGateway) -> None:
    answer = await ask(ranker, "/v1/score", text_1=["a", "b"], text_2=["a", "abcde"])
    assert [entry["score"] for entry in answer["data"]] == [sigmoid(-3), sigmoid(1)]
    assert [len(submit.prompt_ids) for submit in ranker.engine.submits] == [4, 8]


@pytest.mark.parametrize("path", RERANK_PATHS)
async def test_documents_come_in_the_order_of_their_relevance(ranker: RunningGateway, path: str) -> None:
    documents = ["abc", {"text": "abcdefgh"}, "xyz", "ab"]
    answer = await ask(ranker, path, query="q", documents=documents)
    assert [(one["index"], one["document"]["text"]) for one in answer["results"]] == [
        (1, "abcdefgh"),
        (0, "abc"),
        (2, "xyz"),
        (3, "ab"),
    ]
    assert answer["results"][0]["relevance_score"] == sigmoid(4)
    assert answer["usage"]["prompt_tokens"] == sum(len(text) + 3 for text in ("abc", "abcdefgh", "xyz", "ab"))
    short = await ask(ranker, path, query="q", documents=documents, top_n=2, return_documents=False)
    assert [sorted(one) for one in short["results"]] == [["index", "relevance_score"]] * 2
    assert len((await ask(ranker, path, query="q", documents=documents, top_n=0))["results"]) == 4


async def test_an_embedding_model_scores_by_the_cosine_and_embeds_each_text_once(embedder: RunningGateway) -> None:
    answer = await ask(embedder, "/v1/rerank", query="a", documents=["z", "a", "c", "z"])
    found = [(one["index"], one["relevance_score"]) for one in answer["results"]]
    far = pytest.approx(math.cos((ord("z") - ord("a")) / 50), abs=1e-6)
    assert found == [
        (1, pytest.approx(1.0, abs=1e-6)),
        (2, pytest.approx(math.cos(2 / 50), abs=1e-6)),
        (0, far),
        (3, far),
    ]
    assert len(embedder.engine.submits) == 3
    assert {submit.second_segment_at for submit in embedder.engine.submits} == {0}
    assert answer["usage"]["prompt_tokens"] == 6
    (row,) = await embedder.rows.wait_for(1)
    assert (row.num_choices, row.prompt_tokens) == (3, 6)


@pytest.mark.parametrize(
    ("activation", "probs"),
    [
        ("softmax", [1 / (2 + math.e**3), math.e**3 / (2 + math.e**3), 1 / (2 + math.e**3)]),
        ("sigmoid", [0.5, 1 / (1 + math.e**-3), 0.5]),
        ("identity", [0.0, 3.0, 0.0]),
    ],
)
async def test_inputs_are_classified_with_the_models_labels(
    start_gateway: StartGateway, card: ModelCard, activation: str, probs: list[float]
) -> None:
    made = with_segments(card, labels=("bad", "good", "neither"), score_activation=activation)
    async with start_gateway([FakeEngineClient(made, vector=length_logit)]) as gateway:
        answer = await ask(gateway, "/v1/classify", input=["ab", "cd"])
        for index, entry in enumerate(answer["data"]):
            assert entry == {"index": index, "label": "good", "probs": pytest.approx(probs), "num_classes": 3}
        assert answer["usage"]["prompt_tokens"] == 6
        status, _, body = await gateway.post("/v1/score", {"model": MODEL, "text_1": "a", "text_2": "b"})
        assert (status, json.loads(body)["error"]["code"]) == (400, "score_not_supported")


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "send one 'text_1', or as many of both"),
    ("/v1/score", {"text_1": "", "text_2": "a"}, "'text_1' must be a non-empty string"),
    ("/v1/score", {"text_1": "a", "text_2": []}, "'text_2' must be a non-empty string"),
    ("/v1/score", {"text_1": "a"}, "'text_2' is missing"),
    ("/v1/score", {"text_1": "a", "text_2": "x" * 600}, "prompt is too long: 603 tokens > 512 maximum"),
    ("/v1/rerank", {"query": "a", "documents": []}, "'documents'"),
    ("/v1/rerank", {"query": "a", "documents": ["b", ""]}, "'documents"),
    ("/v1/rerank", {"query": "a", "documents": [{"title": "b"}]}, "'documents"),
    ("/v1/rerank", {"query": "a", "documents": ["b"] * 2049}, "'documents'"),
    ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "'top_n'"),
    ("/v1/classify", {"input": []}, "'input' is empty"),
    ("/v1/embeddings", {"input": "a"}, "does not support embeddings"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "is an encoder and generates no text"),
    ("/v1/completions", {"prompt": "a"}, "is an encoder and generates no text"),
]


@pytest.mark.parametrize(("path", "body", "message"), BAD)
async def test_bad_requests_are_refused_with_what_to_do(
    ranker: RunningGateway, path: str, body: dict[str, Any], message: str
) -> None:
    status, _, answer = await ranker.post(path, {"model": MODEL, **body})
    error = json.loads(answer)["error"]
    assert status == 400 and message in error["message"], error
    assert not ranker.engine.submits
    (row,) = await ranker.rows.wait_for(1)
    assert (row.outcome, row.prompt_tokens) == ("rejected", 0)


async def test_a_model_without_a_head_classifies_nothing(embedder: RunningGateway) -> None:
    status, _, answer = await embedder.post("/v1/classify", {"model": MODEL, "input": "a"})
    assert (status, json.loads(answer)["error"]["code"]) == (400, "classification_not_supported")


async def test_ignored_fields_are_named(ranker: RunningGateway) -> None:
    body = {"model": MODEL, "query": "a", "documents": ["b"], "user": "u", "priority": 3}
    _, headers, _ = await ranker.post("/v1/rerank", body)
    assert headers["x-moiety-ignored-fields"] == "priority, user"


@pytest.mark.parametrize(("limit", "sizes"), [(8, (3, 5)), (9, (3, 6)), (-1, (3, 509)), (4000, (3, 509))])
async def test_the_longer_text_of_a_pair_is_cut_to_the_asked_tokens(
    ranker: RunningGateway, limit: int, sizes: tuple[int, int]
) -> None:
    await ask(ranker, "/v1/score", text_1="ab", text_2="x" * 600, truncate_prompt_tokens=limit)
    (submit,) = ranker.engine.submits
    first, second = submit.prompt_ids[: submit.second_segment_at], submit.prompt_ids[submit.second_segment_at :]
    assert (len(first), len(second)) == sizes
    assert first[-1] == second[-1] == 256  # the special tokens stay


async def test_texts_and_token_ids_are_cut_at_their_end(embedder: RunningGateway) -> None:
    for given in ("abcdef", [97, 98, 99, 100]):
        await ask(embedder, "/v1/embeddings", input=given, truncate_prompt_tokens=3)
    await ask(embedder, "/v1/embeddings", input="a", truncate_prompt_tokens=3)
    found = [submit.prompt_ids for submit in embedder.engine.submits]
    assert [len(ids) for ids in found] == [3, 3, 2]
    assert found[0][:2] == (await encoded(embedder, "ab"))[:2] and found[0][2] == 256
    assert found[1] == [97, 98, 99]


async def encoded(gateway: RunningGateway, text: str) -> list[int]:
    _, _, answer = await gateway.post("/tokenize", {"model": MODEL, "prompt": text})
    found: list[int] = json.loads(answer)["tokens"]
    return found


async def test_a_limit_without_room_for_text_is_refused(ranker: RunningGateway) -> None:
    body = {"model": MODEL, "text_1": "a", "text_2": "b", "truncate_prompt_tokens": 3}
    status, _, answer = await ranker.post("/v1/score", body)
    error = json.loads(answer)["error"]
    assert (status, error["param"]) == (400, "truncate_prompt_tokens") and "at least 4" in error["message"]


async def test_scores_of_vectors_of_any_length_are_cosines(start_gateway: StartGateway, card: ModelCard) -> None:
    def vector(submit: Submit, width: int) -> list[float]:
        size, angle = len(submit.prompt_ids), submit.prompt_ids[0] / 50
        return [size * math.cos(angle), size * math.sin(angle), *[0.0] * (width - 2)]

    made = with_segments(card, embedding_width=8, unit_vectors=False)
    async with start_gateway([FakeEngineClient(made, vector=vector)]) as gateway:
        answer = await ask(gateway, "/v1/score", text_1=["abc", "k"], text_2=["kk", "kabc"])
        scores = [entry["score"] for entry in answer["data"]]
        first, other = (gateway.engine.submits[number].prompt_ids[0] / 50 for number in (0, 1))
        angle = other - first
        assert scores == [pytest.approx(math.cos(angle), abs=1e-6), pytest.approx(1.0, abs=1e-6)]
        answer = await ask(gateway, "/v1/embeddings", input="abc", dimensions=1)
        (number,) = answer["data"][0]["embedding"]
        assert number == pytest.approx(4 * math.cos(first), abs=1e-5)  # cut, and not of length 1
