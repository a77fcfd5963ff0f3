"""Items that clients send back: encrypted reasoning, references, items of hosted tools, and what does not fit."""

from __future__ import annotations

from typing import Any

import msgspec
import openai
import pytest

from moiety_platform.auth.pepper import PepperRotation
from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_platform.responses_api.reasoning_cipher import ReasoningCipher
from moiety_platform.responses_api.transcript import HEAD
from moiety_wire.messages import ModelCard

from .conftest import RunningGateway, StartGateway
from .test_response_tools import TEMPLATE, last_prompt

BODY: dict[str, Any] = {"model": "tiny", "input": "go", "max_output_tokens": 100}
ENCRYPTED = "reasoning.encrypted_content"
IGNORED, ADJUSTED = "x-moiety-ignored-fields", "x-moiety-adjusted-fields"
THINKS = TEMPLATE.replace(
    "<|{{ message['role'] }}|>",
    "<|{{ message['role'] }}|>"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}",
)
PEPPER = b"p" * 32


@pytest.fixture
def thinking(card: ModelCard) -> FakeEngineClient:
    knowing = msgspec.structs.replace(card, chat_template=THINKS, max_context_tokens=4096)
    return FakeEngineClient(knowing, lambda submit: [(65, "<think>So."), (65, "</think>"), (65, "Yes.")])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_stores_nothing_keeps_the_reasoning(
    start_gateway: StartGateway, thinking: FakeEngineClient, stream: bool
) -> None:
    async with start_gateway([thinking]) as gateway:
        asked: dict[str, Any] = {**BODY, "include": [ENCRYPTED], "store": False}
        if stream:
            events = [event async for event in await gateway.client.responses.create(**asked, stream=True)]
            answer = events[-1].response
        else:
            answer = await gateway.client.responses.create(**asked)
        thought, message = (item.model_dump(exclude_none=True) for item in answer.output)
        assert "So." not in thought["encrypted_content"]
        given = [{**thought, "content": None}, message, {"role": "user", "content": "why?"}]
        again = await gateway.client.responses.with_raw_response.create(**BODY | {"input": given})
        assert last_prompt(gateway) == "<|assistant|><think>So.</think>Yes.\n<|user|>why?\n<|assistant|>"
        assert IGNORED not in again.headers
        plain = await gateway.client.responses.create(**BODY)
        assert plain.output[0].encrypted_content is None


async def test_reasoning_that_was_changed_or_encrypted_elsewhere_is_ignored_and_named(
    start_gateway: StartGateway, thinking: FakeEngineClient
) -> None:
    async with start_gateway([thinking]) as gateway:
        answer = await gateway.client.responses.create(**BODY, include=[ENCRYPTED])
        encrypted = answer.output[0].encrypted_content
        foreign = ReasoningCipher(PEPPER).encrypt("ten_other", "reasoning", "No.")
        for sent in (encrypted[:-8] + "AAAAAAA=", encrypted[1:], foreign, "gAAAA", "\u00e9"):
            item: dict[str, Any] = {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [],
                "content": None,
                "encrypted_content": sent,
            }
            asked = BODY | {"input": [item, {"role": "user", "content": "why?"}]}
            raw = await gateway.client.responses.with_raw_response.create(**asked)
            assert raw.headers[IGNORED] == "input.reasoning.encrypted_content"
            assert last_prompt(gateway) == "<|user|>why?\n<|assistant|>"


def test_a_cipher_reads_only_its_tenants_texts_of_the_same_kind_also_during_a_rotation_of_the_pepper() -> None:
    old, new = ReasoningCipher(PEPPER), ReasoningCipher(b"n" * 32, PepperRotation(previous=PEPPER))
    text = "So. \u00e9\U0001f600"
    encrypted = old.encrypt("ten_a", "reasoning", text)
    assert encrypted != old.encrypt("ten_a", "reasoning", text)
    assert old.decrypt("ten_a", "reasoning", encrypted) == new.decrypt("ten_a", "reasoning", encrypted) == text
    assert old.decrypt("ten_b", "reasoning", encrypted) is None
    assert old.decrypt("ten_a", "compaction", encrypted) is None
    assert ReasoningCipher(b"n" * 32).decrypt("ten_a", "reasoning", encrypted) is None
    for end in range(0, len(encrypted), 7):
        assert old.decrypt("ten_a", "reasoning", encrypted[:end]) is None


