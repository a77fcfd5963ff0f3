"""gpt-oss's Harmony format, as the clients of the three APIs meet it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import msgspec
import openai
import pytest

from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_text.harmony.reader import CONTROL_TOKENS
from moiety_text.tokenizer import Tokenizer
from moiety_wire.grammars import GrammarKind, HarmonyGrammar
from moiety_wire.messages import Submit

from .conftest import RunningGateway, StartGateway, ToolCard, run_reasoning
from .test_tool_loops import ANTHROPIC_TOOLS, OPENAI_TOOLS, ask_anthropic, ask_openai, calls_of, prompt_of

THOUGHT = "<|channel|>analysis<|message|>Hm.\n\nSo.<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
CALL = '<|channel|>commentary to=functions.forecast <|constrain|>json<|message|>{"city": "Basel"}'
ASKED: list[Any] = [{"role": "user", "content": "Is it warm?"}]
SCHEMA = {"type": "object", "properties": {"warm": {"type": "boolean"}}, "required": ["warm"]}
FORM: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
HEADER = "x-moiety-adjusted-fields"

Start = Callable[..., AbstractAsyncContextManager[RunningGateway]]


@pytest.fixture
def harmony(start_gateway: StartGateway, tool_card: ToolCard) -> Start:
    """A gateway with a model of the format, on an engine of ours or on one that follows no grammars."""

    @asynccontextmanager
    async def start(*, is_ours: bool = True) -> AsyncIterator[RunningGateway]:
        card = tool_card("harmony", special=CONTROL_TOKENS)
        async with run_reasoning(start_gateway, card, is_ours=is_ours) as running:
            yield running

    return start


def writes(gateway: RunningGateway, text: str) -> None:
    """A script that writes the text, control tokens as the tokens that they are."""
    tokenizer = Tokenizer.from_json(gateway.engine.card.tokenizer_json)
    names = {one: token.content for one, token in tokenizer.added_tokens.items()}
    pieces = [(one, names.get(one) or tokenizer.decode([one])) for one in tokenizer.encode(text)]
    gateway.engine.script = lambda submit: pieces


def last(gateway: RunningGateway) -> tuple[Submit, str]:
    submit = gateway.engine.submits[-1]
    return submit, prompt_of(submit, gateway.engine)


def grammar_of(submit: Submit) -> HarmonyGrammar:
    assert submit.grammar is not None and submit.grammar.kind is GrammarKind.HARMONY
    return msgspec.json.decode(submit.grammar.text, type=HarmonyGrammar)


@pytest.mark.parametrize("stream", [False, True])
async def test_channels_become_reasoning_and_content_in_every_api(harmony: Start, stream: bool) -> None:
    async with harmony() as gateway:
        writes(gateway, f"{THOUGHT}{FINAL}Yes.")
        choice = await ask_openai(gateway, "harmony", stream=stream, tools=openai.NOT_GIVEN)
        assert (choice.message.content, choice.message.reasoning_content) == ("Yes.", "Hm.\n\nSo.")
        assert choice.finish_reason == "stop"
        message = await ask_anthropic(gateway, "harmony", stream=stream)
        assert [block.type for block in message.content] == ["thinking", "text"]
        assert (message.content[0].thinking, message.content[1].text) == ("Hm.\n\nSo.", "Yes.")
        if stream:
            async with gateway.client.responses.stream(model="harmony", input="Is it warm?") as events:
                async for _ in events:
                    pass
                response = await events.get_final_response()
        else:
            created: Any = await gateway.client.responses.create(model="harmony", input="Is it warm?")
            response = created
        assert [item.type for item in response.output] == ["reasoning", "message"]
        tokenizer = Tokenizer.from_json(gateway.engine.card.tokenizer_json)
        num_tokens = len(tokenizer.encode(THOUGHT)) - len(tokenizer.encode("<|start|>assistant"))
        assert response.usage.output_tokens_details.reasoning_tokens == num_tokens


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_loop_comes_to_its_answer_and_keeps_the_reasoning_meanwhile(harmony: Start, stream: bool) -> None:
    async with harmony() as gateway:
        writes(gateway, THOUGHT + PREAMBLE + CALL)
        choice = await ask_openai(gateway, "harmony", stream=stream)
        assert calls_of(choice.message) == [("forecast", '{"city": "Basel"}')]
        assert (choice.message.content, choice.message.reasoning_content) == ("I look.", "Hm.\n\nSo.")
        assert choice.finish_reason == "tool_calls"
        message = await ask_anthropic(gateway, "harmony", stream=stream)
        assert calls_of(message) == [("forecast", {"city": "Basel"})] and message.stop_reason == "tool_use"
        _, prompt = last(gateway)
        assert "namespace functions {" in prompt and "type forecast = " in prompt
        writes(gateway, f"{FINAL}Yes.")
        told = choice.message.model_dump(exclude_none=True)
        kept = {name: told[name] for name in ("role", "content", "reasoning_content", "tool_calls")}
        result = {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "17 degrees"}
        choice = await ask_openai(gateway, "harmony", stream=stream, messages=[*ASKED, kept, result])
        assert choice.message.content == "Yes."
        _, prompt = last(gateway)
        assert prompt.endswith(
            "<|start|>assistant<|channel|>analysis<|message|>Hm.\n\nSo.\n\nI look.<|end|>"
            '<|start|>assistant to=functions.forecast<|channel|>commentary json<|message|>{"city": "Basel"}<|call|>'
            '<|start|>functions.forecast to=assistant<|channel|>commentary<|message|>"17 degrees"<|end|>'
            "<|start|>assistant"
        )


async def test_answers_stop_at_the_formats_own_tokens_and_stop_strings_act_in_the_final_channel(harmony: Start) -> None:
    async with harmony() as gateway:
        writes(gateway, f"{THOUGHT}{FINAL}Yes.\n\nfinal.")
        choice = await ask_openai(gateway, "harmony", tools=openai.NOT_GIVEN, stop=["\n\n", "analysis"])
        assert (choice.message.content, choice.message.reasoning_content) == ("Yes.", "Hm.\n\nSo.")
        submit, _ = last(gateway)
        tokenizer = Tokenizer.from_json(gateway.engine.card.tokenizer_json)
        ids = {token.content: one for one, token in tokenizer.added_tokens.items()}
        assert submit.stopping.stop_token_ids == (ids["<|call|>"], ids["<|return|>"])
        assert set(submit.shown_ids) == set(submit.marker_ids) == {ids[token] for token in CONTROL_TOKENS}
        await ask_openai(gateway, "harmony", tools=openai.NOT_GIVEN, extra_body={"ignore_eos": True})
        assert last(gateway)[0].stopping.stop_token_ids == ()


async def test_an_answer_that_the_client_has_begun_is_in_the_final_channel(harmony: Start) -> None:
    async with harmony() as gateway:
        writes(gateway, " it is.")
        message = await ask_anthropic(
            gateway, "harmony", messages=[*ASKED, {"role": "assistant", "content": "Yes,"}], stop_sequences=["is"]
        )
        assert [block.text for block in message.content] == [" it "]
        assert last(gateway)[1].endswith(f"<|start|>assistant{FINAL}Yes,")


async def test_a_call_that_must_come_is_demanded_by_the_grammar_after_the_reasoning(harmony: Start) -> None:
    async with harmony() as gateway:
        writes(gateway, THOUGHT + CALL)
        named = {"type": "function", "function": {"name": "forecast"}}
        for choice, names in (("required", ["forecast", "now"]), (named, ["forecast"])):
            answer = await ask_openai(gateway, "harmony", tool_choice=choice)
            assert calls_of(answer.message) == [("forecast", '{"city": "Basel"}')]
            submit, prompt = last(gateway)
            form = grammar_of(submit)
            assert (form.must_call, [tool.name for tool in form.tools]) == (True, names)
            assert prompt.endswith("<|start|>assistant")
        await ask_openai(gateway, "harmony")
        assert last(gateway)[0].grammar is None


async def test_without_grammars_a_call_that_must_come_is_begun_in_the_prompt(harmony: Start) -> None:
    async with harmony(is_ours=False) as gateway:
        writes(gateway, '{"city": "Basel"}')
        named = {"type": "function", "function": {"name": "forecast"}}
        answer = await ask_openai(gateway, "harmony", tool_choice=named)
        assert calls_of(answer.message) == [("forecast", '{"city": "Basel"}')]
        submit, prompt = last(gateway)
        assert submit.grammar is None
        assert prompt.endswith("<|channel|>commentary to=functions.forecast <|constrain|>json<|message|>")
        tools = json.loads(json.dumps(OPENAI_TOOLS))
        tools[0]["function"]["strict"] = True
        with pytest.raises(openai.BadRequestError, match="leave 'strict' out"):
            await ask_openai(gateway, "harmony", tools=tools)


async def test_structured_outputs_and_strict_tools_are_held_within_the_channels(harmony: Start) -> None:
    async with harmony() as gateway:
        writes(gateway, THOUGHT + FINAL + '{"warm": true}')
        choice = await ask_openai(gateway, "harmony", tools=openai.NOT_GIVEN, response_format=FORM)
        assert (choice.message.content, choice.message.reasoning_content) == ('{"warm": true}', "Hm.\n\nSo.")
        form = grammar_of(last(gateway)[0])
        assert form.answer is not None and json.loads(form.answer.text)["properties"] == SCHEMA["properties"]
        assert form.tools == [] and not form.must_call
        tools = json.loads(json.dumps(OPENAI_TOOLS))
        tools[0]["function"]["strict"] = True
        writes(gateway, THOUGHT + CALL)
        await ask_openai(gateway, "harmony", tools=tools)
        form = grammar_of(last(gateway)[0])
        assert form.answer is None and [tool.name for tool in form.tools] == ["forecast", "now"]
        assert json.loads(form.tools[0].schema) == tools[0]["function"]["parameters"]


async def test_efforts_and_budgets_reach_the_model(harmony: Start) -> None:
    async with harmony() as gateway:
        writes(gateway, f"{THOUGHT}{FINAL}Yes.")
        create = gateway.client.chat.completions.with_raw_response.create
        for effort, level in (("low", "low"), ("high", "high"), ("max", "high"), ("minimal", "low"), ("none", "low")):
            answer = await create(model="harmony", messages=ASKED, reasoning_effort=effort)
            assert f"Reasoning: {level}\n" in last(gateway)[1]
            assert answer.headers.get(HEADER) == (None if effort == level else f"reasoning_effort={level}")
        encode = Tokenizer.from_json(gateway.engine.card.tokenizer_json).encode
        plain: dict[str, Any] = {}
        may: dict[str, Any] = {"tools": OPENAI_TOOLS}
        for more, closing in (
            (plain, f"<|end|><|start|>assistant{FINAL}"),
            (may, "<|end|><|start|>assistant"),
            ({**may, "tool_choice": "required"}, "<|end|><|start|>assistant<|channel|>commentary to=functions."),
        ):
            await create(model="harmony", messages=ASKED, **more, extra_body={"thinking_token_budget": 300})
            budget = last(gateway)[0].stopping.thought_budget
            assert budget is not None and budget.max_tokens == 300
            assert budget.closing_ids == tuple(encode(closing))
            assert budget.opener_ids == tuple(encode("<|channel|>analysis<|message|>"))
            assert encode("<|end|>")[0] in budget.closer_ids
            assert budget.reopener_ids == tuple(encode("<|start|>assistant"))
        thinking: Any = {"type": "enabled", "budget_tokens": 1024}
        await gateway.anthropic.messages.create(
            model="harmony", max_tokens=2000, messages=ASKED, tools=ANTHROPIC_TOOLS, thinking=thinking
        )
        budget = last(gateway)[0].stopping.thought_budget
        assert budget is not None and budget.max_tokens == 1024


async def test_an_engine_that_keeps_no_budget_is_named_in_the_header(harmony: Start) -> None:
    async with harmony(is_ours=False) as gateway:
        writes(gateway, f"{THOUGHT}{FINAL}Yes.")
        answer = await gateway.client.chat.completions.with_raw_response.create(
            model="harmony", messages=ASKED, extra_body={"max_thinking_tokens": 300}
        )
        assert answer.headers[HEADER] == "max_thinking_tokens=unlimited"
        assert last(gateway)[0].stopping.thought_budget is None


async def test_an_engine_that_sends_no_control_tokens_gets_chats_without_tools_as_plain_text(
    start_gateway: StartGateway, tool_card: ToolCard
) -> None:
    card = msgspec.structs.replace(tool_card("harmony", special=CONTROL_TOKENS), shows_special_tokens=False)
    async with start_gateway([FakeEngineClient(card)]) as gateway:
        gateway.engine.script = lambda submit: [(65, "analysisHm.assistantfinalYes.")]
        choice = await ask_openai(gateway, "harmony", tools=openai.NOT_GIVEN)
        assert choice.message.content == "analysisHm.assistantfinalYes."
        submit, _ = last(gateway)
        assert (submit.shown_ids, submit.stopping.stop_token_ids) == ((), ())
        gateway.engine.script = lambda submit: [(65, "Yes.")]
        await ask_openai(gateway, "harmony")
        assert last(gateway)[0].shown_ids  # which the engine refuses


async def test_options_of_decisions_are_final_answers(harmony: Start) -> None:
    async with harmony() as gateway:
        question: Any = {"type": "predicate", "instructions": "It is warm."}
        await gateway.client.decisions.create(model="harmony", input="a", questions=[question])
        prompts = [prompt_of(submit, gateway.engine) for submit in gateway.engine.submits]
        assert [prompt.rpartition("<|start|>assistant")[2] for prompt in prompts] == [f"{FINAL}true", f"{FINAL}false"]
