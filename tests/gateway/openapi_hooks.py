"""What schemathesis is told for `test_openapi.py`, which runs it with this file as its hooks: how to name things that
there are, and which refusals of valid data are right. The gateway and its keys are in the environment.
"""

from __future__ import annotations

import atexit
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import schemathesis
from hypothesis import strategies as st
from schemathesis.checks import CHECKS
from schemathesis.core.parameters import ParameterLocation
from tests.gateway.openapi_world import World, new

# Formats of our own, for which JSON Schema has no keyword.
PRINTABLE = st.text(st.characters(exclude_categories=["C", "Z"], include_characters=" "), min_size=1, max_size=100)
schemathesis.openapi.format("printable", PRINTABLE)
schemathesis.openapi.format("name", PRINTABLE.map(str.strip).filter(bool))
schemathesis.openapi.format("email-address", st.from_regex(r"[a-z0-9]{8,20}@[a-z0-9]{1,20}", fullmatch=True))
schemathesis.openapi.format("json-object", st.dictionaries(PRINTABLE, PRINTABLE, max_size=2).map(json.dumps))

# What a schema cannot say, so that a request which it allows may be refused: by the code of the error, or the parameter
# that it names.
EXCUSED_CODES = {
    "invalid_image": "an image is a file of some format, and has a size",
    "invalid_document": "a document is a PDF file or plain text",
    "images_not_supported": "the model reads text only",
    "text_count_mismatch": "two lists must have the same length",
    "unknown_token_id": "which there are depends on the model",
    "unsupported_response_format": "which schemas and expressions can be followed is the engine's to say",
    "context_length_exceeded": "how long a prompt may be depends on the model",
    "idempotency_key_reused": "a key may have been sent before",
    "precondition_failed": "nobody guesses an ETag",
    "response_not_streamable": "only one that is made in the background with `stream` is",
    "response_not_cancellable": "only one that is made in the background is",
    "previous_response_running": "it ends at some time",
    "invalid_quote": "nobody guesses a quote",
    "invalid_slo": "a change must go with what the class has already",
}
EXCUSED_PARAMS = {
    "after": "it must be the id of something in the list",
    "starting_after": "it is of streams",
    "cursor": "it must be one that the server gave",
    "after_id": "it must be the id of something in the list, as in the next",
    "before_id": "it must be, and without the one before",
    "since": "it must lie before `until`",
    "expires_at": "it must lie in the future",
    "cached_input": "it must not be higher than `input`",
    "truncate_prompt_tokens": "how many special tokens there are depends on the model",
    "entry_point": "which there are depends on the packages that are installed",
    "dimensions": "how many there are depends on the model",
    "project_ids": "they must be projects of the tenant",
    "role": "which a user can have depends on its tenant",
    "tool_choice": "the tool must be one of those in the request that can be called",
}


WORLD = World()
CASES: Counter[str] = Counter()  # by operation