async def test_references_stand_for_items_of_stored_responses(
    start_gateway: StartGateway, thinking: FakeEngineClient
) -> None:
    async with start_gateway([thinking]) as gateway:
        first = await gateway.client.responses.create(**BODY, store=True)
        (asked,) = (await gateway.client.responses.input_items.list(first.id)).data
        items = [{"type": "item_reference", "id": asked.id}, *({"id": item.id} for item in first.output)]
        given = BODY | {"input": [*items, {"role": "user", "content": "why?"}]}
        second = await gateway.client.responses.create(**given, store=True)
        prompt = "<|user|>go\n<|assistant|><think>So.</think>Yes.\n<|user|>why?\n<|assistant|>"
        assert last_prompt(gateway) == prompt
        listed = [item async for item in gateway.client.responses.input_items.list(second.id, order="asc")]
        assert [item.type for item in listed] == ["message", "reasoning", "message", "message"]
        assert len({item.id for item in (*listed, *first.output)}) == 6
        await gateway.client.responses.create(**BODY, previous_response_id=second.id)
        assert last_prompt(gateway).startswith(prompt)
        for wrong in ("msg_1", first.output[0].id[:-1] + "f", "msg_" + "0" * 37):
            with pytest.raises(openai.NotFoundError, match="there is no item") as refused:
                await gateway.client.responses.create(**BODY | {"input": [{"type": "item_reference", "id": wrong}]})
            assert (refused.value.code, refused.value.param) == ("item_not_found", "input")


async def test_items_of_hosted_tools_are_skipped_and_named(gateway: RunningGateway) -> None:
    items = [
        {"role": "user", "content": "go"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "mcp_list_tools", "id": "m", "server_label": "x", "tools": []},
        {"type": "tool_search_call", "arguments": {}, "call_id": None},
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"type": "function_call_output", "name": "clock", "output": "noon"},
    ]
    raw = await gateway.client.responses.with_raw_response.create(**BODY | {"input": items, "max_output_tokens": 3})
    assert raw.headers[IGNORED] == "input.mcp_list_tools, input.web_search_call"
    assert last_prompt(gateway) == (
        "<|user|>go\n<|assistant|>No.\n<|user|>Output of the tool clock:\nnoon\n<|assistant|>"
    )


async def test_ignored_options_are_named(gateway: RunningGateway) -> None:
    options: dict[str, Any] = {
        "text": {"verbosity": "low"}, "prompt_cache_key": "k", "max_tool_calls": 3, "reasoning": {"summary": "auto"},
        "extra_body": {"client_metadata": {"a": "b"}},
    }  # fmt: skip
    raw = await gateway.client.responses.with_raw_response.create(**BODY | {"max_output_tokens": 3}, **options)
    assert raw.headers[IGNORED] == (
        "client_metadata, max_tool_calls, prompt_cache_key, reasoning.summary, text.verbosity"
    )


# ── what does not fit ──


@pytest.fixture
def small(card: ModelCard) -> FakeEngineClient:
    knowing = msgspec.structs.replace(card, chat_template=TEMPLATE, max_context_tokens=400)
    return FakeEngineClient(knowing, lambda submit: [(65, "Yes.")])


