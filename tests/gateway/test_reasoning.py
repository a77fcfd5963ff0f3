"""Reasoning is separate from answers in all three APIs."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import msgspec
import openai
import pytest

from moiety_text.tokenizer import Tokenizer
from moiety_wire.grammars import GrammarKind, GrammarSpec, ReasonedGrammar
from moiety_wire.messages import ModelCard
from moiety_wire.thought_budget import MIN_THOUGHT_BUDGET, ThoughtBudget

from .conftest import RunningGateway, StartGateway, ToolCard, run_reasoning
from .test_tool_loops import OPENAI_TOOLS, hermes, prompt_of

ASKED: list[Any] = [{"role": "user", "content": "Is it warm?"}]
ALWAYS = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content.split('</think>')[-1] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)

Thinking = Callable[..., AbstractAsyncContextManager[RunningGateway]]
MARKERS = ("<think>", "</think>")
HEADER = "x-moiety-adjusted-fields"


@pytest.fixture
def thinking(start_gateway: StartGateway, tool_card: ToolCard, thinking_card: ModelCard) -> Thinking:
    """A gateway with a reasoning model: its template can disable reasoning, or always begins with it."""

    @asynccontextmanager
    async def start(
        *, always: bool = False, template: str = "", is_ours: bool = False
    ) -> AsyncIterator[RunningGateway]:
        template = template or (ALWAYS if always else "")
        card = tool_card("hermes", template=template, added=MARKERS) if template else thinking_card
        async with run_reasoning(start_gateway, card, is_ours=is_ours) as running:
            yield running

    return start


def writes(gateway: RunningGateway, text: str) -> None:
    """Return a script that writes the text, with markers as the tokens that they are."""
    tokenizer = Tokenizer.from_json(gateway.engine.card.tokenizer_json)
    ids = {token.content: one for one, token in tokenizer.added_tokens.items()}
    pieces, rest = [], text
    while rest:
        marker = next((one for one in MARKERS if rest.startswith(one)), rest[0])
        pieces.append((ids.get(marker, 65), marker))
        rest = rest[len(marker) :]
    gateway.engine.script = lambda submit: pieces


async def raw(gateway: RunningGateway, **more: Any) -> Any:
    """A chat's answer with its headers."""
    return await gateway.client.chat.completions.with_raw_response.create(model="hermes", messages=ASKED, **more)


async def chat(gateway: RunningGateway, *, stream: Any, **more: Any) -> tuple[Any, ...]:
    asked: dict[str, Any] = {"model": "hermes", "messages": ASKED, **more}
    if not stream:
        answer = await gateway.client.chat.completions.create(**asked)
        choice = answer.choices[0]
        return choice.message.content, getattr(choice.message, "reasoning_content", None), answer.usage, choice.message
    content, thought, usage = "", "", None
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    async for chunk in await gateway.client.chat.completions.create(**asked, **options):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            content += choice.delta.content or ""
            thought += getattr(choice.delta, "reasoning_content", None) or ""
    return content or None, thought or None, usage, None


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_of_a_chat_is_separate_from_its_content(thinking: Thinking, stream: bool) -> None:
    async with thinking() as gateway:
        writes(gateway, "<think>\nHm, 17.\n</think>\n\nYes.")
        content, thought, usage, _ = await chat(gateway, stream=stream)
        assert (content, thought) == ("Yes.", "Hm, 17.")
        assert usage.completion_tokens_details.reasoning_tokens == len("\nHm, 17.\n") + 2
        assert usage.completion_tokens == len("\nHm, 17.\n\n\nYes.") + 2
        writes(gateway, "Yes.")
        content, thought, usage, _ = await chat(gateway, stream=stream)
        assert (content, thought, usage.completion_tokens_details.reasoning_tokens) == ("Yes.", None, 0)


async def test_reasoning_opened_by_the_prompt_has_no_opening_marker(thinking: Thinking) -> None:
    async with thinking(always=True) as gateway:
        writes(gateway, "Hm.</think>Yes.")
        content, thought, usage, _ = await chat(gateway, stream=False)
        assert (content, thought, usage.completion_tokens_details.reasoning_tokens) == ("Yes.", "Hm.", 4)
        writes(gateway, "Hm, and then")
        assert (await chat(gateway, stream=False))[:2] == (None, "Hm, and then")
        answer = await raw(gateway, reasoning_effort="none")
        assert answer.headers[HEADER] == "reasoning_effort=on"  # its template has no switch
        form: dict[str, Any] = {"type": "json_object"}
        writes(gateway, '{"warm": true}')
        assert (await chat(gateway, stream=False, response_format=form))[:2] == ('{"warm": true}', None)


