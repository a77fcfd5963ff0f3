"""`/v1/responses` with the real `openai` package: what is asked, what is answered, and what is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import tokenizers

from moiety_platform.engine_client.fake import FakeEngineClient, FakeVerdict, report_counts
from moiety_wire.messages import Failed, FailureCode, ModelCard, Submit
from moiety_wire.trace_events import Reason

from .conftest import NewCard, RunningGateway, StartGateway, always

PATH = "/v1/responses"
BODY: dict[str, Any] = {"model": "tiny", "input": "hello", "max_output_tokens": 3}
LOGPROBS = "message.output_text.logprobs"
BEGINNING = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
]
END = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]


def says(*pieces: Any) -> Any:
    """Return an engine's script that ends by itself."""
    return lambda submit: [(65, piece) for piece in pieces]


def endless(submit: Submit) -> Any:
    return ((65, "x" * 50) for _ in range(submit.stopping.max_tokens))


def prompt_of(submit: Submit, card: ModelCard) -> str:
    return tokenizers.Tokenizer.from_str(card.tokenizer_json).decode(submit.prompt_ids)


async def events_of(gateway: RunningGateway, **fields: Any) -> Any:
    stream = await gateway.client.responses.create(**BODY | fields, stream=True)
    return [event async for event in stream]


# ── answers ──


async def test_a_response_has_text_usage_and_identity(start_gateway: StartGateway, card: ModelCard) -> None:
    engine = FakeEngineClient(card, says("4", "2"), verdict=lambda submit: FakeVerdict("standard", num_cached_tokens=7))
    async with start_gateway([engine]) as gateway:
        raw = await gateway.client.responses.with_raw_response.create(
            **BODY, metadata={"order": "7"}, instructions="be brief", user="u", prompt_cache_key="k"
        )
        response = raw.parse()
        assert response.output_text == "42"
        (message,) = response.output
        assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
        assert response.id.startswith("resp_") and message.id.startswith("msg_")
        assert (response.object, response.status, response.model) == ("response", "completed", "tiny")
        assert response.completed_at >= response.created_at > 1_700_000_000
        assert (response.metadata, response.instructions, response.user) == ({"order": "7"}, "be brief", "u")
        assert (response.service_tier, response.truncation, response.error) == ("default", "disabled", None)
        assert response.store is False
        usage = response.usage
        assert usage.input_tokens == len("<|system|>be brief\n<|user|>hello\n<|assistant|>")
        assert (usage.input_tokens_details.cached_tokens, usage.output_tokens) == (7, 2)
        assert usage.total_tokens == usage.input_tokens + 2
        assert raw.headers["x-moiety-class"] == "standard"
        assert raw.headers["x-request-id"]
        (row,) = await gateway.rows.wait_for(1)
        assert (row.request_id, row.endpoint, row.output_tokens) == (response.id, PATH, 2)


async def test_a_stream_has_openais_events_in_their_order_and_ends_with_the_whole(
    start_gateway: StartGateway, card: ModelCard
) -> None:
    async with start_gateway([FakeEngineClient(card, says("4", "2"))]) as gateway:
        events = await events_of(gateway)
        kinds = [event.type for event in events]
        assert kinds == [*BEGINNING, *["response.output_text.delta"] * 2, *END, "response.completed"]
        assert [event.sequence_number for event in events] == list(range(10))
        assert (events[0].response.status, events[0].response.output) == ("in_progress", [])
        item, part, *deltas, text, whole_part, whole_item, last = events[2:]
        assert (item.item.status, item.item.content, part.part.text) == ("in_progress", [], "")
        assert [delta.delta for delta in deltas] == ["4", "2"]
        assert text.text == whole_part.part.text == last.response.output_text == "42"
        assert whole_item.item == last.response.output[0]
        assert {event.item_id for event in (part, *deltas, text, whole_part)} == {item.item.id} == {whole_item.item.id}
        assert last.response.usage.output_tokens == 2
        assert {event.response.id for event in (*events[:2], last)} == {last.response.id}