async def test_with_truncation_the_oldest_items_are_left_out_and_calls_keep_their_results(
    start_gateway: StartGateway, small: FakeEngineClient
) -> None:
    items: list[dict[str, Any]] = [{"role": "developer", "content": "rules"}]
    for number in range(10):
        called = {"type": "function_call", "call_id": f"c{number}", "name": "f", "arguments": "{}"}
        result = {"type": "function_call_output", "call_id": f"c{number}", "output": f"result {number}"}
        items += [{"role": "user", "content": f"turn {number}"}, called, result]
    items.append({"role": "user", "content": "last"})
    asked = BODY | {"input": items, "max_output_tokens": 50}
    async with start_gateway([small]) as gateway:
        for options in ({"truncation": "auto"}, {"context_management": [{"type": "compaction"}]}):
            raw = await gateway.client.responses.with_raw_response.create(**asked, **options, instructions="be brief")
            prompt = last_prompt(gateway)
            assert prompt.startswith("<|system|>be brief\n<|system|>rules\n")
            assert prompt.endswith("<|tool|>result 9\n<|user|>last\n<|assistant|>")
            assert prompt.count("<tool_call>") == prompt.count("<|tool|>") > 1
            assert "turn 0" not in prompt and 250 < len(gateway.engine.submits[-1].prompt_ids) <= 350
            assert raw.headers[ADJUSTED].startswith("truncation=")
            assert raw.headers[ADJUSTED].endswith("of 33 messages left out")
        with pytest.raises(openai.BadRequestError) as refused:
            await gateway.client.responses.create(**asked, truncation="disabled")
        assert refused.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError, match="context"):  # the last message alone is too long
            await gateway.client.responses.create(**BODY | {"input": "x" * 500}, truncation="auto")
        fits = await gateway.client.responses.with_raw_response.create(**BODY, truncation="auto")
        assert ADJUSTED not in fits.headers and fits.parse().truncation == "auto"


# ── compaction and counts ──


@pytest.mark.parametrize("how", ["endpoint", "trigger", "stream"])
async def test_a_compacted_conversation_goes_on_with_its_summary(
    start_gateway: StartGateway, thinking: FakeEngineClient, how: str
) -> None:
    items: list[dict[str, Any]] = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "gone"}]
    async with start_gateway([thinking]) as gateway:
        if how == "endpoint":
            compacted = await gateway.client.responses.compact(model="tiny", input=items, instructions="be brief")
            assert compacted.object == "response.compaction" and compacted.usage.output_tokens == 3
            assert last_prompt(gateway).startswith(
                "<|system|>be brief\n<|user|>go\n<|assistant|>gone\n<|user|>Summarize"
            )
            output = compacted.output
        else:
            asked = BODY | {"input": [*items, {"type": "compaction_trigger"}]}
            if how == "stream":
                events = [event async for event in await gateway.client.responses.create(**asked, stream=True)]
                kinds = [event.type for event in events]
                assert kinds[2:] == ["response.output_item.added", "response.output_item.done", "response.completed"]
                output = events[-1].response.output
            else:
                response = await gateway.client.responses.create(**asked)
                counted = await gateway.client.responses.input_tokens.count(model="tiny", input=asked["input"])
                assert counted.input_tokens == response.usage.input_tokens
                output = response.output
            assert [item.type for item in output] == ["compaction"]
        sent = [item.model_dump(exclude_none=True, warnings=False) for item in output]
        assert "Yes." not in sent[-1]["encrypted_content"]
        await gateway.client.responses.create(**BODY | {"input": [*sent, {"role": "user", "content": "on"}]})
        told = "<|user|>Summary of the conversation so far:\n\nYes.\n<|user|>on\n<|assistant|>"
        assert last_prompt(gateway) == ("<|user|>go\n" if how == "endpoint" else "") + told
        sent[-1]["encrypted_content"] = "x"
        raw = await gateway.client.responses.with_raw_response.create(**BODY | {"input": [*sent, *items]})
        assert raw.headers[IGNORED] == "input.compaction.encrypted_content"


