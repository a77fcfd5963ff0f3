"""The real `openai` package against a gateway on loopback."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from .conftest import RunningGateway

MODEL = "tiny"
HELLO: list[Any] = [{"role": "user", "content": "hello"}]


async def test_a_chat_completion_has_text_usage_and_identity(gateway: RunningGateway) -> None:
    answer = await gateway.client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=3)
    assert answer.choices[0].message.content == "1 2 3"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.model == MODEL
    assert answer.service_tier == "default"
    assert answer.system_fingerprint.startswith("fp_")
    prompt = len("<|user|>hello\n<|assistant|>")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt, 3)
    assert answer.usage.total_tokens == prompt + 3
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


async def test_a_streamed_chat_brings_the_same_text_piece_by_piece_and_usage_last(gateway: RunningGateway) -> None:
    stream = await gateway.client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=4, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "1 2 3 4"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 4
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


async def test_a_stream_without_include_usage_ends_with_its_finish_reason(gateway: RunningGateway) -> None:
    stream = await gateway.client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=2, stream=True)
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].choices[0].finish_reason == "length"
    assert all(chunk.usage is None for chunk in chunks)


@pytest.mark.parametrize(
    ("prompt", "num_prompts", "prompt_tokens"),
    [("abc", 1, 3), (["abc", "de"], 2, 5), ([5, 6, 7, 8], 1, 4), ([[5, 6], [7]], 2, 3)],
)
async def test_completions_take_text_or_token_ids_one_or_several(
    gateway: RunningGateway, prompt: Any, num_prompts: int, prompt_tokens: int
) -> None:
    answer = await gateway.client.completions.create(model=MODEL, prompt=prompt, max_tokens=2)
    assert [choice.text for choice in answer.choices] == ["1 2"] * num_prompts
    assert answer.id.startswith("cmpl-")
    assert answer.usage.prompt_tokens == prompt_tokens
    assert answer.usage.completion_tokens == 2 * num_prompts


async def test_completions_default_to_sixteen_tokens(gateway: RunningGateway) -> None:
    answer = await gateway.client.completions.create(model=MODEL, prompt="abc")
    assert answer.usage.completion_tokens == 16


async def test_a_chat_without_max_tokens_may_use_the_rest_of_the_context(gateway: RunningGateway) -> None:
    answer = await gateway.client.chat.completions.create(model=MODEL, messages=HELLO)
    assert answer.usage.total_tokens == 512


async def test_n_gives_that_many_choices_with_seeds_of_their_own(gateway: RunningGateway) -> None:
    create = gateway.client.completions.create
    answer = await create(model=MODEL, prompt=["a", "b"], n=3, seed=7, max_tokens=1)
    assert [choice.index for choice in answer.choices] == list(range(6))
    seeds = [submit.sampling.seed for submit in gateway.engine.submits]
    assert seeds[0] == seeds[3] == 7
    assert len(set(seeds)) == 3 and seeds[:3] == seeds[3:]
    assert answer.usage.prompt_tokens == 2
    await create(model=MODEL, prompt=["a", "b"], n=3, seed=7, max_tokens=1)
    assert [submit.sampling.seed for submit in gateway.engine.submits[6:]] == seeds


async def test_streamed_choices_are_distinguished_by_index(gateway: RunningGateway) -> None:
    stream = await gateway.client.chat.completions.create(model=MODEL, messages=HELLO, n=3, max_tokens=3, stream=True)
    texts = ["", "", ""]
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == ["1 2 3"] * 3


async def test_every_sampling_parameter_reaches_the_engine(gateway: RunningGateway) -> None:
    await gateway.client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        max_completion_tokens=9,
        temperature=0.25,
        top_p=0.5,
        presence_penalty=1.5,
        frequency_penalty=-1.5,
        logit_bias={"7": -100},
        seed=11,
        stop=["X", "YY"],
        extra_body={
            "top_k": 4,
            "min_p": 0.125,
            "repetition_penalty": 1.25,
            "min_tokens": 2,
            "stop_token_ids": [3],
            "ignore_eos": True,
        },
    )
    submit = gateway.engine.submits[0]
    sampling, stopping = submit.sampling, submit.stopping
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.25, 0.5, 4, 0.125)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1.5, -1.5, 1.25)
    assert (sampling.logit_bias, sampling.seed) == ({7: -100.0}, 11)
    assert (stopping.max_tokens, stopping.min_tokens, stopping.stop) == (9, 2, ("X", "YY"))
    assert (stopping.stop_token_ids, stopping.ignore_eos) == ((3,), True)


async def test_chat_logprobs_have_openais_structure_streamed_and_not(gateway: RunningGateway) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 2, "logprobs": True, "top_logprobs": 1}
    answer = await gateway.client.chat.completions.create(**asked)
    content = answer.choices[0].logprobs.content
    assert [(entry.token, bytes(entry.bytes), entry.logprob) for entry in content] == [
        ("1", b"1", -0.5),
        (" 2", b" 2", -0.5),
    ]
    assert [len(entry.top_logprobs) for entry in content] == [1, 1]
    streamed = []
    async for chunk in await gateway.client.chat.completions.create(**asked, stream=True):
        if chunk.choices[0].logprobs:
            streamed += chunk.choices[0].logprobs.content
    assert streamed == content


async def test_completion_logprobs_have_openais_structure_streamed_and_not(gateway: RunningGateway) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": "a", "max_tokens": 3, "logprobs": 1}
    logprobs = (await gateway.client.completions.create(**asked)).choices[0].logprobs
    assert logprobs.tokens == ["1", " 2", " 3"]
    assert logprobs.token_logprobs == [-0.5] * 3
    assert logprobs.top_logprobs == [{"1": -0.5}, {" 2": -0.5}, {" 3": -0.5}]
    assert logprobs.text_offset == [0, 1, 3]
    offsets = []
    async for chunk in await gateway.client.completions.create(**asked, stream=True):
        if chunk.choices[0].logprobs:
            offsets += chunk.choices[0].logprobs.text_offset
    assert offsets == [0, 1, 3]


async def test_echo_puts_the_prompt_before_the_text_streamed_and_not(gateway: RunningGateway) -> None:
    answer = await gateway.client.completions.create(model=MODEL, prompt=["ab", "c"], max_tokens=2, echo=True)
    assert [choice.text for choice in answer.choices] == ["ab1 2", "c1 2"]
    stream = await gateway.client.completions.create(model=MODEL, prompt="ab", max_tokens=2, echo=True, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "ab1 2"


async def test_an_echoed_prompt_has_logprobs_but_for_its_first_token(gateway: RunningGateway) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "prompt": [[5, 6, 7], [8]],
        "max_tokens": 2,
        "n": 2,
        "echo": True,
        "logprobs": 1,
    }
    answer = await gateway.client.completions.create(**asked)
    for choice, num_prompt in zip(answer.choices, (3, 3, 1, 1), strict=True):
        found = choice.logprobs
        assert found.token_logprobs == [None] + [-0.5] * (num_prompt + 1)
        assert found.top_logprobs[0] is None and all(len(top) == 1 for top in found.top_logprobs[1:])
        assert len(found.tokens) == len(found.text_offset) == num_prompt + 2
        lengths = [end - start for start, end in zip(found.text_offset, found.text_offset[1:], strict=False)]
        assert lengths == [len(token) for token in found.tokens[:-1]]


async def test_models_are_listed_and_retrieved(gateway: RunningGateway) -> None:
    models = (await gateway.client.models.list()).data
    found = [(model.id, model.owned_by, model.to_dict()["max_model_len"]) for model in models]
    assert found == [(MODEL, "moiety", 512)]
    assert (await gateway.client.models.retrieve(MODEL)).created == 1_700_000_000
    with pytest.raises(openai.NotFoundError) as caught:
        await gateway.client.models.retrieve("other/model")
    assert caught.value.code == "model_not_found"


async def test_a_bad_key_is_an_authentication_error(gateway: RunningGateway) -> None:
    with pytest.raises(openai.AuthenticationError) as caught:
        await gateway.client.with_options(api_key="mty_no.such").chat.completions.create(model=MODEL, messages=HELLO)
    assert caught.value.status_code == 401
    assert caught.value.type == "authentication_error"


async def test_an_unknown_model_is_a_not_found_error_that_lists_the_known(gateway: RunningGateway) -> None:
    with pytest.raises(openai.NotFoundError, match=r"'gpt-9'.*available: tiny") as caught:
        await gateway.client.chat.completions.create(model="gpt-9", messages=HELLO)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


async def test_a_bad_parameter_is_a_bad_request_error_that_names_it(gateway: RunningGateway) -> None:
    with pytest.raises(openai.BadRequestError, match="'temperature' must be less than or equal to 2") as caught:
        await gateway.client.chat.completions.create(model=MODEL, messages=HELLO, temperature=3)
    assert caught.value.param == "temperature"


async def test_an_over_long_prompt_is_refused_with_all_lengths(gateway: RunningGateway) -> None:
    with pytest.raises(
        openai.BadRequestError, match=r"512 tokens.*prompt has 500 tokens and 20 are asked for.*520"
    ) as caught:
        await gateway.client.completions.create(model=MODEL, prompt="x" * 500, max_tokens=20)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="626 tokens > 511 maximum"):
        await gateway.client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x" * 604}])


async def test_developer_messages_are_the_templates_system_messages(gateway: RunningGateway) -> None:
    messages: list[Any] = [
        {"role": "developer", "content": [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}]}
    ]
    answer = await gateway.client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1)
    assert answer.usage.prompt_tokens == len("<|system|>be\nbrief\n<|assistant|>")