@schemathesis.hook
def before_call(_context: Any, case: Any, kwargs: Any) -> None:
    """Where a case is no bad one in that respect: have it name things that there are, or it would be answered 404 for
    whatever else is in it; and have fields agree that must."""
    if not is_bad(case, ParameterLocation.PATH):
        CASES[case.operation.label] += 1
        for name in case.path_parameters or {}:
            if CASES[case.operation.label] % 4:  # the others stay as they were drawn, which nothing is called
                case.path_parameters[name] = WORLD.known(name) if case.method == "GET" else getattr(WORLD, name)()
    if "/request-contents/" in case.operation.path and not is_bad(case, ParameterLocation.HEADER):
        tenant_id = case.path_parameters.get("tenant_id")  # whose administrators alone may do this
        kwargs["auth"] = with_key(WORLD.key_of(tenant_id if tenant_id in WORLD.tenants else WORLD.own_tenant))
    if case.operation.label in ("POST /admin/v1/classes", "POST /admin/v1/webhooks"):
        WORLD.make_room()
    is_upload = case.operation.label == "POST /v1/files" and isinstance(case.body, dict)
    if is_upload and "purpose" not in case.body and not is_bad(case, ParameterLocation.BODY):
        case.headers["anthropic-version"] = "2023-06-01"  # in OpenAI's API the purpose is required
    if is_bad(case, ParameterLocation.BODY):
        case.headers.pop("If-Match", None)  # it is looked at before the body
    if "Idempotency-Key" in case.headers and not is_bad(case, ParameterLocation.HEADER):
        case.headers["Idempotency-Key"] = new()  # a key that was sent before is looked up first, too
    if case.operation.label == "POST /v1/quote" and not is_bad(case, ParameterLocation.QUERY):
        if is_bad(case, ParameterLocation.BODY):
            case.query.pop("endpoint", None)  # the schema is that of a chat
        elif case.query.get("endpoint") not in (None, "/v1/chat/completions"):
            case.body = {"model": WORLD.model_id(), **QUOTED}
            field = "input" if case.query["endpoint"] == "/v1/responses" else "prompt"
            case.body[field] = "a"
    if not is_bad(case, ParameterLocation.BODY) and isinstance(case.body, dict):
        case.body = agreed(named(without_fractions(case.body)))
    if not is_bad(case, ParameterLocation.QUERY) and case.method == "GET" and CASES[case.operation.label] % 2:
        for name in {"tenant_id", "project_id"} & set(case.query or {}):
            case.query[name] = WORLD.known(name)
    if not is_bad(case, ParameterLocation.QUERY) and "/prices" in case.operation.path and "model" in case.query:
        case.query["model"] = WORLD.model()
        case.query.pop("service_class", None)
    if not is_bad(case, ParameterLocation.PATH) and "/guardrails/{name}" in case.operation.path:
        case.path_parameters["name"] = WORLD.guardrail()
    if not is_bad(case, ParameterLocation.PATH) and "/issuers/{name}" in case.operation.path:
        case.path_parameters["name"] = WORLD.issuer()
    if not is_bad(case, ParameterLocation.PATH) and "/key-policies/{tenant_id}" in case.operation.path:
        case.path_parameters["tenant_id"] = WORLD.policy_tenant_id()
    if not is_bad(case, ParameterLocation.QUERY) and case.operation.label == "DELETE /admin/v1/declarations":
        declared = WORLD.declaration()
        case.query |= {name: declared[name] for name in ("kind", "name")}


def with_key(key: str) -> Any:
    """Return the `auth` of a request that has another key than that of the command line."""

    def add(request: Any) -> Any:
        request.headers["Authorization"] = f"Bearer {key}"
        return request

    return add


def is_bad(case: Any, location: Any) -> Any:
    return case.meta is not None and case.meta.is_negative_at(location)