async def test_the_clients_own_accumulation_comes_to_the_same_as_an_answer_in_one_piece(
    start_gateway: StartGateway, card: ModelCard
) -> None:
    async with start_gateway([FakeEngineClient(card, says("4", "2"))]) as gateway:
        async with gateway.client.responses.stream(**BODY) as stream:
            streamed = await stream.get_final_response()
        whole = await gateway.client.responses.create(**BODY)
        differs = {"id", "created_at", "completed_at", "output"}
        assert streamed.model_dump(exclude=differs) == whole.model_dump(exclude=differs)
        assert streamed.output_text == whole.output_text


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_is_cut_is_incomplete(gateway: RunningGateway, stream: bool) -> None:
    if stream:
        *_, item, last = await events_of(gateway)
        assert (item.item.status, last.type) == ("incomplete", "response.incomplete")
        response = last.response
    else:
        response = await gateway.client.responses.create(**BODY)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (response.output_text, response.output[0].status, response.completed_at) == ("1 2 3", "incomplete", None)
    assert response.usage.output_tokens == 3


async def test_logprobs_come_where_they_are_included_streamed_and_not(gateway: RunningGateway) -> None:
    asked: dict[str, Any] = {"include": [LOGPROBS], "top_logprobs": 1}
    response = await gateway.client.responses.create(**BODY, **asked)
    whole = response.output[0].content[0].logprobs
    assert [(entry.token, bytes(entry.bytes), entry.logprob) for entry in whole[:2]] == [
        ("1", b"1", -0.5),
        (" 2", b" 2", -0.5),
    ]
    assert [len(entry.top_logprobs) for entry in whole] == [1, 1, 1]
    events = await events_of(gateway, **asked)
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [entry.token for event in deltas for entry in event.logprobs] == ["1", " 2", " 3"]
    assert events[-1].response.output[0].content[0].logprobs == whole
    plain = await gateway.client.responses.create(**BODY)
    assert plain.output[0].content[0].logprobs == []


# ── what is asked ──


async def test_items_of_every_role_reach_the_chat_template_in_order(gateway: RunningGateway, card: ModelCard) -> None:
    answered: dict[str, Any] = {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant"}
    items = [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "input_text", "text": "u1"}, {"type": "input_text", "text": "u2"}]},
        {**answered, "content": [{"type": "output_text", "text": "a", "annotations": [], "logprobs": []}]},
        {"type": "message", "role": "assistant", "content": "b"},
        {"role": "system", "content": "s"},
    ]
    await gateway.client.responses.create(**BODY | {"input": items}, instructions="i")
    expected = "<|system|>i\n<|system|>d\n<|user|>u1\nu2\n<|assistant|>a\n<|assistant|>b\n<|system|>s\n<|assistant|>"
    assert prompt_of(gateway.engine.submits[0], card) == expected


async def test_sampling_and_tier_reach_the_engine_and_default_to_openais(gateway: RunningGateway) -> None:
    await gateway.client.responses.create(**BODY, temperature=0.25, top_p=0.5, service_tier="flex")
    await gateway.client.responses.create(model="tiny", input="hello", reasoning={"effort": "none"}, background=False)
    given, default = gateway.engine.submits
    assert (given.sampling.temperature, given.sampling.top_p, given.sampling.num_logprobs) == (0.25, 0.5, None)
    assert (given.stopping.max_tokens, given.service.name) == (3, "flex")
    assert (default.sampling.temperature, default.sampling.top_p) == (1.0, 1.0)
    assert default.stopping.max_tokens == 512 - gateway.prompt_tokens("hello")


async def test_a_prompt_cache_key_changes_nothing_about_the_salt(gateway: RunningGateway) -> None:
    for key in ("a", "b"):
        await gateway.client.responses.create(**BODY, prompt_cache_key=key, safety_identifier=key)
    first, second = gateway.engine.submits
    assert first.cache_salt == second.cache_salt


def message(**fields: Any) -> dict[str, Any]:
    return {"input": [fields]}


