"""Chat requests in the form of the Responses API."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moiety_platform.errors import BadRequest
from moiety_platform.inference.request_body import decode_body
from moiety_platform.openai_api.schemas import ChatBody
from moiety_wire.grammars import GrammarKind

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
LOOK = {"type": "function", "name": "look", "parameters": SCHEMA}
PATCH = {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'}}


def decoded(body: dict[str, Any]) -> ChatBody:
    return decode_body(ChatBody, json.dumps({"model": "m", **body}).encode(), 64)


def messages_of(*items: Any, **more: Any) -> list[dict[str, Any]]:
    return list(decoded({"input": list(items), **more}).generation().prompts[0].messages)


def test_instructions_and_a_string_are_a_system_and_a_user_message() -> None:
    prompt = decoded({"input": "hello", "instructions": "Be short."}).generation().prompts[0]
    assert [(one["role"], one["content"]) for one in prompt.messages] == [("system", "Be short."), ("user", "hello")]


def test_options_have_the_chats_names() -> None:
    form = {"type": "json_schema", "name": "city", "schema": SCHEMA, "strict": True}
    options = {"max_output_tokens": 7, "reasoning": {"effort": "low", "summary": "auto"}, "text": {"format": form}}
    generation = decoded({"input": "x", "include": ["reasoning.encrypted_content"], **options}).generation()
    assert generation.max_tokens == 7
    assert generation.prompts[0].effort == "low"
    assert generation.grammar.kind is GrammarKind.JSON_SCHEMA
    assert json.loads(generation.grammar.text) == SCHEMA


@pytest.mark.parametrize("asked", [{"input": "x"}, {"messages": [{"role": "user", "content": "x"}]}])
def test_flat_tools_are_offered_in_either_form_of_a_body(asked: dict[str, Any]) -> None:
    offer = decoded({**asked, "tools": [LOOK, PATCH, {"type": "web_search"}]}).offer()
    assert [tool.name for tool in offer.tools] == ["look", "patch"]
    grammar = offer.tools[1].input_grammar
    assert grammar is not None and grammar.plain == 'start: "x"'


def test_a_chosen_flat_tool_must_be_called() -> None:
    offer = decoded({"input": "x", "tools": [LOOK, PATCH], "tool_choice": {"type": "custom", "name": "patch"}}).offer()
    assert (offer.must_call, offer.forced) == (True, "patch")


def test_calls_join_the_assistants_message_and_results_follow() -> None:
    found = messages_of(
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}], "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"city": "Basel"}'},
        {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "x"},
        {"type": "web_search_call", "id": "w1"},
        {"type": "function_call_output", "call_id": "c1", "output": "17"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "done"}]},
    )
    user, assistant, *results = found
    assert user["content"] == "a\nb"
    assert (assistant["content"], assistant["reasoning_content"]) == ("I look.", "hm")
    assert [call["function"]["name"] for call in assistant["tool_calls"]] == ["look", "patch"]
    assert [(one["tool_call_id"], one["content"]) for one in results] == [("c1", "17"), ("c2", "done")]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"input": "x", "previous_response_id": "resp_1"}, "'previous_response_id' cannot be served by a chat"),
        ({"input": [{"type": "item_reference", "id": "rs_1"}]}, "stored item"),
        ({"input": [{"type": "function_call_output", "call_id": "c9", "output": "x"}]}, "'c9'"),
        ({"input": [5]}, "'messages.0'"),
        ({"input": [{"role": "user", "content": 5}]}, "'messages.0.content'"),
        ({"input": [{"type": ["message"]}]}, "'messages.0"),
        (
            {"input": [{"type": 5, "role": "assistant", "tool_calls": "x"}, {"type": "function_call", "name": "a"}]},
            "'messages.0",
        ),
        ({"input": []}, "'messages'"),
        ({"input": {"role": "user"}}, "'messages'"),
        ({"inputs": "x"}, "'messages'"),
        ({"input": "x", "tools": [{"type": "function", "name": 5}]}, "'tools.0.function.name'"),
    ],
)
def test_a_body_that_cannot_be_translated_says_why(body: dict[str, Any], said: str) -> None:
    with pytest.raises(BadRequest, match=said.replace("(", r"\(")):
        decoded(body)


@pytest.mark.parametrize(
    ("told", "read"),
    [
        ({"reasoning": "hm"}, "hm"),
        ({"reasoning": "hm", "reasoning_content": "so"}, "so"),
        ({"reasoning": {"a": 1}}, None),
    ],
)
def test_vllms_name_of_reasoning_is_read(told: dict[str, Any], read: str | None) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", **told}]
    last = decoded({"messages": messages}).generation().prompts[0].messages[-1]
    assert last.get("reasoning_content") == read


@pytest.mark.parametrize(
    "data",
    [
        b'{"model": "m", "input": "\\ud800"}',
        b'{"model": "m", "input": "x", "user": "\xff"}',
        b'{"model": "m", "input": "x", "top_p": 1e999}',
        b'{"model": "m", "input": [[1]], "tools": [{"type": "function", "name": "a", "format": 5}]}',
        b'{"model": "m", "input": "x", "tools": [{"type": "custom", "name": "a", "format": {"type": "grammar"}}]}',
        b'{"model": "m", "input": "x", "instructions": [1], "reasoning": [1], "text": [1]}',
        b'["input"]',
        b'"input"',
        b'{"input"',
    ],
)
def test_a_broken_body_with_input_is_refused(data: bytes) -> None:
    with pytest.raises(BadRequest):
        decode_body(ChatBody, data, 64)


def test_a_chat_that_also_has_input_is_a_chat() -> None:
    body = decoded({"messages": [{"role": "user", "content": "chat"}], "input": "other"})
    assert [one["content"] for one in body.generation().prompts[0].messages] == ["chat"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(("type", "role", "content", "text", "name", "call_id", "output")), inner)
    ),
    max_leaves=8,
)
ITEM = st.fixed_dictionaries(
    {"type": st.sampled_from(("message", "reasoning", "function_call", "custom_tool_call", "function_call_output"))},
    optional=dict.fromkeys(("role", "content", "call_id", "name", "arguments", "input", "output"), JSON),
)


@given(st.lists(ITEM | JSON, max_size=4), JSON, JSON, JSON)
def test_any_items_are_translated_or_refused(items: list[Any], reasoning: Any, text: Any, choice: Any) -> None:
    try:
        body = decoded({"input": items, "reasoning": reasoning, "text": text, "tool_choice": choice})
    except BadRequest:
        return
    assert body.messages