def without_fractions(value: Any) -> Any:
    """JSON Schema takes 1.0 for an integer, and this API does not, as OpenAI's."""
    if isinstance(value, dict):
        return {key: without_fractions(one) for key, one in value.items()}
    if isinstance(value, list):
        return [without_fractions(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


# What a chat needs, and with another field each endpoint whose requests can be quoted.
QUOTED: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
KINDS = {
    "project_id": "project_id",
    "tenant_id": "tenant_id",
    "input_file_id": "file_id",
    "previous_response_id": "response_id",
}


def named(body: dict[str, Any]) -> Any:
    """Replace names in the body by those of objects that exist."""
    for name, kind in KINDS.items():
        if isinstance(body.get(name), str):
            body[name] = WORLD.known(kind)
    if isinstance(body.get("conversation"), str | dict):  # a new one, since requests add to it
        body["conversation"] = WORLD.conversation_id()
        body.pop("previous_response_id", None)
    if "scope_id" in body:
        body["scope_id"] = WORLD.known(f"{body['level']}_id")
    if isinstance(body.get("url"), str):  # where webhooks may go to depends on the settings
        body["url"] = "https://hooks.invalid/hook"
    if isinstance(body.get("grants"), list):  # of an issuer of JWTs, whose keys must be real ones
        body["grants"] = body["grants"] if body.get("claim") else body["grants"][:1]
        for number, grant in enumerate(body["grants"]):
            grant |= {"project": WORLD.known("project_id"), "claim_value": f"{number}" if body.get("claim") else None}
        body |= {"required_claims": {"a": "b"}, "jwks": None}
        if body.get("jwks_url") is not None:
            body["jwks_url"] = "https://example.com/keys"
    if body.get("service_class") is not None:
        body["service_class"] = "standard"
    if body.get("downgrade_to") is not None:
        body["downgrade_to"] = "batch"
        body["rank"] = 2  # above it
    if isinstance(body.get("model"), str) and "output" not in body:
        body["model"] = WORLD.model_id()
    return body


def agreed(body: dict[str, Any]) -> Any:
    """Make values agree that JSON Schema cannot relate to each other."""
    if body.get("best_of") is not None:
        body["best_of"] = body.get("n") or 1
    if body.get("min_tokens") is not None:
        body["min_tokens"] = 0
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        if body.get(name) is not None:
            body[name] = min(body[name], 8)
    offered(body)
    for number, request in enumerate(body.get("requests") or ()):
        request |= {"custom_id": str(number), "params": agreed(named(request["params"]))}
        request["params"].pop("stream", None)
    if isinstance(body.get("messages"), list):
        body["messages"] = [turn for message in body["messages"] for turn in chat_turns(message)]
        body["messages"] = message_turns(body["messages"])
    for number, target in enumerate(body.get("targets") or ()):
        target["model"] = f"m{number}"  # each is another one
    for question in body.get("questions") or ():
        for name, field in (("choices", "value"), ("levels", "label")):
            for number, option in enumerate(question.get(name) or ()):
                option[field] = f"{number}"  # each is another one
    for field in {"input", "items"} & body.keys():
        if not isinstance(body[field], list):
            continue
        body[field] = [paired for item in body[field] for paired in with_partner(item)]
        for item in body[field]:
            if isinstance(item, dict) and item.get("type") in ("additional_tools", "tool_search_output"):
                item["tools"] = []  # they would have names of their own
    return body


BUILT_IN = ("apply_patch", "shell", "local_shell", "tool_search")  # of which there is one each
PARTNERS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"type": "function_call", "name": "f", "arguments": "{}"}, {"type": "function_call_output", "output": "a"}),
    ({"type": "custom_tool_call", "name": "f", "input": ""}, {"type": "custom_tool_call_output", "output": "a"}),
    (
        {"type": "apply_patch_call", "operation": {"type": "delete_file", "path": "a"}},
        {"type": "apply_patch_call_output", "status": "failed"},
    ),
    ({"type": "shell_call", "action": {"commands": ["a"]}}, {"type": "shell_call_output", "output": []}),
    (
        {"type": "local_shell_call", "action": {"type": "exec", "command": ["a"]}},
        {"type": "local_shell_call_output", "id": "a", "output": "a"},
    ),
    ({"type": "tool_search_call", "arguments": {}}, {"type": "tool_search_output", "tools": []}),
]


