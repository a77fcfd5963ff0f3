# ruff: noqa: F811  fixtures are imported
"""Custom tools are functions with one string, and their input is that string whatever a model makes of it."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_platform.inference.custom_tools import CustomGrammar, arguments_of, custom_tool_of, input_of
from moiety_text.harmony.reader import CONTROL_TOKENS

from .conftest import StartGateway, StartOver, ToolCard
from .scripted_provider import MODEL, PROTOCOLS, ScriptedProvider, client_of, provider  # noqa: F401  a fixture

ASKED: list[Any] = [{"role": "user", "content": "Hi"}]


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_an_input_survives_the_way_to_arguments_and_back(text: str) -> None:
    for ascii_only in (True, False):
        assert input_of(json.dumps(arguments_of(text), ensure_ascii=ascii_only)) == text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"input": "a", "other": 1}', "a"),
        ('{"patch": "a"}', "a"),
        ('{"patch": "a", "other": "b"}', '{"patch": "a", "other": "b"}'),
        ('{"input": 5}', '{"input": 5}'),
        ('{"input": ["a"]}', '{"input": ["a"]}'),
        ("{}", "{}"),
        ('{"input": 1e999}', '{"input": 1e999}'),
        ('{"input": "\\ud800"}', '{"input": "\\ud800"}'),
        ("[" * 5000, "[" * 5000),
    ],
)
def test_arguments_without_an_input_are_the_input(arguments: str, expected: str) -> None:
    assert input_of(arguments) == expected


def test_the_model_reads_the_grammar_of_an_input_in_the_description() -> None:
    grammar = CustomGrammar("regex", "a+")
    tool = custom_tool_of("f", "Write a.", grammar)
    assert tool.description == "Write a.\n\nThe input must match this regular expression:\na+"
    assert custom_tool_of("f", None, grammar).description == "The input must match this regular expression:\na+"
    assert custom_tool_of("f", "Write a.").description == "Write a."
    assert tool.parameters["required"] == list(tool.parameters["properties"]) == ["input"]


def chat_tool(definition: str, syntax: str = "lark") -> dict[str, Any]:
    grammar = {"syntax": syntax, "definition": definition}
    return {"type": "custom", "custom": {"name": "write", "format": {"type": "grammar", "grammar": grammar}}}


def flat_tool(definition: str, syntax: str = "lark") -> dict[str, Any]:
    return {
        "type": "custom",
        "name": "write",
        "format": {"type": "grammar", "syntax": syntax, "definition": definition},
    }


def bodies(definition: str, syntax: str = "lark") -> list[tuple[str, dict[str, Any]]]:
    """Requests of each API with custom tools: chats in both forms, responses, and tools within a namespace."""
    flat = flat_tool(definition, syntax)
    inner = {"type": "namespace", "name": "files", "description": "x", "tools": [flat]}
    return [
        ("/v1/chat/completions", {"messages": ASKED, "tools": [chat_tool(definition, syntax)]}),
        ("/v1/chat/completions", {"input": ASKED, "tools": [flat]}),
        ("/v1/responses", {"input": "Hi", "tools": [flat]}),
        ("/v1/responses", {"input": "Hi", "tools": [inner]}),
        ("/v1/responses/input_tokens", {"input": "Hi", "tools": [flat]}),
    ]


@pytest.mark.parametrize("follows", [True, False])
@pytest.mark.parametrize(
    ("syntax", "definition", "fault"),
    [
        ("regex", "[a", "the character class is not closed"),
        ("lark", 'start: "a', "line 1, at '\"a': the string is not closed"),
        ("lark", 'x: "a"', "there is no rule 'start'"),
    ],
)
async def test_a_malformed_grammar_is_refused_whatever_the_engine(
    start_gateway: StartGateway, tool_card: ToolCard, follows: bool, syntax: str, definition: str, fault: str
) -> None:
    card = msgspec.structs.replace(tool_card("hermes"), follows_grammars=follows)
    async with start_gateway([FakeEngineClient(card)]) as gateway:
        for path, body in bodies(definition, syntax):
            status, _, answer = await gateway.post(path, body | {"model": "hermes"})
            error = json.loads(answer)["error"]
            assert status == 400 and fault in error["message"], (path, error)
            assert error["param"].startswith("tools.0") and error["param"].endswith("definition"), error
        assert gateway.engine.submits == []


@pytest.mark.parametrize("family", ["hermes", "harmony"])
async def test_a_grammar_that_cannot_be_enforced_is_refused_with_its_fault_unless_the_engine_has_no_grammars(
    start_gateway: StartGateway, tool_card: ToolCard, family: str
) -> None:
    special = CONTROL_TOKENS if family == "harmony" else ()
    card = msgspec.structs.replace(tool_card(family, special=special), controls_reasoning=True)
    definition = 'start: "a"\n%ignore " "'
    for follows in (True, False):
        engine = FakeEngineClient(msgspec.structs.replace(card, follows_grammars=follows))
        async with start_gateway([engine]) as gateway:
            for path, body in bodies(definition)[:4]:
                status, headers, answer = await gateway.post(path, body | {"model": family})
                if not follows:
                    assert status == 200 and headers["x-moiety-adjusted-fields"].endswith("write.format=text"), answer
                    continue
                error = json.loads(answer)["error"]
                assert (status, error["code"], error["param"]) == (400, "unsupported_response_format", "tools"), error
                assert "line 2, at '%ignore" in error["message"] and "write'" in error["message"], error
            if follows:
                path, body = bodies(definition)[0]
                status, _, answer = await gateway.post(path, body | {"model": family, "tool_choice": "none"})
                assert status == 200, answer


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_hosted_model_has_free_text_and_says_so(provider: ScriptedProvider, start_over: StartOver) -> None:
    async with start_over(client_of(provider)) as gateway:
        for path, body in bodies('start: "a"')[:3]:
            status, headers, answer = await gateway.post(path, body | {"model": MODEL})
            assert (status, headers.get("x-moiety-adjusted-fields")) == (200, "tools.write.format=text"), answer