@pytest.mark.parametrize("answer", ["", "<think>So.</think> \n"])
@pytest.mark.parametrize("how", ["endpoint", "trigger", "stream"])
async def test_a_compaction_without_a_summary_has_a_transcript(
    start_gateway: StartGateway, thinking: FakeEngineClient, how: str, answer: str
) -> None:
    items: list[dict[str, Any]] = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "gone"}]
    thinking.script = lambda submit: [(65, answer)] if answer else []
    async with start_gateway([thinking]) as gateway:
        responses = gateway.client.responses
        asked = BODY | {"input": [*items, {"type": "compaction_trigger"}]}
        if how == "stream":
            events = [event async for event in await responses.create(**asked, stream=True)]
            assert events[-1].type == "response.completed"
            output = events[-1].response.output
        else:
            if how == "endpoint":
                raw = await responses.with_raw_response.compact(model="tiny", input=items)
            else:
                raw = await responses.with_raw_response.create(**asked)
            assert raw.headers[ADJUSTED] == "summary=transcript"
            output = raw.parse().output
        sent = [item.model_dump(exclude_none=True, warnings=False) for item in output]
        assert [item["type"] for item in sent] == (["message"] if how == "endpoint" else []) + ["compaction"]
        await responses.create(**BODY | {"input": [sent[-1], {"role": "user", "content": "on"}]})
        told = f"<|user|>Summary of the conversation so far:\n\n{HEAD}user: go\nassistant: gone\n<|user|>on\n"
        assert last_prompt(gateway) == told + "<|assistant|>"


async def test_input_tokens_are_those_that_a_response_is_billed_for(
    start_gateway: StartGateway, thinking: FakeEngineClient
) -> None:
    tools: list[Any] = [{"type": "custom", "name": "write"}, {"type": "web_search"}]
    async with start_gateway([thinking]) as gateway:
        first = await gateway.client.responses.create(**BODY, store=True)
        asked: dict[str, Any] = {"model": "tiny", "input": "why?", "instructions": "be brief", "tools": tools}
        for fields in (asked, asked | {"previous_response_id": first.id}):
            counted = await gateway.client.responses.input_tokens.count(**fields)
            response = await gateway.client.responses.create(**fields)
            assert (counted.object, counted.input_tokens) == ("response.input_tokens", response.usage.input_tokens)
        with pytest.raises(openai.NotFoundError):
            await gateway.client.responses.input_tokens.count(model="gpt-9", input="x")


async def test_an_item_can_be_referred_to_once_only(start_gateway: StartGateway, thinking: FakeEngineClient) -> None:
    async with start_gateway([thinking]) as gateway:
        answer = await gateway.client.responses.create(**BODY, store=True)
        reference: Any = {"type": "item_reference", "id": answer.output[-1].id}
        go_on: Any = {"role": "user", "content": "why?"}
        await gateway.client.responses.create(**BODY | {"input": [reference, go_on]})
        with pytest.raises(openai.BadRequestError, match="more than once"):
            await gateway.client.responses.create(**BODY | {"input": [reference, reference, go_on]})


async def test_beta_resources_of_the_client_work_and_agents_of_openai_are_ignored(gateway: RunningGateway) -> None:
    beta = gateway.client.beta.responses
    items: list[Any] = [
        {"type": "multi_agent_call", "call_id": "a", "action": "spawn_agent", "arguments": "{}"},
        {"type": "multi_agent_call_output", "call_id": "a", "action": "spawn_agent", "output": []},
        {"type": "agent_message", "author": "a", "recipient": "b", "content": []},
        {"role": "user", "content": "hello"},
    ]
    raw = await beta.with_raw_response.create(
        model="tiny", input=items, store=True, multi_agent={"enabled": True}, betas=["responses_multi_agent=v1"]
    )
    ignored = raw.headers[IGNORED].split(", ")
    assert {"multi_agent", "input.agent_message", "input.multi_agent_call"} <= set(ignored)
    answer = raw.parse()
    assert answer.output[0].content[0].text == (await beta.retrieve(answer.id)).output[0].content[0].text
    listed = await beta.input_items.list(answer.id, include=["reasoning.encrypted_content"])
    assert [item.type for item in listed.data] == ["message"]
    counted = await beta.input_tokens.count(model="tiny", input="hello")
    assert counted.input_tokens == answer.usage.input_tokens
    assert (await beta.compact(model="tiny", input="hello")).output
    await beta.delete(answer.id)
    with pytest.raises(openai.NotFoundError):
        await beta.retrieve(answer.id)
