"""`/v1/decisions` with the real `openai` package: answers, usage, prompts, refusals and limits."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import msgspec
import pytest
import tokenizers

from moiety_platform.decisions.schemas import MAX_OPTIONS
from moiety_platform.engine_client.fake import FakeEngineClient, FakeVerdict, admit
from moiety_platform.inference.option_scores import MAX_OPTION_TOKENS, option_probabilities, scored_from
from moiety_wire.messages import ModelCard, Submit

from .batch_requests import results, usage_rows, wait_for
from .batch_requests import submit as submit_batch
from .conftest import MODEL, RunningGateway, StartGateway, Until
from .test_batch_scores import batch_line

TRUE = {"type": "predicate", "name": "angry", "instructions": "The writer is angry."}
TEAM = {
    "type": "choice",
    "instructions": [{"type": "input_text", "text": "Which team?"}, {"type": "input_json", "data": {"n": [1]}}],
    "choices": [{"value": "billing", "description": "money"}, {"value": True}, {"value": "true"}],
}
URGENCY = {
    "type": "score",
    "name": "urgency",
    "instructions": "How urgent is it?",
    "levels": [{"label": "low"}, {"label": "high", "description": "within an hour"}],
}
TOKEN = -0.5  # the scripted engine's log-probability of each prompt token; a token is one byte


@pytest.fixture
def card(new_card: Any) -> ModelCard:
    made: ModelCard = new_card(max_context_tokens=4096)
    return made


def shares(*num_tokens: int) -> list[Any]:
    """Return the probabilities of options by the number of tokens after their common prefix."""
    powers = [math.exp(TOKEN * count) for count in num_tokens]
    return [pytest.approx(power / sum(powers)) for power in powers]


def text_of(prompt_ids: list[int], gateway: RunningGateway) -> str:
    return str(tokenizers.Tokenizer.from_str(gateway.engine.card.tokenizer_json).decode(prompt_ids))


async def refusal(gateway: RunningGateway, **body: Any) -> dict[str, Any]:
    status, _, answer = await gateway.post("/v1/decisions", {"model": MODEL, "input": "a", "questions": [TRUE], **body})
    error: dict[str, Any] = json.loads(answer)["error"]
    assert status == 400, error
    return error


async def test_questions_of_all_types_are_answered_in_their_order(gateway: RunningGateway) -> None:
    decision = await gateway.client.decisions.create(model=MODEL, input="Help!", questions=[TRUE, TEAM, URGENCY])
    predicate, choice, score = decision.answers
    assert decision.model == MODEL
    assert predicate.model_dump() == {"type": "predicate", "name": "angry", "probability": shares(4, 5)[0]}
    probabilities = shares(len('"billing"'), len("true"), len('"true"'))
    assert choice.model_dump() == {
        "type": "choice",
        "name": None,
        "choice": True,
        "confidence": probabilities[1],
        "probabilities": [
            {"value": value, "probability": probability}
            for value, probability in zip(("billing", True, "true"), probabilities, strict=True)
        ],
    }
    low, high = shares(len('low"'), len('high"'))  # both begin with a quotation mark
    assert score.model_dump() == {
        "type": "score",
        "name": "urgency",
        "score": high,
        "confidence": low,
        "probabilities": [
            {"label": "low", "value": 0, "probability": low},
            {"label": "high", "value": 1, "probability": high},
        ],
    }


async def test_each_option_is_a_prompt_that_ends_with_it_and_only_where_they_differ_is_scored(
    gateway: RunningGateway,
) -> None:
    await gateway.client.decisions.create(model=MODEL, input="Help!", questions=[TEAM, URGENCY])
    prompts = [text_of(one.prompt_ids, gateway) for one in gateway.engine.submits]
    common = (
        '<|user|><input>\nHelp!\n</input>\n\nWhich team?\n{"n":[1]}\n\nThe possible answers, as JSON:\n'
        '- "billing": money\n- true\n- "true"\n\n'
        "Answer with exactly one of these JSON values and nothing else.\n<|assistant|>"
    )
    assert prompts[:3] == [common + option for option in ('"billing"', "true", '"true"')]
    assert all(prompt.startswith("<|user|><input>\nHelp!\n</input>\n\nHow urgent") for prompt in prompts[3:])
    scored = [text_of(one.prompt_ids[one.sampling.prompt_logprobs_from :], gateway) for one in gateway.engine.submits]
    assert scored == ['"billing"', "true", '"true"', 'low"', 'high"']
    assert {(one.sampling.num_prompt_logprobs, one.stopping.max_tokens) for one in gateway.engine.submits} == {(0, 1)}
    total = sum(len(one.prompt_ids) for one in gateway.engine.submits)
    assert {one.sibling_tokens + len(one.prompt_ids) for one in gateway.engine.submits} == {total}


async def test_the_shared_prompt_of_options_is_billed_once_with_one_output_token(
    gateway: RunningGateway,
) -> None:
    decision = await gateway.client.decisions.create(
        model=MODEL, input="Help!", questions=[TRUE, URGENCY], safety_identifier="user-7"
    )
    submits = gateway.engine.submits
    total = sum(len(submits[first].prompt_ids) for first in (0, 2)) + len("false") + len('high"')
    usage = decision.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (total, 2, total + 2)
    assert (usage.input_tokens_details.cached_tokens, usage.output_tokens_details.reasoning_tokens) == (0, 0)
    (row,) = await gateway.rows.wait_for(1)
    assert (row.endpoint, row.prompt_tokens, row.output_tokens, row.num_choices) == ("/v1/decisions", total, 2, 4)
    assert [bool(one.billing_context) for one in submits] == [True, False, True, False]
    assert row.end_user == "user-7" and row.outcome in ("stop", "length")


async def test_items_are_read_as_json_lines_and_a_single_message_as_its_text(gateway: RunningGateway) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "look", "namespace": "web", "arguments": "{}"}
    items: list[Any] = [
        {"role": "developer", "content": 'Be "strict".'},
        {"type": "message", "role": "user", "content": [{"type": "input_json", "data": [{"a": None}]}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "No"}, {"type": "refusal", "refusal": "."}]},
        call,
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "found"}]},
        {"type": "custom_tool_call", "call_id": "d", "name": "run", "input": "ls"},
        {"type": "custom_tool_call_output", "call_id": "d", "output": "a.txt"},
    ]
    await gateway.client.decisions.create(model=MODEL, input=items, questions=[TRUE])
    read = text_of(gateway.engine.submits[0].prompt_ids, gateway).partition("<input>\n")[2].partition("\n</input>")[0]
    assert list(map(json.loads, read.split("\n"))) == [
        {"role": "developer", "content": 'Be "strict".'},
        {"role": "user", "content": '[{"a":null}]'},
        {"role": "assistant", "content": "No\n."},
        {"call": "web.look", "call_id": "c", "arguments": "{}"},
        {"output_of": "c", "output": "found"},
        {"call": "run", "call_id": "d", "input": "ls"},
        {"output_of": "d", "output": "a.txt"},
    ]
    await gateway.client.decisions.create(model=MODEL, input=[{"role": "user", "content": "Hi"}], questions=[TRUE])
    assert "<input>\nHi\n</input>" in text_of(gateway.engine.submits[-1].prompt_ids, gateway)


async def test_all_problems_are_named_at_once(gateway: RunningGateway) -> None:
    questions = [
        {"type": "predicate"},
        {"type": "choice", "instructions": "a", "choices": [{"value": "x"}]},
        {"type": "choice", "instructions": "a", "choices": [{"value": "x"}, {"value": "x"}]},
        {"type": "score", "instructions": "a", "levels": [{"label": "x"}] * 11},
        {"type": "boolean", "instructions": "a"},
    ]
    error = await refusal(gateway, questions=questions, input=[{"role": "tool", "content": "a"}])
    for words in (
        "has 6 problems",
        "'input.0.role' cannot be served: 'tool' is not a role",
        "'questions.0.instructions' is missing",
        "'questions.1.choices' cannot be served: it has fewer than two entries",
        "'questions.2.choices' cannot be served: each entry must be unique; \"x\" is repeated",
        "'questions.3.levels' is too long; it may have 10 entries",
        "'questions.4.type' cannot be served: 'boolean' is not a valid type of a question; use one of predicate, "
        "choice, score",
    ):
        assert words in error["message"], error
    assert not gateway.engine.submits


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"questions": []}, "'questions' is empty"),
        ({"questions": [TRUE] * 401}, "'questions' is too long; it may have 400 entries"),
        (
            {"questions": [{**TEAM, "choices": [{"value": str(one)} for one in range(255)]}] * 9},
            f"2,295 options together; a request may have {MAX_OPTIONS:,}",
        ),
        (
            {"input": [{"type": "function_call_output", "call_id": "c", "output": "a"}]},
            "'input.0' has the result of the call 'c', but no earlier 'function_call' has this call_id",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]},
            "decisions take text input only; describe the image",
        ),
        ({"input": [{"type": "reasoning"}]}, "items of type 'reasoning' are unknown"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_json", "data": [{"a": [0] * 10_000}]}]}]},
            "it has more than 10,000 values",
        ),
        ({"input": "x" * 5000}, "maximum context length is 4096 tokens"),
        (
            {"input": "x" * 50_000, "questions": [TRUE] * 400},
            "'input' has 20,000,000 characters, counted once for each of 400 questions; a request may have 16,777,216",
        ),
    ],
)
async def test_bad_requests_are_refused_with_what_to_do(
    gateway: RunningGateway, body: dict[str, Any], words: str
) -> None:
    assert words in (await refusal(gateway, **body))["message"]
    assert not gateway.engine.submits


async def test_prompts_with_too_many_tokens_together_are_refused(start_gateway: StartGateway, new_card: Any) -> None:
    async with start_gateway([FakeEngineClient(new_card(max_context_tokens=50_000))]) as gateway:
        error = await refusal(gateway, input="x" * 40_000, questions=[TRUE] * 20)
        assert (error["code"], error["param"]) == ("too_many_option_tokens", "questions")
        assert f"a request may have {MAX_OPTION_TOKENS:,}" in error["message"]
        assert not gateway.engine.submits


@pytest.mark.parametrize(
    ("changes", "code"),
    [({"extensible": False}, "decisions_not_supported"), ({"generates": False}, "generation_not_supported")],
)
async def test_external_engines_and_encoders_are_refused_with_the_reason(
    start_gateway: StartGateway, card: ModelCard, changes: dict[str, Any], code: str
) -> None:
    async with start_gateway([FakeEngineClient(msgspec.structs.replace(card, **changes))]) as gateway:
        error = await refusal(gateway)
        assert (error["code"], error["param"]) == (code, "model")


async def test_the_first_option_is_computed_before_the_others_are_submitted_and_judged(
    start_gateway: StartGateway, card: ModelCard
) -> None:
    num_generated: list[int] = []

    def note(submit: Submit) -> FakeVerdict:
        load = engine.state.load
        num_generated.append(0 if load is None else load.output_tokens_total)
        return admit(submit)

    engine = FakeEngineClient(card, verdict=note, token_s=0.05)
    async with start_gateway([engine]) as gateway:
        decision = await gateway.client.decisions.create(model=MODEL, input="a", questions=[TEAM])
        assert decision.answers[0].type == "choice" and decision.usage.output_tokens == 1
    assert num_generated[0] == 0 and min(num_generated[1:]) >= 1


async def test_a_client_that_leaves_ends_all_options(
    start_gateway: StartGateway, card: ModelCard, until: Until
) -> None:
    engine = FakeEngineClient(card, token_s=3600.0)
    async with start_gateway([engine]) as gateway:
        body = json.dumps({"model": MODEL, "input": "a", "questions": [TEAM]}).encode()
        head = f"POST /v1/decisions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {gateway.key}\r\n"
        _, writer = await asyncio.open_connection(*gateway.address)
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await until(lambda: engine.submits)
        writer.close()
        (row,) = await gateway.rows.wait_for(1)
        assert (row.outcome, row.http_status) == ("disconnected", 499)
        assert engine.state.num_inflight == 0


async def test_fields_without_effect_are_named(gateway: RunningGateway) -> None:
    body = {"model": MODEL, "input": "a", "questions": [TRUE], "prompt_cache_key": "k"}
    options = {"prompt_cache_options": {"mode": "explicit", "ttl": "30m"}}
    status, headers, _ = await gateway.post("/v1/decisions", {**body, **options})
    assert (status, headers["x-moiety-ignored-fields"]) == (200, "prompt_cache_key, prompt_cache_options.mode")
    assert {one.keep_s for one in gateway.engine.submits} == {1800.0}


async def test_the_options_are_the_models_answer_and_no_part_of_its_reasoning(
    start_gateway: StartGateway, card: ModelCard
) -> None:
    always = card.chat_template + "{% if add_generation_prompt %}<think>\n{% endif %}"
    always += "{# content.split('</think>') #}{% set reasoning_content = '' %}"
    async with start_gateway([FakeEngineClient(msgspec.structs.replace(card, chat_template=always))]) as gateway:
        status, headers, _ = await gateway.post("/v1/decisions", {"model": MODEL, "input": "a", "questions": [TRUE]})
        assert status == 200 and "x-moiety-adjusted-fields" not in headers
        prompts = [text_of(one.prompt_ids, gateway) for one in gateway.engine.submits]
        assert [prompt.partition("<|assistant|>")[2] for prompt in prompts] == [
            f"<think>\n</think>\n\n{option}" for option in ("true", "false")
        ]


async def test_a_batch_line_has_the_answer_of_a_live_request(start_gateway: StartGateway, card: ModelCard) -> None:
    async with start_gateway([FakeEngineClient(card)], stores_usage=True) as gateway:
        await gateway.admin("PUT", "/prices", {"model": MODEL, "input": "2", "output": "8"})
        body = {"input": "Help!", "questions": [TRUE, URGENCY]}
        url = "/v1/decisions"
        batch = await wait_for(gateway, await submit_batch(gateway, [batch_line("a", url, **body)], url), "completed")
        (one,) = await results(gateway, batch.output_file_id)
        _, _, live = await gateway.post(url, {"model": MODEL, **body})
        assert one["response"]["body"] == json.loads(live)
        (row,) = [row for row in await usage_rows(gateway) if row.service_class == "batch" and row.prompt_tokens]
        assert (row.endpoint, row.prompt_tokens) == (url, json.loads(live)["usage"]["input_tokens"])


def test_scores_begin_where_the_options_of_a_question_differ() -> None:
    prompts = [[1, 2, 3, 4], [1, 2, 3, 5, 6], [1, 2, 7], [9], [8], [4, 4], [4, 4]]
    assert scored_from(prompts, (3, 2, 2)) == [2, 2, 2, 1, 1, 2, 2]


def test_probabilities_of_a_question_sum_to_one_however_small_its_scores_are() -> None:
    far, near = option_probabilities([-5000.0, -5001.0, 0.0, -2000.0], (2, 2))
    assert far == pytest.approx([1 / (1 + math.exp(-1)), 1 / (1 + math.e)])
    assert near == pytest.approx([1.0, 0.0])
