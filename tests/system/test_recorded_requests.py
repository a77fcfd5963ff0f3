"""Requests recorded from agents, to the bundled model with a template that knows tools: an engine's answers read back.

The scripted engine of `tests/clients` writes what it is told. Here an engine follows the grammars of calls and
documents. Schemas are strict, and their values short, since the model has not learned to call tools.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from tests.clients.answers import RECORDED, Answer, answer_of

from moiety_demo import checkpoint_path

MODEL = "hermes"
MAX_TOKENS = {"/v1/chat/completions": "max_completion_tokens", "/v1/responses": "max_output_tokens"}
CALLING = ("claude_code_first_turn", "codex_first_turn", "cursor_agent_first_turn", "opencode_first_turn")


@pytest.fixture(scope="module")
def server(
    start_server: Callable[..., AbstractContextManager[Any]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("model")
    shutil.copytree(checkpoint_path(), folder, dirs_exist_ok=True)
    shutil.copy(Path(__file__).parents[1] / "gateway" / "templates" / "hermes.jinja", folder / "chat_template.jinja")
    options = ("--model", str(folder), "--name", MODEL, "--no-traces")
    with start_server(tmp_path_factory.mktemp("system"), *options) as running:
        yield running


def recorded(name: str, **more: Any) -> tuple[str, dict[str, str], dict[str, Any]]:
    """The path, the headers and the body of a recorded request, which is not streamed."""
    found = json.loads((RECORDED / f"{name}.json").read_text())
    limit = MAX_TOKENS.get(found["path"], "max_tokens")
    body = found["body"] | {"model": MODEL, "temperature": 0, "stream": False, limit: 300, **more}
    body.pop("stream_options", None)
    return found["path"], found["headers"], body


def both_answers(server: Any, path: str, headers: dict[str, str], body: dict[str, Any]) -> Answer:
    """The answer, which is the same whole and streamed."""
    headers = headers | {"Authorization": f"Bearer {server.key('tenant')}"}
    answers = []
    for stream in (False, True):
        reply = httpx.post(server.url + path, headers=headers, json=body | {"stream": stream}, timeout=120)
        assert reply.status_code == 200, reply.text
        answer = answer_of(path, reply.content, stream=stream)
        answer.calls = [[name, json.loads(arguments)] for name, arguments in answer.calls]
        answers.append(answer)
    assert answers[0] == answers[1]
    return answers[0]


def functions_of(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The functions, those in namespaces included, in whatever form the API has for them."""
    inner = [function for tool in tools for function in tool.get("tools", [tool.get("function", tool)])]
    return [function for function in inner if "parameters" in function or "input_schema" in function]


def schema_of(function: dict[str, Any]) -> dict[str, Any]:
    return function.get("parameters") or function["input_schema"]


def make_short(schema: dict[str, Any]) -> None:
    """Require all properties and bound their values."""
    schema |= {"required": list(schema["properties"]), "additionalProperties": False}
    for one in schema["properties"].values():
        if one.get("type") == "string":
            one["maxLength"] = 8
        elif one.get("type") in {"number", "integer"}:
            one["enum"] = [1, 2]


@pytest.mark.parametrize("name", CALLING)
def test_a_call_that_must_come_is_of_an_offered_tool_and_valid(server: Any, name: str) -> None:
    path, headers, body = recorded(name)
    body["tool_choice"] = {"type": "any"} if "/messages" in path else "required"
    for function in functions_of(body["tools"]):
        function["strict"] = True
        make_short(schema_of(function))
    answer = both_answers(server, path, headers, body)
    schemas = {function["name"]: schema_of(function) for function in functions_of(body["tools"])}
    assert answer.calls and answer.is_complete
    for called, arguments in answer.calls:
        jsonschema.validate(arguments, schemas[called])


def test_codexs_output_schema_is_followed_beside_its_tools(server: Any) -> None:
    path, headers, body = recorded("codex_output_schema")
    for function in functions_of(body["tools"]):
        function["strict"] = True
        make_short(schema_of(function))
    schemas = {function["name"]: schema_of(function) for function in functions_of(body["tools"])}
    schema = body["text"]["format"]["schema"]
    make_short(schema)
    answer = both_answers(server, path, headers, body)
    assert answer.is_complete and bool(answer.text) != bool(answer.calls)
    if answer.text:
        jsonschema.validate(json.loads(answer.text), schema)
    for called, arguments in answer.calls:
        jsonschema.validate(arguments, schemas[called])