async def test_a_client_can_have_the_model_not_think(thinking: Thinking) -> None:
    async with thinking() as gateway:
        writes(gateway, "Yes.")
        ways = [{"reasoning_effort": "none"}, {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}]
        for way in ways:
            assert (await chat(gateway, stream=False, **way))[0] == "Yes."
        await gateway.client.responses.create(model="hermes", input="Hi", reasoning={"effort": "none"})
        off: dict[str, Any] = {"type": "disabled"}
        await gateway.anthropic.messages.create(model="hermes", max_tokens=9, messages=ASKED, thinking=off)
        prompts = [prompt_of(submit, gateway.engine) for submit in gateway.engine.submits]
        assert [prompt.endswith("<think>\n\n</think>\n\n") for prompt in prompts] == [True] * 4
        await chat(gateway, stream=False, reasoning_effort="high")
        assert not prompt_of(gateway.engine.submits[-1], gateway.engine).endswith("</think>\n\n")
        with pytest.raises(openai.BadRequestError, match="chat_template_kwargs"):
            await chat(gateway, stream=False, extra_body={"chat_template_kwargs": {"enable_thinking": 1}})


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_come_after_thoughts_and_both_are_sent_back(thinking: Thinking, stream: bool) -> None:
    async with thinking() as gateway:
        writes(gateway, f"<think>\nI need it.\n</think>\n\n{hermes(('now', '{}'))}")
        content, thought, *_, message = await chat(gateway, stream=stream, tools=OPENAI_TOOLS)
        assert (content, thought) == (None, "I need it.")
        if message is not None:
            (call,) = message.tool_calls
            result: dict[str, Any] = {"role": "tool", "tool_call_id": call.id, "content": "noon"}
            turns = [*ASKED, message.model_dump(exclude_none=True), result]
            writes(gateway, "Yes.")
            assert (await chat(gateway, stream=False, messages=turns, tools=OPENAI_TOOLS))[0] == "Yes."


async def test_anthropics_client_gets_a_thinking_block(thinking: Thinking) -> None:
    async with thinking() as gateway:
        writes(gateway, "<think>\nHm.\n</think>\n\nYes.")
        asked: dict[str, Any] = {"model": "hermes", "max_tokens": 2000, "messages": ASKED}
        asked["thinking"] = {"type": "enabled", "budget_tokens": 1024}
        whole = await gateway.anthropic.messages.create(**asked)
        async with gateway.anthropic.messages.stream(**asked) as events:
            kinds = [event.type async for event in events]
            streamed = await events.get_final_message()
        for message in (whole, streamed):
            thought, text = message.content
            assert (thought.type, thought.thinking, text.text) == ("thinking", "Hm.", "Yes.")
        assert "thinking" in kinds
        turns = [*ASKED, {"role": "assistant", "content": whole.content}, {"role": "user", "content": "Sure?"}]
        await gateway.anthropic.messages.create(**{**asked, "messages": turns})


async def test_log_probabilities_of_a_response_are_those_of_the_text_after_the_reasoning(thinking: Thinking) -> None:
    asked: dict[str, Any] = {
        "model": "hermes", "input": "Is it warm?", "include": ["message.output_text.logprobs"], "top_logprobs": 1
    }  # fmt: skip
    async with thinking() as gateway:
        writes(gateway, "<think>\nHm.\n</think>\n\nYes.")
        whole = await gateway.client.responses.create(**asked)
        assert [entry.token for entry in whole.output[-1].content[0].logprobs] == list("Yes.")
        events = [event async for event in await gateway.client.responses.create(**asked, stream=True)]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [[entry.token for entry in event.logprobs] for event in deltas] == [list(event.delta) for event in deltas]


async def test_responses_have_a_reasoning_item(thinking: Thinking) -> None:
    async with thinking() as gateway:
        writes(gateway, "<think>\nHm.\n</think>\n\nYes.")
        whole = await gateway.client.responses.create(model="hermes", input="Is it warm?", store=True)
        async with gateway.client.responses.stream(model="hermes", input="Is it warm?") as events:
            told = [event async for event in events]
            streamed = await events.get_final_response()
        for response in (whole, streamed):
            thought, message = response.output
            assert (thought.type, thought.content[0].text, message.content[0].text) == ("reasoning", "Hm.", "Yes.")
            assert response.usage.output_tokens_details.reasoning_tokens == len("\nHm.\n") + 2
        assert "".join(event.delta for event in told if event.type == "response.reasoning_text.delta") == "Hm."
        again = [{"role": "user", "content": "Hi"}, *[item.model_dump(exclude_none=True) for item in whole.output]]
        await gateway.client.responses.create(model="hermes", input=[*again, {"role": "user", "content": "Sure?"}])
        await gateway.client.responses.create(model="hermes", input="Sure?", previous_response_id=whole.id)