BAD = [
    ({"input": None}, "input", "a string or a list of items"),
    ({"input": []}, "input", "is empty"),
    ({"input": [{"role": "user", "content": "x"}] * 2049}, "input", "may have 2,048 entries"),
    (message(role="tool", content="x"), "input.0.role", "'tool' is not a role"),
    (message(role="user"), "input.0.content", "is missing"),
    (message(content="x"), "input.0.role", "is missing"),
    ({"input": [7]}, "input.0", "object"),
    (message(type=7), "input.0.type", "valid string"),
    (message(role="user", content=7), "input.0.content", "a string or a list of text parts"),
    (message(role="user", content=[{"type": "input_image"}]), "input.0.content.0", "image"),
    (message(role="user", content=[{"type": "input_file"}]), "input.0.content.0", "one of 'file_data', 'file_url' and"),
    (message(role="user", content=[{"type": "smell"}]), "input.0.content.0.type", "'smell' are not supported"),
    (
        message(role="user", content=[{"type": "output_text", "text": "x"}]),
        "input.0.content",
        "'user' are 'input_text'",
    ),
    (message(type="item_reference"), "input.0.id", "is missing"),
    (message(type="smell"), "input.0.type", "'smell' are unknown"),
    (message(type="compaction"), "input.0.encrypted_content", "is missing"),
    ({"instructions": 7}, "instructions", "valid string"),
    ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
    ({"temperature": 3}, "temperature", "less than or equal to 2"),
    ({"top_p": -1}, "top_p", "greater than or equal to 0"),
    ({"top_logprobs": 21, "include": [LOGPROBS]}, "top_logprobs", "less than or equal to 20"),
    ({"top_logprobs": 2}, None, "'include' has"),
    ({"include": ["everything"]}, "include", "'everything' is unknown"),
    ({"service_tier": "slow"}, "service_tier", "'priority'"),
    ({"metadata": {str(n): "" for n in range(17)}}, "metadata", "16"),
    ({"metadata": {"k" * 65: "v"}}, "metadata." + "k" * 64 + ".[key]", "64 characters"),
    ({"metadata": {"k": "v" * 513}}, "metadata.k", "512 characters"),
    ({"user": "u" * 513}, "user", "512 characters"),
    ({"truncation": "most"}, "truncation", "'disabled'"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type", "use 'text'"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format", "are needed"),
    ({"text": {"verbosity": "lowest"}}, "text.verbosity", "'low'"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "'none'"),
    ({"conversation": "conv_1", "previous_response_id": "resp_1"}, None, "exclude each other"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt", "as 'instructions' or 'input'"),
    ({"moderation": {"model": "m"}}, "moderation", "moderate them yourself"),
    ({"context_management": [{"compact_threshold": 1}]}, "context_management.0.type", "is missing"),
    ({"stream_options": {}}, None, "only when 'stream' is true"),
]


async def test_bad_requests_get_400_that_names_the_field_and_leave_one_row_each(gateway: RunningGateway) -> None:
    for number, (changes, param, words) in enumerate(BAD, 1):
        status, _, answer = await gateway.post(PATH, BODY | changes)
        error = json.loads(answer)["error"]
        assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param), (changes, error)
        assert words in error["message"], (changes, error)
        rows = await gateway.rows.wait_for(number)
        assert (rows[-1].outcome, rows[-1].http_status, rows[-1].output_tokens) == ("rejected", 400, 0)
    assert gateway.engine.submits == []


async def test_fields_without_effect_on_the_response_are_accepted(gateway: RunningGateway) -> None:
    harmless: dict[str, Any] = {
        "include": ["reasoning.encrypted_content"], "truncation": "disabled", "text": {"format": {"type": "text"}},
        "tools": [], "tool_choice": None, "metadata": None, "prompt_cache_retention": "24h", "max_tool_calls": 3,
        "something_new": {"a": 1}, "service_tier": "fast", "context_management": [{"type": "compaction"}],
    }  # fmt: skip
    assert (await gateway.post(PATH, BODY | harmless))[0] == 200
    plain = await events_of(gateway, stream_options={"include_obfuscation": True})
    assert plain[-1].type == "response.incomplete"


async def test_keys_and_models_are_refused_as_everywhere(gateway: RunningGateway) -> None:
    with pytest.raises(openai.AuthenticationError):
        await gateway.client.with_options(api_key="mty_no.such").responses.create(**BODY)
    with pytest.raises(openai.PermissionDeniedError) as refused:
        await gateway.client.with_options(api_key=gateway.admin_key).responses.create(**BODY)
    assert refused.value.code == "missing_scope"
    with pytest.raises(openai.NotFoundError, match="available: tiny") as caught:
        await gateway.client.responses.create(**BODY | {"model": "gpt-9"})
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError, match="context") as too_long:
        await gateway.client.responses.create(**BODY | {"max_output_tokens": 10_000})
    assert too_long.value.code == "context_length_exceeded"


# ── what fails ──


REFUSALS = [
    (FailureCode.OVERLOADED, Reason.PREDICTED_LATE, openai.RateLimitError, 429),
    (FailureCode.DRAINING, None, openai.InternalServerError, 503),
    (FailureCode.ENGINE_FAILED, None, openai.InternalServerError, 502),
]


async def test_a_refusal_of_the_engine_has_its_status_even_if_a_stream_was_asked_for(gateway: RunningGateway) -> None:
    for code, reason, error, status in REFUSALS:
        failed = Failed("", 0, code, "no, because", 0, reason, 2.1)
        gateway.engine.script = always(failed)
        for stream in (False, True):
            with pytest.raises(error, match="no, because") as caught:
                await gateway.client.responses.create(**BODY, stream=stream)
            assert caught.value.status_code == status


