"""Tools of the Responses API that are no functions, with the real `openai` package: custom tools, namespaces, patches,
shells, searches for tools, and hosted tools, which are skipped."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec
import openai
import pytest
from openai.types.responses import (
    ResponseApplyPatchToolCall,
    ResponseCustomToolCall,
    ResponseFunctionShellToolCall,
    ResponseFunctionToolCall,
    ResponseToolSearchCall,
)
from openai.types.responses.response_output_item import LocalShellCall

from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_wire.messages import ModelCard

from .conftest import RunningGateway, StartGateway
from .test_response_tools import NOW, TEMPLATE, last_prompt

BODY: dict[str, Any] = {"model": "tiny", "input": "go", "max_output_tokens": 100}
StartCalling = Callable[..., AbstractAsyncContextManager[RunningGateway]]

FREE: dict[str, Any] = {"type": "custom", "name": "write", "description": "Writes."}
NAMESPACE: dict[str, Any] = {
    "type": "namespace",
    "name": "agents",
    "description": "Other agents.",
    "tools": [{"type": "function", "name": "close", "parameters": {"type": "object", "properties": {}}}, FREE],
}
SEARCH: dict[str, Any] = {"type": "tool_search", "execution": "client", "description": "Finds tools."}
HOSTED: list[Any] = [
    {"type": "web_search", "external_web_access": True},
    {"type": "file_search", "vector_store_ids": ["vs_1"]},
    {"type": "code_interpreter", "container": {"type": "auto"}},
    {"type": "image_generation"},
    {"type": "mcp", "server_label": "x", "server_url": "https://mcp.example"},
    {"type": "computer_use_preview", "display_height": 1, "display_width": 1, "environment": "linux"},
    {"type": "tool_search"},
    {"type": "shell", "environment": {"type": "container_auto"}},
]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.fixture
def start_calling(start_gateway: StartGateway, card: ModelCard) -> StartCalling:
    """`async with start_calling(*pieces) as gateway`: its model knows tools, and says that, whatever it is asked."""
    knowing = msgspec.structs.replace(card, chat_template=TEMPLATE, max_context_tokens=4096)
    return lambda *pieces, **more: start_gateway(
        [FakeEngineClient(knowing, lambda submit: [(65, piece) for piece in pieces])], **more
    )


async def whole_and_streamed(gateway: RunningGateway, **fields: Any) -> tuple[Any, list[Any]]:
    """Return the whole answer and the events of the same answer in a stream, which must agree."""
    whole = await gateway.client.responses.create(**BODY | fields)
    events = [event async for event in await gateway.client.responses.create(**BODY | fields, stream=True)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == events[-1].response.output
    assert [_same(item) for item in done] == [_same(item) for item in whole.output]
    return whole, events


def _same(item: Any) -> Any:
    return item.model_dump(exclude={"id", "call_id"})


def kinds_of(events: list[Any]) -> list[str]:
    return [event.type.removeprefix("response.") for event in events]


async def test_a_custom_tool_is_called_with_free_text(start_calling: StartCalling) -> None:
    text = 'line "1"\n\tline 2 \u00e9\U0001f600'
    async with start_calling("Well.", call("write", input=text)) as gateway:
        whole, events = await whole_and_streamed(gateway, tools=[FREE])
        _, made = whole.output
        assert isinstance(made, ResponseCustomToolCall)
        assert (made.type, made.name, made.input, made.namespace) == ("custom_tool_call", "write", text, None)
        assert made.call_id.startswith("call_") and made.id is not None and made.id.startswith("ctc_")
        of_call = [event for event in events if getattr(event, "output_index", None) == 1]
        assert kinds_of(of_call) == [
            "output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done",
        ]  # fmt: skip
        added, delta, done, ended = of_call
        assert (added.item.input, delta.delta, done.input, ended.item.input) == ("", text, text, text)
        assert added.item.id == delta.item_id == done.item_id == ended.item.id
        assert [(tool.type, tool.name) for tool in whole.tools] == [("custom", "write")]


async def test_the_grammar_of_a_custom_tool_is_in_the_prompt(start_calling: StartCalling, card: ModelCard) -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"+'}
    template = "{% for tool in tools %}{{ tool.function.description }}{% endfor %}<tool_call>"
    knowing = msgspec.structs.replace(card, chat_template=TEMPLATE + template, max_context_tokens=4096)
    async with start_calling("x") as gateway:
        gateway.engine.card = knowing
        await gateway.client.responses.create(**BODY, tools=[{**FREE, "format": grammar}])
        assert 'Writes.\n\nThe input must match this Lark grammar:\nstart: "a"+' in last_prompt(gateway)


@pytest.mark.parametrize(
    ("follows", "definition", "is_held"),
    [(True, 'start: "a"+', True), (False, "start: @x", False)],
)
async def test_an_input_follows_its_grammar_and_is_free_text_on_an_engine_without_grammars(
    start_gateway: StartGateway, card: ModelCard, follows: bool, definition: str, is_held: bool
) -> None:
    knowing = msgspec.structs.replace(card, chat_template=TEMPLATE, max_context_tokens=4096, follows_grammars=follows)
    tool = {**FREE, "format": {"type": "grammar", "syntax": "lark", "definition": definition}}
    async with start_gateway([FakeEngineClient(knowing, lambda submit: [(65, call("write", input="aa"))])]) as gateway:
        raw = await gateway.client.responses.with_raw_response.create(**BODY, tools=[tool])
        grammar, adjusted = gateway.engine.submits[-1].grammar, raw.headers.get("x-moiety-adjusted-fields")
        assert adjusted == (None if is_held else "tools.write.format=text")
        assert (grammar is not None) is is_held
        if grammar is not None:
            assert grammar.kind == "calls" and 'start: \\"a\\"+' in grammar.text
        assert raw.parse().output[0].type == "custom_tool_call"


async def test_a_tool_of_a_namespace_is_called_by_both_names_and_answered_with_them_apart(
    start_calling: StartCalling,
) -> None:
    async with start_calling(call("agents.close"), call("agents.write", input="x"), call("now")) as gateway:
        whole, _ = await whole_and_streamed(gateway, tools=[NOW, NAMESPACE])
        assert last_prompt(gateway).startswith("<tools>now agents.close agents.write </tools>")
        close, write, now = whole.output
        assert isinstance(close, ResponseFunctionToolCall)
        assert (close.name, close.namespace, close.arguments) == ("close", "agents", "{}")
        assert isinstance(write, ResponseCustomToolCall)
        assert (write.name, write.namespace, write.input) == ("write", "agents", "x")
        assert (now.name, now.namespace) == ("now", None)
        assert whole.tools[1].tools[0].name == "close"
        results = [
            {"type": "function_call_output", "call_id": close.call_id, "output": "closed"},
            {"type": "custom_tool_call_output", "call_id": write.call_id, "output": "written"},
            {"type": "function_call_output", "call_id": now.call_id, "output": "noon"},
        ]
        again = [{"role": "user", "content": "go"}, *whole.output, *results]
        await gateway.client.responses.create(**BODY | {"input": again}, tools=[NAMESPACE])
        assert last_prompt(gateway).endswith(
            '<tool_call>{"name": "agents.close", "arguments": {}}</tool_call>'
            '<tool_call>{"name": "agents.write", "arguments": {"input": "x"}}</tool_call>'
            '<tool_call>{"name": "now", "arguments": {}}</tool_call>\n'
            "<|tool|>closed\n<|tool|>written\n<|tool|>noon\n<|assistant|>"
        )


async def test_a_patch_is_an_item_of_its_own_and_its_result_comes_back(start_calling: StartCalling) -> None:
    patch = {"type": "update_file", "path": "a.py", "diff": "@@\n-a\n+b\n"}
    async with start_calling(
        call("apply_patch", **patch), call("apply_patch", type="delete_file", path="b")
    ) as gateway:
        whole, events = await whole_and_streamed(gateway, tools=[{"type": "apply_patch"}])
        update, delete = whole.output
        assert isinstance(update, ResponseApplyPatchToolCall)
        assert update.operation.model_dump() == patch
        assert delete.operation.model_dump() == {"type": "delete_file", "path": "b"}
        assert kinds_of(events)[2:4] == ["output_item.added", "output_item.done"]
        results = [
            {"type": "apply_patch_call_output", "call_id": update.call_id, "status": "completed", "output": "ok"},
            {"type": "apply_patch_call_output", "call_id": delete.call_id, "status": "failed"},
        ]
        again = [{"role": "user", "content": "go"}, *whole.output, *results]
        await gateway.client.responses.create(**BODY | {"input": again}, tools=[{"type": "apply_patch"}])
        assert last_prompt(gateway).endswith("<|tool|>completed\nok\n<|tool|>failed\n<|assistant|>")


async def test_a_patch_without_a_path_is_text_of_a_message(start_calling: StartCalling) -> None:
    async with start_calling(call("apply_patch", type="create_file")) as gateway:
        whole, _ = await whole_and_streamed(gateway, tools=[{"type": "apply_patch"}])
        assert [item.type for item in whole.output] == ["message"]
        assert whole.output_text == 'apply_patch({"type": "create_file"})'


async def test_shells_have_items_and_results_of_their_own(start_calling: StartCalling) -> None:
    shell, local = {"type": "shell", "environment": {"type": "local"}}, {"type": "local_shell"}
    run = call("shell", commands=["ls", "pwd"], timeout_ms=5), call("local_shell", command=["ls", "-l"], env={"A": "b"})
    async with start_calling(*run) as gateway:
        whole, events = await whole_and_streamed(gateway, tools=[shell, local])
        first, second = whole.output
        assert isinstance(first, ResponseFunctionShellToolCall)
        assert (first.action.commands, first.action.timeout_ms) == (["ls", "pwd"], 5)
        assert isinstance(second, LocalShellCall)
        assert (second.action.command, second.action.env, second.action.type) == (["ls", "-l"], {"A": "b"}, "exec")
        done = [event for event in events if event.type == "response.shell_call_command.done"]
        assert [(event.command_index, event.command) for event in done] == [(0, "ls"), (1, "pwd")]
        exited = {"type": "exit", "exit_code": 1}
        results = [
            {
                "type": "shell_call_output",
                "call_id": first.call_id,
                "output": [
                    {"stdout": "a", "stderr": "", "outcome": {"type": "timeout"}},
                    {"stdout": "", "stderr": "no", "outcome": exited},
                ],
            },
            {"type": "local_shell_call_output", "id": second.call_id, "output": "b"},
        ]
        again = [{"role": "user", "content": "go"}, *whole.output, *results]
        await gateway.client.responses.create(**BODY | {"input": again}, tools=[shell])
        told = "<|tool|>a\n[timed out]\nno\n[exit code 1]\n<|tool|>b\n<|assistant|>"
        assert last_prompt(gateway).endswith(told)
        assert '"arguments": {"commands": ["ls", "pwd"], "timeout_ms": 5}' in last_prompt(gateway)


async def test_tools_that_a_client_finds_are_offered_from_then_on(start_calling: StartCalling) -> None:
    async with start_calling(call("tool_search", query="clock")) as gateway:
        whole, _ = await whole_and_streamed(gateway, tools=[SEARCH])
        (search,) = whole.output
        assert isinstance(search, ResponseToolSearchCall)
        assert (search.execution, search.arguments) == ("client", {"query": "clock"})
        found = {"type": "tool_search_output", "call_id": search.call_id, "execution": "client", "tools": [NOW]}
        again = [{"role": "user", "content": "go"}, search.model_dump(exclude_none=True), found]
        await gateway.client.responses.create(**BODY | {"input": again}, tools=[SEARCH])
        assert last_prompt(gateway).startswith("<tools>tool_search now </tools>")
        assert last_prompt(gateway).endswith('<|tool|>{"tools":["now"]}\n<|assistant|>')
        more: Any = [
            {"type": "additional_tools", "role": "developer", "tools": [FREE]},
            {"role": "user", "content": "go"},
        ]
        await gateway.client.responses.create(**BODY | {"input": more}, tools=[NOW])
        assert last_prompt(gateway).startswith("<tools>now write </tools><|user|>go")


async def test_hosted_tools_are_skipped_and_named_unless_they_are_required(start_calling: StartCalling) -> None:
    async with start_calling("x") as gateway:
        tools: list[Any] = [NOW, *HOSTED, {"type": "new"}]
        answer = await gateway.client.responses.with_raw_response.create(**BODY, tools=tools)
        assert last_prompt(gateway).startswith("<tools>now </tools>")
        skipped = answer.headers["x-moiety-ignored-fields"].split(", ")
        assert skipped == sorted(f"tools.{tool['type']}" for tool in [*HOSTED, {"type": "new"}])
        assert [tool.type for tool in answer.parse().tools] == ["function"]
        only = await gateway.client.responses.create(**BODY, tools=HOSTED, tool_choice="auto")
        assert only.tools == [] and last_prompt(gateway).startswith("<|user|>")
        for choice in ({"type": "web_search_preview"}, {"type": "mcp", "server_label": "x"}, "required"):
            with pytest.raises(openai.BadRequestError) as refused:
                await gateway.client.responses.create(**BODY, tools=HOSTED, tool_choice=choice)
            assert refused.value.param == "tool_choice"


async def test_allowed_tools_leave_the_others_out(start_calling: StartCalling) -> None:
    async with start_calling('write", "arguments": {"input": "x"}}</tool_call>') as gateway:
        for mode in ("auto", "required"):
            allowed = {
                "type": "allowed_tools", "mode": mode, "tools": [{"type": "custom", "name": "write"}, {"type": "new"}],
            }  # fmt: skip
            answer = await gateway.client.responses.create(**BODY, tools=[NOW, FREE], tool_choice=allowed)
            assert last_prompt(gateway).startswith("<tools>write </tools>")
            assert answer.tool_choice.mode == mode
        assert last_prompt(gateway).endswith('<tool_call>\n{"name": "write", "arguments":')


@pytest.mark.parametrize(
    "choice",
    [{"type": "custom", "name": "write"}, {"type": "apply_patch"}, {"type": "function", "name": "agents.close"}],
)
async def test_a_tool_of_any_kind_may_be_required(start_calling: StartCalling, choice: dict[str, Any]) -> None:
    async with start_calling(' {"type": "delete_file", "path": "x", "input": "y"}}</tool_call>') as gateway:
        tools = [FREE, {"type": "apply_patch"}, NAMESPACE]
        answer = await gateway.client.responses.create(**BODY, tools=tools, tool_choice=choice)
        name = choice.get("name", "apply_patch")
        assert last_prompt(gateway).endswith(f'<tool_call>\n{{"name": "{name}", "arguments":')
        assert len(answer.output) == 1 and answer.output[0].type != "message"


async def test_a_response_format_beside_tools_is_for_answers_without_calls(
    start_gateway: StartGateway, card: ModelCard
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    asked: dict[str, Any] = {
        **BODY, "tools": [NOW], "text": {"format": {"type": "json_schema", "name": "a", "schema": schema}},
    }  # fmt: skip
    knowing = msgspec.structs.replace(card, chat_template=TEMPLATE, max_context_tokens=4096, follows_grammars=True)
    async with start_gateway([FakeEngineClient(knowing, lambda submit: [(65, '{"a": 5}')])]) as gateway:
        assert (await gateway.client.responses.create(**asked)).output_text == '{"a": 5}'
        held = gateway.engine.submits[-1].grammar
        assert held is not None and held.kind == "calls" and '"answer":["json_schema"' in held.text
        await gateway.client.responses.create(**asked, tool_choice="none")
        alone = gateway.engine.submits[-1].grammar
        assert alone is not None and alone.kind == "json_schema"
    plain = msgspec.structs.replace(knowing, follows_grammars=False)
    async with start_gateway([FakeEngineClient(plain)]) as gateway:
        with pytest.raises(openai.BadRequestError, match="together with tools") as refused:
            await gateway.client.responses.create(**asked)
        assert refused.value.code == "unsupported_response_format"
