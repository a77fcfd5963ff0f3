"""Tools in responses, with the real `openai` package: offered, called in events and in the whole answer, and
answered."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec
import openai
import pytest
import tokenizers

from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_wire.messages import ModelCard

from .conftest import RunningGateway, StartGateway

PATH = "/v1/responses"
ADD: dict[str, Any] = {
    "type": "function",
    "name": "add",
    "description": "adds",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    "strict": True,
}
NOW = {"type": "function", "name": "now"}
BODY: dict[str, Any] = {"model": "tiny", "input": "17 + 25?", "max_output_tokens": 100}
LOGPROBS = "message.output_text.logprobs"

TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool.function.name }} {% endfor %}</tools>{% endif %}"
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CALLS = (
    "Let me ", "see.", "\n<tool", "_call>", '{"name": "add", "argu', 'ments": {"a": 17', ', "b": 25}', "}</tool_call>",
    '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
)  # fmt: skip
ADDED = [{"type": "function_call_output", "call_id": "call_1", "output": "42"}]
CALLED = [
    {"role": "user", "content": "17 + 25?"},
    {"type": "function_call", "call_id": "call_1", "name": "add", "arguments": '{"a": 17, "b": 25}'},
]


@pytest.fixture
def start_calling(
    start_gateway: StartGateway, card: ModelCard
) -> Callable[..., AbstractAsyncContextManager[RunningGateway]]:
    """`async with start_calling(*pieces) as gateway`: its model knows tools, and says that, whatever it is asked."""
    knowing = msgspec.structs.replace(card, chat_template=TEMPLATE)
    return lambda *pieces, **more: start_gateway(
        [FakeEngineClient(knowing, lambda submit: [(65, piece) for piece in pieces])], **more
    )


def last_prompt(gateway: RunningGateway) -> str:
    tokenizer = tokenizers.Tokenizer.from_str(gateway.engine.card.tokenizer_json)
    return tokenizer.decode(gateway.engine.submits[-1].prompt_ids)


async def test_an_answer_that_calls_has_an_item_for_each_call(
    start_calling: Callable[..., AbstractAsyncContextManager[RunningGateway]],
) -> None:
    async with start_calling(*CALLS) as gateway:
        response = await gateway.client.responses.create(**BODY, tools=[ADD, NOW], parallel_tool_calls=True)
        message, add, now = response.output
        assert (response.status, response.output_text) == ("completed", "Let me see.")
        assert (add.type, add.name, json.loads(add.arguments)) == ("function_call", "add", {"a": 17, "b": 25})
        assert (now.name, now.arguments, now.status) == ("now", "{}", "completed")
        assert add.id.startswith("fc_") and add.call_id.startswith("call_") and add.call_id != now.call_id
        assert message.id.startswith("msg_")
        assert last_prompt(gateway) == "<tools>add now </tools><|user|>17 + 25?\n<|assistant|>"
        assert [tool.name for tool in response.tools] == ["add", "now"]
        assert (response.tools[0].strict, response.tool_choice, response.parallel_tool_calls) == (True, "auto", True)


async def test_a_streamed_call_comes_in_events_of_its_own(
    start_calling: Callable[..., AbstractAsyncContextManager[RunningGateway]],
) -> None:
    async with start_calling(*CALLS) as gateway:
        stream = await gateway.client.responses.create(**BODY, tools=[ADD, NOW], stream=True)
        events = [event async for event in stream]
        of_text = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]
        arguments = "response.function_call_arguments"
        kinds = [event.type for event in events]
        assert kinds[:6] == [
            "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
            *["response.output_text.delta"] * 2,
        ]  # fmt: skip
        assert kinds[6:9] == of_text
        rest = [kind for kind in kinds[9:] if kind != f"{arguments}.delta"]
        of_call = ["response.output_item.added", f"{arguments}.done", "response.output_item.done"]
        assert rest == [*of_call, *of_call, "response.completed"]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        added = [event for event in events if event.type == "response.output_item.added"]
        assert [(event.output_index, event.item.type) for event in added] == [
            (0, "message"), (1, "function_call"), (2, "function_call"),
        ]  # fmt: skip
        assert (added[1].item.name, added[1].item.arguments, added[1].item.status) == ("add", "", "in_progress")
        deltas: list[Any] = [
            event for event in events if event.type == f"{arguments}.delta" and event.output_index == 1
        ]
        (done,) = [event for event in events if event.type == f"{arguments}.done" and event.output_index == 1]
        assert "".join(event.delta for event in deltas) == done.arguments == '{"a": 17, "b": 25}'
        assert {event.item_id for event in (*deltas, done)} == {added[1].item.id}
        ended = [event.item for event in events if event.type == "response.output_item.done"]
        assert ended == events[-1].response.output


async def test_the_clients_own_accumulation_finds_the_calls(
    start_calling: Callable[..., AbstractAsyncContextManager[RunningGateway]],
) -> None:
    async with start_calling(*CALLS) as gateway:
        async with gateway.client.responses.stream(**BODY, tools=[ADD, NOW]) as stream:
            final = await stream.get_final_response()
        assert [item.type for item in final.output] == ["message", "function_call", "function_call"]
        assert final.output[1].parsed_arguments == {"a": 17, "b": 25}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_is_cut_is_the_text_of_an_incomplete_message(
    start_calling: Callable[..., AbstractAsyncContextManager[RunningGateway]], stream: bool
) -> None:
    async with start_calling(*CALLS) as gateway:
        asked: dict[str, Any] = {**BODY, "max_output_tokens": 6, "tools": [ADD]}
        if stream:
            events = [event async for event in await gateway.client.responses.create(**asked, stream=True)]
            response = events[-1].response
        else:
            response = await gateway.client.responses.create(**asked)
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        (message,) = response.output
        assert (message.type, message.status) == ("message", "incomplete")
        assert response.output_text.endswith('{"a": 17')


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_are_of_the_text_and_not_of_the_calls(
    start_calling: Callable[..., AbstractAsyncContextManager[RunningGateway]], stream: bool
) -> None:
    async with start_calling(*CALLS, " So.") as gateway:
        asked: dict[str, Any] = {**BODY, "tools": [ADD, NOW], "include": [LOGPROBS]}
        if stream:
            events = [event async for event in await gateway.client.responses.create(**asked, stream=True)]
            response = events[-1].response
            deltas = [event for event in events if event.type == "response.output_text.delta"]
            told = [entry.token for event in deltas for entry in event.logprobs]
            assert told == ["Let me ", "see.", " So."]
        else:
            response = await gateway.client.responses.create(**asked)
        first, *_, last = response.output
        assert [entry.token for entry in first.content[0].logprobs] == ["Let me ", "see."]
        assert [entry.token for entry in last.content[0].logprobs] == [" So."]


async def test_results_reach_the_chat_template_after_their_calls(
    start_calling: Callable[..., AbstractAsyncContextManager[RunningGateway]],
) -> None:
    async with start_calling("42.") as gateway:
        output = [{"type": "input_text", "text": "4"}, {"type": "input_text", "text": "2"}]
        items = [
            CALLED[0],
            {"type": "message", "role": "assistant", "content": "Let me see."},
            CALLED[1],
            {"type": "function_call", "call_id": "call_2", "name": "now", "arguments": ""},
            {**ADDED[0], "output": output},
            {"type": "function_call_output", "call_id": "call_2", "output": "noon"},
        ]
        response = await gateway.client.responses.create(**BODY | {"input": items}, tools=[ADD])
        assert response.output_text == "42."
        assert last_prompt(gateway).removeprefix("<tools>add </tools>") == (
            "<|user|>17 + 25?\n<|assistant|>Let me see."
            '<tool_call>{"name": "add", "arguments": {"a": 17, "b": 25}}</tool_call>'
            '<tool_call>{"name": "now", "arguments": {}}</tool_call>\n<|tool|>4\n2\n<|tool|>noon\n<|assistant|>'
        )


async def test_an_answers_own_output_may_be_sent_back(
    start_calling: Callable[..., AbstractAsyncContextManager[RunningGateway]],
) -> None:
    async with start_calling(*CALLS) as gateway:
        response = await gateway.client.responses.create(**BODY, tools=[ADD, NOW])
        results = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "x"}
            for item in response.output
            if item.type == "function_call"
        ]
        again = [CALLED[0], *response.output, *results]
        assert (await gateway.client.responses.create(**BODY | {"input": again}, tools=[ADD])).status == "completed"


async def test_a_kept_call_is_continued_by_its_result(
    start_calling: Callable[..., AbstractAsyncContextManager[RunningGateway]],
) -> None:
    async with start_calling(*CALLS) as gateway:
        first = await gateway.client.responses.create(**BODY, tools=[ADD, NOW], store=True)
        calls = [item for item in first.output if item.type == "function_call"]
        results = [{"type": "function_call_output", "call_id": call.call_id, "output": call.name} for call in calls]
        second = await gateway.client.responses.create(
            **BODY | {"input": results}, previous_response_id=first.id, store=True
        )
        assert last_prompt(gateway).endswith("</tool_call>\n<|tool|>add\n<|tool|>now\n<|assistant|>")
        listed = [item async for item in gateway.client.responses.input_items.list(second.id, order="asc")]
        assert [item.type for item in listed] == ["message", "message", *["function_call"] * 2, *[ADDED[0]["type"]] * 2]
        assert [item.id for item in listed[1:4]] == [item.id for item in first.output]
        with pytest.raises(openai.BadRequestError, match="there is no result of the call") as caught:
            await gateway.client.responses.create(**BODY, previous_response_id=first.id)
        assert caught.value.param == "input"


async def test_a_kept_call_that_broke_off_needs_no_result(
    start_calling: Callable[..., AbstractAsyncContextManager[RunningGateway]],
) -> None:
    async with start_calling(*CALLS) as gateway:
        first = await gateway.client.responses.create(**BODY | {"max_output_tokens": 6}, tools=[ADD], store=True)
        await gateway.client.responses.create(**BODY | {"input": "go on"}, previous_response_id=first.id)
        written = 'Let me see.\n<tool_call>{"name": "add", "arguments": {"a": 17'
        assert last_prompt(gateway) == f"<|user|>17 + 25?\n<|assistant|>{written}\n<|user|>go on\n<|assistant|>"


async def test_a_choice_decides_what_is_called(
    start_calling: Callable[..., AbstractAsyncContextManager[RunningGateway]],
) -> None:
    async with start_calling('"b": 1}}</tool_call>') as gateway:
        forced = await gateway.client.responses.create(
            **BODY, tools=[ADD, NOW], tool_choice={"type": "function", "name": "add"}
        )
        assert last_prompt(gateway).endswith('<tool_call>\n{"name": "add", "arguments":')
        assert (forced.tool_choice.name, forced.tool_choice.type) == ("add", "function")
        required = await gateway.client.responses.create(**BODY, tools=[ADD, NOW], tool_choice="required")
        assert last_prompt(gateway).endswith('<tool_call>\n{"name": "')
        assert required.tool_choice == "required"
    async with start_calling(*CALLS) as gateway:
        none = await gateway.client.responses.create(**BODY, tools=[ADD], tool_choice="none")
        assert [item.type for item in none.output] == ["message"]
        single = await gateway.client.responses.create(**BODY, tools=[ADD, NOW], parallel_tool_calls=False)
        assert [item.type for item in single.output] == ["message", "function_call"]


BAD = [
    ({"tools": [{"name": "x"}]}, "tools.0.type", "missing"),
    ({"tools": [7]}, "tools.0", "object"),
    ({"tools": [{"type": "function"}]}, "tools.0.name", "missing"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools.0.name", "is not a valid name of a tool"),
    (
        {"tools": [{"type": "custom", "name": "a", "format": {"type": "grammar"}}]},
        "tools.0.format.grammar.syntax",
        "missing",
    ),
    ({"tools": [{"type": "namespace", "name": "a", "tools": [{"type": "custom"}]}]}, "tools.0.tools.0.name", "missing"),
    ({"tools": [{"type": "custom", "name": "now"}, NOW]}, "tools", "two tools have the name 'now'"),
    ({"tools": [NOW, {"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice", "web_search"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "send 'tools' as well"),
    ({"tools": [NOW], "tool_choice": {"type": "custom", "name": "now"}}, "tool_choice", "none of the tools"),
    ({"tools": [NOW, NOW]}, "tools", "two tools have the name 'now'"),
    ({"tool_choice": "required"}, "tool_choice", "send 'tools' as well"),
    ({"tools": [NOW], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "none of the tools"),
    ({"tools": [NOW], "tool_choice": {"type": "allowed_tools", "tools": []}}, "tool_choice.mode", "is missing"),
    ({"tools": [NOW], "tool_choice": 7}, "tool_choice", "it must be 'none'"),
    ({"input": [*CALLED, {**ADDED[0], "call_id": "call_9"}]}, "input", "'call_9', but no earlier 'function_call'"),
    ({"input": [*CALLED]}, "input", "no result of the call 'call_1'"),
    ({"input": [ADDED[0], *CALLED]}, "input", "'call_1', but no"),
    ({"input": [CALLED[1] | {"arguments": {}}, *ADDED]}, "input.0.arguments", "must be a string"),
    ({"input": [{"type": "function_call"}]}, "input.0.call_id", "missing"),
    ({"input": [*CALLED, ADDED[0] | {"output": 7}]}, "input.2.output", "a string or a list of text parts"),
]


async def test_bad_tools_and_calls_get_400_that_names_the_field(
    start_calling: Callable[..., AbstractAsyncContextManager[RunningGateway]],
) -> None:
    async with start_calling("x") as gateway:
        for changes, param, words in BAD:
            status, _, answer = await gateway.post(PATH, BODY | changes)
            error = json.loads(answer)["error"]
            assert (status, error["param"]) == (400, param), (changes, error)
            assert words in error["message"], (changes, error)
        assert gateway.engine.submits == []


async def test_a_model_that_knows_no_tools_says_so(gateway: RunningGateway) -> None:
    with pytest.raises(openai.BadRequestError, match="knows no tools") as caught:
        await gateway.client.responses.create(**BODY, tools=[ADD])
    assert caught.value.code == "tools_not_supported"