def inner_of(tool: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a tool that has its name: chat functions and custom tools are nested objects."""
    kind = tool.get("type") or "function"
    inner = tool.get(kind)
    return inner if kind in ("function", "custom") and isinstance(inner, dict) else tool


def offered(body: dict[str, Any]) -> None:
    """Give each tool its own name, and choose one of them."""
    if "query" not in body:  # of a rerank
        body.pop("documents", None)  # which the model's chat template does not read
    if body.pop("continue_final_message", None):
        body["messages"] = [*body["messages"], {"role": "assistant", "content": "a"}]
        body["continue_final_message"] = True
        body["add_generation_prompt"] = False
        body.pop("tool_choice", None)
        body.pop("function_call", None)
    elif body.get("add_generation_prompt") is False:
        body["add_generation_prompt"] = True
    if body.get("functions"):
        body.pop("tools", None)
        body.pop("tool_choice", None)
    elif body.get("function_call") != "none":
        body.pop("function_call", None)
    tools = [tool for tool in body.get("tools") or () if tool.get("type") not in BUILT_IN]
    functions = [inner_of(tool) for tool in tools]
    for number, function in enumerate([*functions, *(body.get("functions") or ())]):
        function["name"] = f"tool{number}"  # the first is what the engine calls
        for place, inner in enumerate(function.get("tools") or ()):
            inner["name"] = f"tool{place}"
    if isinstance(body.get("tools"), list) and any(tool.get("type") in BUILT_IN for tool in body["tools"]):
        first = {tool.get("type"): tool for tool in reversed(body["tools"]) if tool.get("type") in BUILT_IN}
        body["tools"] = [*functions, *first.values()]
    choice = body.get("tool_choice")
    if isinstance(choice, dict):
        body["tool_choice"] = chosen(choice, functions)
    elif choice == "required" and not functions:
        body["tool_choice"] = "auto"
    if isinstance(body.get("function_call"), dict):
        body["function_call"]["name"] = body["functions"][0]["name"]


def chosen(choice: dict[str, Any], functions: list[Any]) -> Any:
    """Return a choice that names a tool that exists: one of a chat's, which may all be skipped, or another."""
    if "allowed_tools" in choice or choice.get("type") in ("custom", "function"):
        if not functions:
            return "auto"
        if "allowed_tools" in choice:
            one = {"type": "function", "function": {"name": functions[0]["name"]}}
            return {**choice, "allowed_tools": {**choice["allowed_tools"], "tools": [one]}}
    named = choice.get(choice.get("type", ""), choice)
    if functions and named.get("name") is not None:
        named["name"] = functions[0]["name"]
    return choice


def chat_turns(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """OpenAI's: the result of a call comes after the call, and calls are of one form."""
    if message["role"] == "function" and message.get("name") is None:
        message["name"] = "f"
    if message.get("tool_calls"):
        message.pop("function_call", None)
    if message["role"] == "tool":
        call = {"id": message["tool_call_id"], "function": {"name": "f", "arguments": "{}"}}
        yield {"role": "assistant", "content": None, "tool_calls": [call]}
    yield message


def message_turns(messages: list[dict[str, Any]]) -> Any:
    """Anthropic's: the same, and after the last call there is something."""
    turns = []
    for message in messages:
        blocks = message["content"] if isinstance(message.get("content"), list) else []
        results = [block for block in blocks if block["type"] == "tool_result"]
        if results:
            calls = [{"type": "tool_use", "id": one["tool_use_id"], "name": "f", "input": {}} for one in results]
            turns += [{"role": "user", "content": "a"}, {"role": "assistant", "content": calls}]
        turns.append(message)
        if any(block["type"] == "tool_use" for block in blocks):
            turns.append({"role": "user", "content": "a"})
    return turns


def with_partner(item: Any) -> Iterator[dict[str, Any]]:
    """Yield an item of responses' input; a call comes with its result."""
    kind, call_id = (item.get("type"), item.get("call_id")) if isinstance(item, dict) else (None, None)
    if kind == "local_shell_call_output":
        call_id = call_id or item.get("id")
    for call, result in PARTNERS:
        if kind == result["type"] and call_id is not None:
            yield {**call, "call_id": call_id}
    yield item
    for call, result in PARTNERS:
        if kind == call["type"] and call_id is not None:
            yield {**result, "call_id": call_id}


@schemathesis.hook
def after_call(_context: Any, case: Any, response: Any) -> None:
    WORLD.answered[f"{case.method} {case.operation.path} {response.status_code}"] += 1


atexit.register(lambda: Path(os.environ["MOIETY_ANSWERED"]).write_text(json.dumps(WORLD.answered)))


@schemathesis.check
def refuses_what_it_does_not_say(ctx: Any, response: Any, case: Any) -> None:
    """`negative_data_rejection`; too large a list may be too large a body as well, and whatever a form has as its file
    is the text of one."""
    is_form = case.media_type == "multipart/form-data" and isinstance(case.body, dict)
    if response.status_code != 413 and not (is_form and not isinstance(case.body.get("file", ""), str | bytes)):
        CHECKS.get_one("negative_data_rejection")(ctx, response, case)


@schemathesis.check
def takes_what_it_says(ctx: Any, response: Any, case: Any) -> None:
    """`positive_data_acceptance`, with our excuses."""
    if not is_excused(response):
        CHECKS.get_one("positive_data_acceptance")(ctx, response, case)


def is_excused(response: Any) -> Any:
    if response.status_code not in (400, 412, 422):
        return False
    error = response.json()["error"]
    details = error.get("details", {})  # Anthropic's form has them there
    code, param = details.get("error_code", error.get("code")), details.get("param", error.get("param"))
    return code in EXCUSED_CODES or param in EXCUSED_PARAMS
