"""Tool formats are recognized from chat templates: the syntax of calls, their opening, and the messages accepted."""

from __future__ import annotations

from typing import Any

import pytest

from moiety_text.chat import ChatTemplate
from moiety_text.tools.deltas import Call
from moiety_text.tools.families.hermes import HermesReader
from moiety_text.tools.families.llama import LlamaReader
from moiety_text.tools.families.mistral import MistralReader
from moiety_text.tools.formats import ToolFormat
from moiety_text.tools.offer import Tool, ToolOffer
from moiety_text.tools.registry import find_tool_format

TOOLS = (Tool("add", "", {}), Tool("now", "", {}))
HERMES = (
    '{{ message.tool_calls }}<tools>{{ tools }}</tools> {"name": <function-name>, "arguments": <args>} <tool_call>\\n'
)
LLAMA = (
    """{{ message.tool_calls }}<|start_header_id|>{{ tools }}{{ '{"name": "' + name + '", ' }}{{ '"parameters": ' }}"""
)
MISTRAL = '{{ message.tool_calls }}[AVAILABLE_TOOLS]{{ tools }}{{ "[TOOL_CALLS] [" }}{% if id|length != 9 %}{% endif %}'
MISTRAL_LATER = "{{ message.tool_calls }}{{ tools }}{{ '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}"
MISTRAL_WITH_IDS = (
    "{{ message.tool_calls }}{{ tools }}{{ '[TOOL_CALLS]' + name + '[CALL_ID]' + id + '[ARGS]' + arguments }}"
)
OTHERS = [
    HERMES.replace("message.tool_calls", "message"),  # would leave out calls
    "{{ message.tool_calls }}{{ tools }}<|start_header_id|>[get_weather(city='x')]",
    "{{ message.tool_calls }}{{ tools }}<call>{{ name }}</call>",
]


def known(template: str) -> ToolFormat:
    found = find_tool_format(template)
    assert found is not None
    return found


FORMS = [
    # the template; the reader; an answer that must call one named tool is opened, and any; what the model then writes
    (HERMES, HermesReader, '<tool_call>\n{"name": "add", "arguments":', '<tool_call>\n{"name": "', " {}}"),
    (LLAMA, LlamaReader, '{"name": "add", "parameters":', '{"name": "', " {}}"),
    (MISTRAL, MistralReader, '[TOOL_CALLS] [{"name": "add", "arguments":', '[TOOL_CALLS] [{"name": "', "{}}]"),
    (MISTRAL_LATER, MistralReader, "[TOOL_CALLS]add[ARGS]", "[TOOL_CALLS]", "{}"),
    (MISTRAL_WITH_IDS, MistralReader, "[TOOL_CALLS]add", "[TOOL_CALLS]", "[CALL_ID]abcdefghi[ARGS]{}"),
]


@pytest.mark.parametrize(("template", "reader", "named", "any_tool", "rest"), FORMS)
def test_a_template_shows_its_form_and_how_an_answer_must_begin(
    template: str, reader: type, named: str, any_tool: str, rest: str
) -> None:
    form = known(template)
    assert form.reader is reader
    offer = ToolOffer(TOOLS, must_call=True, forced="add")
    assert form.opening(ToolOffer(TOOLS)).text == ""
    assert form.opening(offer).text == named
    assert form.opening(ToolOffer(TOOLS, must_call=True)).text == any_tool
    assert form.opening(ToolOffer(TOOLS[:1], must_call=True)).text == named  # there is no choice
    assert form.new_reader(offer, is_rest=False).read(rest) == [Call("add", "{}")]
    assert form.new_reader(ToolOffer(TOOLS, must_call=True), is_rest=False).read(named[len(any_tool) :] + rest) == [
        Call("add", "{}")
    ]


@pytest.mark.parametrize("template", OTHERS)
def test_a_form_that_is_not_known_is_not_taken_for_another(template: str) -> None:
    assert find_tool_format(template) is None


def test_a_template_knows_tools_if_it_reads_them() -> None:
    for source, knows in (("{% if tools is defined %}x{% endif %}", True), ("{{ 'tools' }} tools {# tools #}", False)):
        assert ChatTemplate(source, {}).knows_tools is knows


def test_an_answer_that_the_client_has_begun_does_not_begin_with_a_call() -> None:
    text = '{"name": "add", "parameters": {}}'
    assert known(LLAMA).new_reader(ToolOffer(TOOLS), is_rest=False).read(text) == [Call("add", "{}")]
    assert known(LLAMA).new_reader(ToolOffer(TOOLS), is_rest=True).read(text) == [text]


def call(call_id: str, name: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": {}}}


def result(call_id: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "so", "tool_calls": [call("call_1", "add"), call("call_2", "now")]},
    result("call_2", "noon"),
    result("call_1", "3"),
    {"role": "assistant", "content": "", "tool_calls": [call("call_1", "now")]},  # an id may come again
    result("call_1", "night"),
]


def test_results_have_the_name_of_their_tool_and_keep_one_of_their_own() -> None:
    adapted = known(HERMES).adapted(TALK)
    assert [message.get("name") for message in adapted] == [None, None, "now", "add", None, "now"]
    assert known(HERMES).adapted([TALK[1], {**TALK[2], "name": "mine"}])[1]["name"] == "mine"


def test_ids_are_those_that_the_template_takes_and_results_still_find_their_calls() -> None:
    adapted = known(MISTRAL).adapted(
        [*TALK, {"role": "assistant", "content": "", "tool_calls": [call("abcdefghi", "x")]}]
    )
    first, second = (made["id"] for made in adapted[1]["tool_calls"])
    assert len(first) == len(second) == 9 and first.isalnum() and first != second
    assert [message["tool_call_id"] for message in adapted if message["role"] == "tool"] == [second, first, first]
    assert adapted[-1]["tool_calls"][0]["id"] == "abcdefghi"
    assert known(MISTRAL_LATER).adapted(TALK)[1]["tool_calls"][0]["id"] == "call_1"


def test_calls_are_told_one_a_message_with_their_results_where_the_template_takes_no_more() -> None:
    adapted = known(LLAMA + "{{ raise_exception('only supports single tool-calls at once!') }}").adapted(TALK)
    told = [[made["id"] for made in message.get("tool_calls", ())] or message["content"] for message in adapted]
    assert told == ["hi", ["call_1"], "3", ["call_2"], "noon", ["call_1"], "night"]
    assert [message["content"] for message in adapted if "tool_calls" in message] == ["so", "", ""]
    assert known(LLAMA).adapted(TALK)[1]["tool_calls"] == TALK[1]["tool_calls"]