async def test_options_of_reasoning_are_harmless_for_a_model_that_does_not_reason(tool_gateway: RunningGateway) -> None:
    switch = {"chat_template_kwargs": {"enable_thinking": True}}
    for more, told in (
        ({"extra_body": switch}, "chat_template_kwargs=off"),
        ({"reasoning_effort": "max"}, "reasoning_effort=off"),
        ({"reasoning_effort": "none"}, None),
        ({"extra_body": {"thinking_token_budget": 0}}, None),
        ({"extra_body": {"thinking_token_budget": 500}}, None),
    ):
        answer = await raw(tool_gateway, **more)
        assert answer.headers.get(HEADER) == told
    for thinking in ({"type": "adaptive"}, {"type": "enabled", "budget_tokens": 1024}):
        message: Any = await tool_gateway.anthropic.messages.with_raw_response.create(
            model="hermes", max_tokens=2000, messages=ASKED, thinking=thinking
        )
        assert message.headers[HEADER] == "thinking.type=off"
    answer = await tool_gateway.client.responses.with_raw_response.create(
        model="hermes", input="Hi", reasoning={"effort": "max"}
    )
    assert answer.headers[HEADER] == "reasoning.effort=off"


THINKS = "Hm.\n\nSo, 17.\n</think>\n\nYes.\n\nMore."


@pytest.mark.parametrize("always", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_stop_strings_apply_only_after_reasoning(thinking: Thinking, stream: bool, always: bool) -> None:
    async with thinking(always=always) as gateway:
        writes(gateway, THINKS if always else f"<think>\n{THINKS}")
        assert (await chat(gateway, stream=stream, stop=["\n\n"]))[:2] == ("Yes.", "Hm.\n\nSo, 17.")
        assert (await chat(gateway, stream=stream, stop=["17", "es"]))[:2] == ("Y", "Hm.\n\nSo, 17.")
        asked: dict[str, Any] = {"model": "hermes", "max_tokens": 2000, "messages": ASKED, "stop_sequences": ["\n\n"]}
        if stream:
            async with gateway.anthropic.messages.stream(**asked) as events:
                message = await events.get_final_message()
        else:
            message = await gateway.anthropic.messages.create(**asked)
        assert [block.type for block in message.content] == ["thinking", "text"]
        assert (message.content[1].text, message.stop_reason, message.stop_sequence) == (
            "Yes.", "stop_sequence", "\n\n",
        )  # fmt: skip
        writes(gateway, ("" if always else "<think>") + "Hm.\n\nAnd then")  # a thought that never ends
        assert (await chat(gateway, stream=stream, stop=["\n\n"]))[:2] == (None, "Hm.\n\nAnd then")


async def test_stop_strings_apply_at_once_without_reasoning(thinking: Thinking) -> None:
    async with thinking() as gateway:
        writes(gateway, "One.\n\nTwo.")
        assert (await chat(gateway, stream=False, stop=["\n\n"]))[:2] == ("One.", None)
        writes(gateway, "<think>One.\n\nTwo.</think>")
        answer = await gateway.client.completions.create(model="hermes", prompt="a", max_tokens=50, stop=["\n\n"])
        assert answer.choices[0].text == "<think>One."


TURNS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}{{ note or '' }}"
DEEPSEEK = (
    "{% if not thinking is defined %}{% set thinking = false %}{% endif %}" + TURNS + "{% if add_generation_prompt %}"
    "<|assistant|>{% if thinking %}<think>{% else %}</think>{% endif %}{% endif %}"
)


