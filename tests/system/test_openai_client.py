"""The real `openai` client against the real model: each promised feature once, end to end."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import openai
import pytest

CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
LONG = {"ignore_eos": True}


@pytest.fixture
def client(account: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(api_key=account.secret, base_url=f"{account.server.url}/v1", max_retries=0) as made:
        yield made


def test_a_chat_answers_alike_streamed_and_not_with_usage_at_the_end_of_the_stream(client: Any, server: Any) -> None:
    asked = {"model": server.model, "messages": CAPITAL, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.content.strip() == "Paris"
    assert (whole.choices[0].finish_reason, whole.model) == ("stop", server.model)
    *chunks, last = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert all(chunk.usage is None for chunk in chunks) and last.choices == []
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens


def test_a_completion_answers_alike_streamed_and_not_and_from_text_and_token_ids(client: Any, server: Any) -> None:
    asked = {"model": server.model, "max_tokens": 12, "temperature": 0, "extra_body": LONG}
    whole = client.completions.create(prompt="one two", **asked)
    assert (whole.choices[0].finish_reason, whole.usage.completion_tokens) == ("length", 12)
    *chunks, last = client.completions.create(
        prompt="one two", **asked, stream=True, stream_options={"include_usage": True}
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert last.usage.completion_tokens == 12
    both = client.completions.create(prompt=["one two", "three"], **asked)
    assert [choice.index for choice in both.choices] == [0, 1]
    assert both.usage.completion_tokens == 24


def test_n_gives_that_many_choices_streamed_and_not(client: Any, server: Any) -> None:
    asked = {"model": server.model, "messages": CAPITAL, "n": 3, "max_tokens": 6, "temperature": 1, "extra_body": LONG}
    answer = client.chat.completions.create(**asked)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage.completion_tokens == 18
    ends = {}
    for chunk in client.chat.completions.create(**asked, stream=True):
        if chunk.choices[0].finish_reason:
            ends[chunk.choices[0].index] = chunk.choices[0].finish_reason
    assert ends == {0: "length", 1: "length", 2: "length"}


def test_a_seed_makes_a_hot_answer_reproducible(client: Any, server: Any) -> None:
    def text(seed: int) -> str:
        answer = client.completions.create(
            model=server.model, prompt="tell", seed=seed, temperature=1.5, max_tokens=24, extra_body=LONG
        )
        return answer.choices[0].text

    first = text(7)
    assert text(7) == first
    assert any(text(seed) != first for seed in (8, 9))


def test_an_answer_ends_before_a_stop_string_streamed_and_not(client: Any, server: Any) -> None:
    asked = {"model": server.model, "prompt": "The story", "seed": 3, "temperature": 1.2, "max_tokens": 40}
    free = client.completions.create(**asked, extra_body=LONG).choices[0].text
    stop = free[len(free) // 2 :][:3]
    assert len(stop) == 3
    answer = client.completions.create(**asked, stop=["\x00\x01never", stop], extra_body=LONG)
    assert answer.choices[0].text == free[: free.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    chunks = list(client.completions.create(**asked, stop=stop, stream=True, extra_body=LONG))
    assert "".join(chunk.choices[0].text for chunk in chunks) == free[: free.index(stop)]


def test_logprobs_belong_to_the_tokens_of_the_answer(client: Any, server: Any) -> None:
    answer = client.chat.completions.create(
        model=server.model, messages=CAPITAL, temperature=0, logprobs=True, top_logprobs=3
    )
    entries = answer.choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode().startswith(answer.choices[0].message.content)
    for entry in entries:
        best = [alternative.logprob for alternative in entry.top_logprobs]
        assert best == sorted(best, reverse=True) and len(best) == 3
        assert entry.logprob <= 0
        assert entry.logprob == pytest.approx(best[0], abs=1e-3)
    choice = client.completions.create(
        model=server.model, prompt="one", temperature=0, max_tokens=8, logprobs=2, extra_body=LONG
    ).choices[0]
    assert len(choice.logprobs.token_logprobs) == 8
    # A special token, such as the end that `ignore_eos` lets through, is among the tokens and not in the text.
    assert "".join(token for token in choice.logprobs.tokens if not token.startswith("<|")) == choice.text


def test_errors_have_the_clients_types_and_say_what_is_wrong(client: Any, server: Any) -> None:
    asked = {"model": server.model, "messages": CAPITAL}
    with pytest.raises(openai.AuthenticationError) as bad_key:
        client.with_options(api_key="mty_nobody.nothing").chat.completions.create(**asked)
    with pytest.raises(openai.NotFoundError, match=server.model) as unknown_model:
        client.chat.completions.create(**asked | {"model": "gpt-unknown"})
    with pytest.raises(openai.BadRequestError, match="top_p") as bad_parameter:
        client.chat.completions.create(**asked, top_p=7)
    assert bad_parameter.value.param == "top_p"
    for caught, status in ((bad_key, 401), (unknown_model, 404), (bad_parameter, 400)):
        assert caught.value.status_code == status
        assert caught.value.code and caught.value.type
    limit = client.models.retrieve(server.model).max_model_len
    with pytest.raises(
        openai.BadRequestError, match=rf"context length is {limit} tokens.*has {limit + 1} tokens"
    ) as too_long:
        client.completions.create(model=server.model, prompt=[100] * (limit + 1), max_tokens=1)
    assert too_long.value.code == "context_length_exceeded"


def test_every_answer_has_one_usage_row_that_agrees_with_it(client: Any, account: Any) -> None:
    model = account.server.model
    answers = [
        client.chat.completions.create(model=model, messages=CAPITAL, n=2, max_tokens=4),
        client.completions.create(model=model, prompt=["one", "two"], max_tokens=5),
        client.completions.create(model=model, prompt="one", max_tokens=1),
    ]
    stream = client.chat.completions.create(model=model, messages=CAPITAL, stream=True)
    chunk_ids = {chunk.id for chunk in stream}
    assert len(chunk_ids) == 1
    rows = {row["request_id"]: row for row in account.settled_rows(4)}
    assert set(rows) == {answer.id for answer in answers} | chunk_ids
    for answer in answers:
        row = rows[answer.id]
        counted = (row["prompt_tokens"], row["output_tokens"], row["http_status"])
        assert counted == (answer.usage.prompt_tokens, answer.usage.completion_tokens, 200)


def test_embeddings_are_unit_vectors_that_depend_on_their_text_alone(client: Any, server: Any) -> None:
    texts = ["one two three", "What is the capital of France?", "four"]
    alone = [client.embeddings.create(model=server.model, input=text).data[0].embedding for text in texts]
    answer = client.embeddings.create(model=server.model, input=[*texts, *reversed(texts)], encoding_format="float")
    together = [entry.embedding for entry in answer.data]
    for vector, expected in zip(together, [*alone, *reversed(alone)], strict=True):
        assert vector == pytest.approx(expected, abs=1e-5)
        assert math.hypot(*vector) == pytest.approx(1.0, abs=1e-5)
    assert alone[0] != pytest.approx(alone[1], abs=0.01)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens > 0
