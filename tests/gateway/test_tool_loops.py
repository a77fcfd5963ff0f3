"""Tool loops of the real `openai` and `anthropic` packages against a gateway on loopback, a model of each family."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pydantic
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_text.tokenizer import Tokenizer
from moiety_wire.messages import Submit

from .conftest import RunningGateway

ASKED: list[Any] = [{"role": "user", "content": "How warm is it?"}]
FORECAST = '{"city": "Zürich \\"ZH\\"", "days": [1, 2]}'
BOTH = [("forecast", FORECAST), ("now", "{}")]
RESULTS = {"forecast": "17 degrees", "now": "noon"}
FUNCTIONS = {
    "forecast": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "array"}}},
    "now": {"type": "object", "properties": {}},
}
OPENAI_TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"Tells {name}", "parameters": schema}}
    for name, schema in FUNCTIONS.items()
]
ANTHROPIC_TOOLS = [
    {"name": name, "description": f"Tells {name}", "input_schema": schema} for name, schema in FUNCTIONS.items()
]


def hermes(*calls: Any) -> Any:
    return "\n".join(f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>' for name, text in calls)


def llama(*calls: Any) -> Any:
    return "; ".join(f'{{"name": "{name}", "parameters": {text}}}' for name, text in calls)


def mistral(*calls: Any) -> str:
    return "[TOOL_CALLS] [" + ", ".join(f'{{"name": "{name}", "arguments": {text}}}' for name, text in calls) + "]"


WRITERS = {"hermes": hermes, "llama": llama, "mistral": mistral}


def prompt_of(submit: Submit, engine: FakeEngineClient) -> str:
    return Tokenizer.from_json(engine.card.tokenizer_json).decode(submit.prompt_ids, skip_special_tokens=False)


def says(*answers: Any, sizes: tuple[int, ...] = (1,)) -> Any:
    """A script: an answer a request, the last one for all after it, in pieces of so many characters in turn."""
    left = list(answers)

    def script(submit: Submit) -> Any:
        text, at, pieces = left[0] if len(left) == 1 else left.pop(0), 0, list[tuple[int, str]]()
        while at < len(text):
            size = sizes[len(pieces) % len(sizes)]
            pieces.append((65, text[at : at + size]))
            at += size
        return pieces

    return script


async def ask_openai(gateway: RunningGateway, family: str = "hermes", *, stream: bool = False, **asked: Any) -> Any:
    """Return the first choice, streamed or not."""
    body: dict[str, Any] = {"model": family, "messages": ASKED, "tools": OPENAI_TOOLS, **asked}
    if not stream:
        return (await gateway.client.chat.completions.create(**body)).choices[0]
    async with gateway.client.chat.completions.stream(**body) as events:
        try:
            return (await events.get_final_completion()).choices[0]
        except openai.LengthFinishReasonError as exc:  # the client does not parse an answer that a limit has truncated
            return exc.completion.choices[0]


async def ask_anthropic(gateway: RunningGateway, family: str = "hermes", *, stream: bool = False, **asked: Any) -> Any:
    body: dict[str, Any] = {"model": family, "max_tokens": 500, "messages": ASKED, "tools": ANTHROPIC_TOOLS, **asked}
    if not stream:
        return await gateway.anthropic.messages.create(**body)
    async with gateway.anthropic.messages.stream(**body) as events:
        return await events.get_final_message()


def calls_of(message: Any) -> Any:
    """(name, arguments) of each call in either API's message; Anthropic's arguments as the client has parsed them."""
    if hasattr(message, "tool_calls"):
        return [(call.function.name, call.function.arguments) for call in message.tool_calls or []]
    return [(block.name, block.input) for block in message.content if block.type == "tool_use"]


def parsed(calls: Any) -> Any:
    return [(name, json.loads(arguments)) for name, arguments in calls]


# ── loops ──


@pytest.mark.parametrize("stream", [False, True])
async def test_openais_tool_loop_comes_to_its_answer(tool_gateway: RunningGateway, stream: bool) -> None:
    for family, write in WRITERS.items():
        engine = tool_gateway.of[family]
        spoken = "" if family == "llama" else "Let me see.\n"
        engine.script = says(spoken + write(*BOTH), "17 degrees.")
        choice = await ask_openai(tool_gateway, family, stream=stream)
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", spoken.strip() or None)
        calls = choice.message.tool_calls
        assert calls_of(choice.message) == BOTH
        assert {call.type for call in calls} == {"function"} and len({call.id for call in calls}) == 2
        results = [{"role": "tool", "tool_call_id": call.id, "content": RESULTS[call.function.name]} for call in calls]
        turns = [*ASKED, choice.message.model_dump(exclude_none=True), *results]
        final = await ask_openai(tool_gateway, family, messages=turns, stream=stream)
        assert (final.message.content, final.finish_reason) == ("17 degrees.", "stop")
        assert not final.message.tool_calls
        asked, answered = (prompt_of(submit, engine) for submit in engine.submits)
        assert '"parameters": {"type": "object", "properties": {"city"' in asked
        assert answered.startswith(asked.removesuffix("<|assistant|>"))
        assert FORECAST in answered and 0 < answered.index("17 degrees") < answered.index("noon")


@pytest.mark.parametrize("stream", [False, True])
async def test_anthropics_tool_runner_comes_to_its_answer(tool_gateway: RunningGateway, stream: bool) -> None:
    called = []

    @anthropic.beta_async_tool
    async def forecast(city: str, days: list[int]) -> str:
        called.append((city, days))
        return RESULTS["forecast"]

    @anthropic.beta_async_tool
    async def now() -> str:
        raise ValueError("the clock stands still")

    for family, write in WRITERS.items():
        engine = tool_gateway.of[family]
        engine.script = says(write(*BOTH), "17 degrees.")
        runner = tool_gateway.anthropic.beta.messages.tool_runner(
            model=family, max_tokens=500, messages=ASKED, tools=[forecast, now], stream=stream
        )
        final = await runner.until_done()
        assert called.pop() == ('Zürich "ZH"', [1, 2])
        assert [(block.type, block.text) for block in final.content] == [("text", "17 degrees.")]
        assert final.stop_reason == "end_turn"
        answered = prompt_of(engine.submits[1], engine)
        assert "17 degrees" in answered and "Error: " in answered and "the clock stands still" in answered
    rows = await tool_gateway.rows.wait_for(9)
    assert [(row.outcome, row.error_code) for row in rows[:3]] == [
        ("rejected", "thread_unsupported_request"),  # upon which the client sends whole conversations
        ("stop", None),
        ("stop", None),
    ]


async def test_arguments_are_parsed_into_the_clients_own_model(tool_gateway: RunningGateway) -> None:
    class Forecast(pydantic.BaseModel):
        city: str
        days: list[int]

    tool_gateway.of["hermes"].script = says(hermes(("Forecast", FORECAST)))
    completion = await tool_gateway.client.chat.completions.parse(
        model="hermes", messages=ASKED, tools=[openai.pydantic_function_tool(Forecast)]
    )
    (call,) = completion.choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == Forecast(city='Zürich "ZH"', days=[1, 2])


# ── streams ──


async def test_messages_tell_their_calls_in_blocks_and_events(tool_gateway: RunningGateway) -> None:
    engine = tool_gateway.of["hermes"]
    engine.script = says(f"Let me see.\n{hermes(BOTH[0])}")
    asked: dict[str, Any] = {"model": "hermes", "max_tokens": 500, "messages": ASKED, "tools": ANTHROPIC_TOOLS}
    whole = await tool_gateway.anthropic.messages.create(**asked)
    async with tool_gateway.anthropic.messages.stream(**asked) as stream:
        kinds = [event.type async for event in stream if event.type not in ("text", "input_json")]
        streamed = await stream.get_final_message()
    for message in (whole, streamed):
        spoken, use = message.content
        assert (spoken.type, spoken.text) == ("text", "Let me see.")
        assert (use.type, use.name, use.input) == ("tool_use", "forecast", json.loads(FORECAST))
        assert use.id.startswith("toolu_")
        assert message.stop_reason == "tool_use"
    delta = "content_block_delta"
    assert [kind for at, kind in enumerate(kinds) if kind != delta or kinds[at - 1] != delta] == [
        *("message_start", "content_block_start", delta, "content_block_stop"),
        *("content_block_start", delta, "content_block_stop", "message_delta", "message_stop"),
    ]
    counted = await tool_gateway.anthropic.messages.count_tokens(model="hermes", messages=ASKED, tools=ANTHROPIC_TOOLS)
    assert counted.input_tokens == whole.usage.input_tokens == len(engine.submits[0].prompt_ids)


async def test_a_streamed_call_comes_whole_and_no_marker_is_seen(tool_gateway: RunningGateway) -> None:
    tool_gateway.of["hermes"].script = says(f"A <b>.\n{hermes(*BOTH)}\n", sizes=[2])
    stream = await tool_gateway.client.chat.completions.create(
        model="hermes", messages=ASKED, tools=OPENAI_TOOLS, stream=True
    )
    deltas = [chunk.choices[0].delta async for chunk in stream]
    assert "".join(delta.content or "" for delta in deltas) == "A <b>."
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert [(call.index, call.function.name) for call in calls if call.id] == [(0, "forecast"), (1, "now")]
    arguments = [call.function.arguments for call in calls if call.index == 0]
    assert "".join(arguments) == FORECAST


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    family=st.sampled_from(sorted(WRITERS)),
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=50),
    stream=st.booleans(),
)
async def test_calls_are_the_same_however_the_engine_cuts_its_text(
    tool_gateway: RunningGateway, family: Any, sizes: Any, stream: Any
) -> None:
    tool_gateway.of[family].script = says(f"{WRITERS[family](*BOTH)}\n", sizes=sizes)
    choice = await ask_openai(tool_gateway, family, n=2, stream=stream)
    assert (choice.finish_reason, choice.message.content, calls_of(choice.message)) == ("tool_calls", None, BOTH)
    message = await ask_anthropic(tool_gateway, family, stream=stream)
    assert (message.stop_reason, len(message.content), calls_of(message)) == ("tool_use", 2, parsed(BOTH))


async def test_answers_with_calls_have_logprobs_of_every_token(tool_gateway: RunningGateway) -> None:
    text = f"A.{hermes(*BOTH)}"
    tool_gateway.of["hermes"].script = says(text)
    whole = await ask_openai(tool_gateway, logprobs=True)
    stream = await tool_gateway.client.chat.completions.create(
        model="hermes", messages=ASKED, tools=OPENAI_TOOLS, logprobs=True, stream=True
    )
    told = [chunk.choices[0].logprobs.content async for chunk in stream if chunk.choices[0].logprobs]
    for lists in ([whole.logprobs.content], told):
        assert "".join(entry.token for entries in lists for entry in entries) == text


# ── choices ──

NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
FORCED = [
    # the family, the choice; how the prompt ends, what the model writes after it, and the calls
    ("hermes", NOW, '<tool_call>\n{"name": "now", "arguments":', " {}}\n</tool_call>", BOTH[1:]),
    ("hermes", "required", '<tool_call>\n{"name": "', 'now", "arguments": {}}\n</tool_call>', BOTH[1:]),
    ("hermes", NOW, '"arguments":', f" {{}}}}\n</tool_call>\n{hermes(*BOTH)}", BOTH[1:]),  # one, exactly
    ("llama", NOW, '{"name": "now", "parameters":', " {}}", BOTH[1:]),
    ("llama", "required", '{"name": "', f'forecast", "parameters": {FORECAST}}}', BOTH[:1]),
    ("mistral", NOW, '[TOOL_CALLS] [{"name": "now", "arguments":', " {}}]", BOTH[1:]),
    ("mistral", "required", '[TOOL_CALLS] [{"name": "', 'now", "arguments": {}}]', BOTH[1:]),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_must_call_is_begun_so(tool_gateway: RunningGateway, stream: bool) -> None:
    for family, choice, ending, text, calls in FORCED:
        engine = tool_gateway.of[family]
        engine.script = says(text)
        answer = await ask_openai(tool_gateway, family, tool_choice=choice, stream=stream)
        assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
        assert calls_of(answer.message) == calls
        theirs = {"type": "any"} if choice == "required" else {"type": "tool", "name": "now"}
        message = await ask_anthropic(tool_gateway, family, tool_choice=theirs, stream=stream)
        assert (message.stop_reason, calls_of(message)) == ("tool_use", parsed(calls))
        first, second = (prompt_of(submit, engine) for submit in engine.submits[-2:])
        assert first.endswith(ending) and first == second
        assert message.usage.input_tokens == len(engine.submits[-1].prompt_ids)


async def test_one_call_at_most_where_parallel_calls_are_not_wanted(tool_gateway: RunningGateway) -> None:
    tool_gateway.of["hermes"].script = says(hermes(*BOTH))
    one: dict[str, Any] = {"type": "auto", "disable_parallel_tool_use": True}
    for stream in (False, True):
        choice = await ask_openai(tool_gateway, parallel_tool_calls=False, stream=stream)
        assert calls_of(choice.message) == BOTH[:1]
        assert calls_of(await ask_anthropic(tool_gateway, tool_choice=one, stream=stream)) == parsed(BOTH[:1])


async def test_tools_that_must_not_be_called_are_not_in_the_prompt(tool_gateway: RunningGateway) -> None:
    engine, text = tool_gateway.of["hermes"], hermes(*BOTH)
    engine.script = says(text)
    choice = await ask_openai(tool_gateway, tool_choice="none")
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (text, None, "stop")
    message = await ask_anthropic(tool_gateway, tool_choice={"type": "none"})
    assert (message.content[0].text, message.stop_reason) == (text, "end_turn")
    assert not any("forecast" in prompt_of(submit, engine) for submit in engine.submits)


# ── what is no call ──


async def test_malformed_calls_and_calls_of_unknown_tools_are_content(tool_gateway: RunningGateway) -> None:
    for text in (
        hermes(("forecast", '{"city": }')),
        hermes(("hack", "{}")),
        "<tool_call>\nforecast()\n</tool_call>",
        f"{hermes(('now', '[]'))} and so on",
    ):
        tool_gateway.of["hermes"].script = says(text)
        choice = await ask_openai(tool_gateway)
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (text, None, "stop")
        message = await ask_anthropic(tool_gateway)
        assert [(block.type, block.text) for block in message.content] == [("text", text)]
        assert message.stop_reason == "end_turn"


async def test_a_call_that_the_limit_cuts_is_content(tool_gateway: RunningGateway) -> None:
    text = hermes(BOTH[0])
    tool_gateway.of["hermes"].script = says(text)
    for stream in (False, True):
        choice = await ask_openai(tool_gateway, max_tokens=60, stream=stream)
        assert (choice.message.content, choice.message.tool_calls) == (text[:60], None)
        assert choice.finish_reason == "length"
        message = await ask_anthropic(tool_gateway, max_tokens=60, stream=stream)
        assert [(block.type, block.text) for block in message.content] == [("text", text[:60])]
        assert message.stop_reason == "max_tokens"