async def test_a_template_whose_switch_is_off_by_default_is_switched_on_in_every_api(thinking: Thinking) -> None:
    async with thinking(template=DEEPSEEK) as gateway:
        writes(gateway, "Yes.")

        def opened() -> Any:
            return prompt_of(gateway.engine.submits[-1], gateway.engine).endswith("<|assistant|><think>")

        assert (await chat(gateway, stream=False))[:2] == ("Yes.", None)
        assert prompt_of(gateway.engine.submits[-1], gateway.engine).endswith("<|assistant|></think>")
        writes(gateway, "Hm.</think>Yes.")
        for kwargs in ({"thinking": True}, {"enable_thinking": True}):
            answer = await chat(gateway, stream=False, extra_body={"chat_template_kwargs": kwargs})
            assert (opened(), answer[:2]) == (True, ("Yes.", "Hm."))
        assert (await chat(gateway, stream=True, reasoning_effort="high"))[:2] == ("Yes.", "Hm.") and opened()
        response = await gateway.client.responses.create(model="hermes", input="Hi", reasoning={"effort": "low"})
        assert opened() and [item.type for item in response.output] == ["reasoning", "message"]
        asked: dict[str, Any] = {"model": "hermes", "max_tokens": 2000, "messages": ASKED}
        for option in ({"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}):
            message = await gateway.anthropic.messages.create(**asked, thinking=option)
            assert opened() and [block.type for block in message.content] == ["thinking", "text"]
        writes(gateway, "Yes.")
        for off in ({"thinking": False}, {"enable_thinking": False}):
            await chat(gateway, stream=False, reasoning_effort="high", extra_body={"chat_template_kwargs": off})
            assert not opened()
        await chat(gateway, stream=False, reasoning_effort="none")
        assert not opened()
        await gateway.anthropic.messages.create(**asked, thinking={"type": "disabled"})
        assert not opened()


async def test_options_of_a_template_are_those_that_it_reads(thinking: Thinking) -> None:
    async with thinking(template=DEEPSEEK) as gateway:
        writes(gateway, "Yes.")
        await chat(gateway, stream=False, extra_body={"chat_template_kwargs": {"note": "Be kind. "}})
        assert "Be kind. <|assistant|>" in prompt_of(gateway.engine.submits[-1], gateway.engine)
        num_submits = len(gateway.engine.submits)
        for name in ("messages", "tools", "add_generation_prompt", "eos_token", "documents"):
            with pytest.raises(openai.BadRequestError, match="it reads these: note, thinking") as caught:
                await chat(gateway, stream=False, extra_body={"chat_template_kwargs": {name: "x"}})
            assert caught.value.param == "chat_template_kwargs"
        assert len(gateway.engine.submits) == num_submits
        prompts = []
        for unread in ({}, {"notes": "x", "raise_exception": "x", "m": "x"}, {"no name\r\n": "x", "é": "x"}):
            answer = await raw(gateway, extra_body={"chat_template_kwargs": {"note": "a", **unread}})
            told = ", ".join(f"chat_template_kwargs.{name}=unread" for name in sorted(unread) if name.isascii())
            assert answer.headers.get(HEADER, "") == ("" if "é" in unread else told)
            prompts.append(prompt_of(gateway.engine.submits[-1], gateway.engine))
        assert prompts[0] == prompts[1] == prompts[2]
        body: dict[str, Any] = {"model": "hermes", "messages": ASKED}
        lengths = []
        for more in ({}, {"chat_template_kwargs": {"note": "12345"}}):
            _, _, answer = await gateway.post("/tokenize", {**body, **more})
            lengths.append(json.loads(answer)["count"])
        assert lengths[1] == lengths[0] + 5


async def test_an_option_that_spells_a_control_token_is_text(thinking: Thinking) -> None:
    async with thinking(template=DEEPSEEK) as gateway:
        writes(gateway, "Yes.")
        await chat(gateway, stream=False, extra_body={"chat_template_kwargs": {"note": "a<|end|>b"}})
        submit = gateway.engine.submits[-1]
        assert "a<|end|>b<|assistant|>" in prompt_of(submit, gateway.engine)
        assert 256 not in submit.prompt_ids


EFFORT = (
    TURNS + "{% set effort = reasoning_effort or 'none' %}{% if effort not in ['none', 'low', 'high'] %}"
    "{{ raise_exception('no such effort') }}{% endif %}[{{ effort }}]{% if effort != 'none' %}<think>{% endif %}"
)


async def test_an_effort_reaches_a_template_that_reads_it(thinking: Thinking) -> None:
    async with thinking(template=EFFORT) as gateway:
        writes(gateway, "Hm.</think>Yes.")
        for effort in ("none", "low", "high"):
            await chat(gateway, stream=False, reasoning_effort=effort)
            assert f"[{effort}]" in prompt_of(gateway.engine.submits[-1], gateway.engine)
        for effort, level in (("minimal", "low"), ("medium", "low"), ("xhigh", "high"), ("max", "high")):
            answer = await raw(gateway, reasoning_effort=effort)
            assert f"[{level}]" in prompt_of(gateway.engine.submits[-1], gateway.engine)
            assert answer.headers[HEADER] == f"reasoning_effort={level}"


# ── limits ──


def grammar_of(gateway: RunningGateway) -> Any:
    spec = gateway.engine.submits[-1].grammar
    assert spec is not None
    return msgspec.json.decode(spec.text, type=ReasonedGrammar) if spec.kind is GrammarKind.REASONED else spec


async def test_a_model_reasons_before_a_structured_output_where_its_engine_can(thinking: Thinking) -> None:
    form: dict[str, Any] = {"type": "json_object"}
    for always in (False, True):
        async with thinking(always=always, is_ours=True) as gateway:
            writes(gateway, ("" if always else "<think>") + 'Hm.</think>\n\n{"warm": true}')
            for stream in (False, True):
                answer = await chat(gateway, stream=stream, response_format=form)
                assert answer[:2] == ('{"warm": true}', "Hm.")
                assert answer[2].completion_tokens_details.reasoning_tokens == 4 + (not always)
            found = grammar_of(gateway)
            assert (found.opener, found.closer, found.is_open) == (*MARKERS, always)
            assert found.answer == GrammarSpec(GrammarKind.JSON_OBJECT)
            assert found.special.keys() == set(MARKERS)
            if not always:
                writes(gateway, '{"warm": true}')
                await chat(gateway, stream=False, response_format=form, reasoning_effort="none")
                assert grammar_of(gateway) == GrammarSpec(GrammarKind.JSON_OBJECT)
    async with thinking() as gateway:
        writes(gateway, '{"warm": true}')
        await chat(gateway, stream=False, response_format=form)
        assert grammar_of(gateway) == GrammarSpec(GrammarKind.JSON_OBJECT)


async def test_a_budget_ends_the_reasoning_by_the_templates_own_text(thinking: Thinking) -> None:
    for always in (False, True):
        async with thinking(always=always, is_ours=True) as gateway:
            tokenizer = Tokenizer.from_json(gateway.engine.card.tokenizer_json)
            opener_id, closer_id = (tokenizer.encode(marker)[0] for marker in MARKERS)
            writes(gateway, "Hm.</think>Yes.")
            closing = "</think>" if always else "\n</think>\n\n"
            for name in ("thinking_token_budget", "max_thinking_tokens"):
                answer = await raw(gateway, extra_body={name: 700})
                assert HEADER not in answer.headers
                budget = gateway.engine.submits[-1].stopping.thought_budget
                openers = () if always else (opener_id,)
                spaces = () if always else tuple(sorted(tokenizer.encode(one)[0] for one in " \n\r\t"))
                assert budget == ThoughtBudget(700, openers, (closer_id,), tuple(tokenizer.encode(closing)), spaces)
            answer = await raw(gateway, extra_body={"thinking_token_budget": 1})
            assert answer.headers[HEADER] == f"thinking_token_budget={MIN_THOUGHT_BUDGET}"
            budget = gateway.engine.submits[-1].stopping.thought_budget
            assert budget is not None and budget.max_tokens == MIN_THOUGHT_BUDGET
            asked: dict[str, Any] = {"model": "hermes", "max_tokens": 2000, "messages": ASKED}
            enabled: Any = {"type": "enabled", "budget_tokens": 1024}
            await gateway.anthropic.messages.create(**asked, thinking=enabled)
            budget = gateway.engine.submits[-1].stopping.thought_budget
            assert budget is not None and budget.max_tokens == 1024
            answer = await raw(gateway, extra_body={"thinking_token_budget": 0})
            if always:  # without a switch the reasoning is as short as it can be
                assert answer.headers[HEADER] == f"thinking_token_budget={MIN_THOUGHT_BUDGET}"
            else:
                assert prompt_of(gateway.engine.submits[-1], gateway.engine).endswith("</think>\n\n")


@pytest.mark.parametrize("field", ["thinking_token_budget", "max_thinking_tokens"])
async def test_a_budget_that_is_no_number_of_tokens_is_refused(tool_gateway: RunningGateway, field: str) -> None:
    for value in (-1, 2**31, "many", 1.5):
        with pytest.raises(openai.BadRequestError, match=field):
            await raw(tool_gateway, extra_body={field: value})