async def test_an_engine_lost_during_a_stream_gives_an_error_and_a_failed_response(
    start_gateway: StartGateway, card: ModelCard
) -> None:
    engine = FakeEngineClient(card, lambda submit: ((65, "x") for _ in range(10_000)))
    async with start_gateway([engine], credit_window_tokens=8) as gateway:
        stream = await gateway.client.responses.create(**BODY | {"max_output_tokens": 400}, stream=True)
        events = []
        async for event in stream:
            events.append(event)
            if event.type == "response.output_text.delta":
                engine.die()
        *before, error, failed = events
        assert before[-1].type == "response.output_text.delta"
        assert (error.type, error.code, failed.type) == ("error", "engine_failed", "response.failed")
        assert (failed.response.status, failed.response.error.code) == ("failed", "server_error")
        assert failed.response.error.message == error.message
        assert [event.sequence_number for event in events] == list(range(len(events)))
        (row,) = await gateway.rows.wait_for(1)
        assert (row.outcome, row.http_status, row.error_code) == ("failed", 200, "engine_failed")


async def test_a_stream_continues_at_another_engine(start_gateway: StartGateway, new_card: NewCard) -> None:
    engines = [FakeEngineClient(new_card(f"engine-{number}")) for number in range(2)]
    left = [10]

    def dies_once(submit: Submit) -> Iterator[Any]:
        for position, piece in enumerate(report_counts(submit)):
            if [position] == left:
                left.clear()
                next(engine for engine in engines if engine.state.num_inflight).die()
            yield piece

    for engine in engines:
        engine.script = dies_once
    async with start_gateway(engines) as gateway:
        events = await events_of(gateway, max_output_tokens=30)
        assert events[-1].response.output_text == " ".join(str(1 + n) for n in range(30))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert sorted(len(engine.submits) for engine in engines) == [1, 1]


async def test_a_client_that_leaves_in_mid_stream_ends_its_request_at_the_engine(
    start_gateway: StartGateway, new_card: NewCard
) -> None:
    engine = FakeEngineClient(new_card(max_context_tokens=10_000_000), endless)
    async with start_gateway([engine]) as gateway:
        async with gateway.client.responses.stream(**BODY | {"max_output_tokens": 1_000_000}) as stream:
            async for event in stream:
                if event.type == "response.output_text.delta":
                    break
        (row,) = await gateway.rows.wait_for(1)
        assert (row.outcome, row.http_status, row.error_code) == ("disconnected", 499, "client_disconnected")
        assert row.output_tokens == engine.state.load.output_tokens_total > 0
        assert engine.state.num_inflight == 0


async def test_a_limit_that_is_used_up_cuts_a_response_and_then_refuses_one(
    start_gateway: StartGateway, card: ModelCard
) -> None:
    async with start_gateway([FakeEngineClient(card)], stores_usage=True, credit_window_tokens=8) as gateway:
        size = gateway.prompt_tokens("hello")
        _, _, answer = await gateway.request("GET", "/admin/v1/tenants", key=gateway.admin_key)
        (tenant,) = json.loads(answer)["data"]
        limit: dict[str, Any] = {
            "level": "tenant",
            "scope_id": tenant["id"],
            "kind": "tokens_per_day",
            "cap": size + 20,
        }
        assert (await gateway.request("PUT", "/admin/v1/quotas", json.dumps(limit).encode(), gateway.admin_key))[
            0
        ] == 200
        response = await gateway.client.responses.create(**BODY | {"max_output_tokens": 100})
        assert (response.status, response.usage.total_tokens) == ("incomplete", size + 20)
        with pytest.raises(openai.RateLimitError) as refused:
            await gateway.client.responses.create(**BODY)
        assert refused.value.code == "quota_exceeded"


async def test_responses_at_once_do_not_mix(start_gateway: StartGateway, card: ModelCard) -> None:
    engine = FakeEngineClient(card, lambda submit: [(65, f"{len(submit.prompt_ids)},") for _ in range(20)])
    async with start_gateway([engine]) as gateway:
        asked = ["x" * n for n in range(1, 9)]
        answers = await asyncio.gather(*(events_of(gateway, input=text, max_output_tokens=20) for text in asked))
        for text, events in zip(asked, answers, strict=True):
            assert events[-1].response.output_text == f"{gateway.prompt_tokens(text)}," * 20
