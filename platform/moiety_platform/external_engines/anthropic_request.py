"""Translates a conversation in OpenAI's fields for chats to a request of Anthropic's Messages API. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from moiety_platform.engine_client.chat_submit import ChatSubmit
from moiety_platform.external_engines.dialect import rule_refusals
from moiety_text.efforts import NO_EFFORT
from moiety_text.tools.history import as_object, parsed_arguments
from moiety_wire.grammars import GrammarKind

MIN_THINKING_TOKENS = 1024
THINKING_TOKENS = {"minimal": 1024, "low": 2048, "medium": 8192, "high": 16_384, "xhigh": 32_768, "max": 65_536}
_NOT_OF_IDS = re.compile(r"[^a-zA-Z0-9_-]")
_MAX_ID_CHARS = 64


def refused_fields(submit: ChatSubmit) -> list[str]:
    """Return what the Messages API lacks of a request, by OpenAI's names."""
    sampling, stopping, grammar = submit.sampling, submit.stopping, submit.grammar
    thinks = thinking_tokens(submit.options, stopping.max_tokens, submit.messages) is not None
    asked = {
        "seed": sampling.seed is not None,
        "presence_penalty": sampling.presence_penalty != 0,
        "frequency_penalty": sampling.frequency_penalty != 0,
        "repetition_penalty": sampling.repetition_penalty != 1,
        "min_p": sampling.min_p != 0,
        "logit_bias": bool(sampling.logit_bias),
        "logprobs": sampling.num_logprobs is not None,
        "a temperature above 1": sampling.temperature > 1,
        "a temperature, top_p or top_k beside reasoning": thinks and _samples_otherwise(submit),
        "a tool_choice that demands a call, beside reasoning": thinks and _must_call(submit.options),
        "an answer that the client has begun, beside reasoning": thinks and submit.messages[-1]["role"] == "assistant",
        "min_tokens": stopping.min_tokens != 0,
        "stop_token_ids": bool(stopping.stop_token_ids),
        "ignore_eos": stopping.ignore_eos,
        "a response_format that is no JSON schema": grammar is not None and grammar.kind is not GrammarKind.JSON_SCHEMA,
    }
    return [*(name for name, is_asked in asked.items() if is_asked), *rule_refusals(submit)]


def thinking_tokens(
    options: Mapping[str, Any], max_tokens: int | None, messages: Sequence[Mapping[str, Any]]
) -> int | None:
    """Return the budget of extended thinking, None if the request has none.

    None too if `max_tokens` leaves no room for the least budget, or between the calls of one turn, which the API
    continues only with the signed thoughts that it sent before.
    """
    effort, budget = options.get("reasoning_effort"), options.get("thinking_budget")
    if (effort is None and budget is None) or effort == NO_EFFORT or _continues_calls(messages):
        return None
    wanted = max(MIN_THINKING_TOKENS, THINKING_TOKENS[effort or "medium"] if budget is None else budget)
    if max_tokens is None:
        return wanted
    return None if max_tokens <= MIN_THINKING_TOKENS else min(wanted, max_tokens - 1)


def _continues_calls(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the conversation goes on after results of tools."""
    last = next((message for message in reversed(messages) if message["role"] == "assistant"), None)
    return last is not None and bool(last.get("tool_calls"))


def messages_body(submit: ChatSubmit, model: str, max_tokens: int) -> dict[str, Any]:
    """Return the body of `/v1/messages` for a request without refused fields."""
    system, messages = _split(submit.messages)
    body: dict[str, Any] = {"model": model, "max_tokens": max_tokens, "stream": True, "messages": messages}
    if system:
        body["system"] = system
    thinking = thinking_tokens(submit.options, max_tokens, submit.messages)
    if thinking is not None:
        body["thinking"] = {"type": "enabled", "budget_tokens": thinking}
    sampling = submit.sampling
    if sampling.top_p == 0:  # means greedy sampling
        body["temperature"] = 0.0
    else:
        body |= {"temperature": sampling.temperature} if sampling.temperature != 1 else {}
        body |= {"top_p": sampling.top_p} if sampling.top_p != 1 else {}
    if sampling.top_k:
        body["top_k"] = sampling.top_k
    if stops := [stop for stop in submit.stopping.stop if stop.strip()]:  # the gateway finds the others
        body["stop_sequences"] = stops
    if "tools" in submit.options:
        body["tools"] = [_tool(tool["function"]) for tool in submit.options["tools"]]
        body["tool_choice"] = _tool_choice(submit.options)
    if submit.grammar is not None:
        schema = msgspec.json.decode(submit.grammar.text)
        body["output_config"] = {"format": {"type": "json_schema", "schema": schema}}
    return body


def _must_call(options: Mapping[str, Any]) -> bool:
    return "tools" in options and options.get("tool_choice") != "auto"


def _samples_otherwise(submit: ChatSubmit) -> bool:
    sampling = submit.sampling
    return sampling.temperature != 1 or sampling.top_p != 1 or sampling.top_k != 0


def _split(messages: Sequence[Mapping[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """Return the system prompt, and the other messages with neighbours of one role as one."""
    systems: list[str] = []
    found: list[dict[str, Any]] = []
    last = len(messages) - 1
    for number, message in enumerate(messages):
        if message["role"] in ("system", "developer"):
            systems.append(_text_of(message["content"]))
            continue
        role = "assistant" if message["role"] == "assistant" else "user"
        blocks = _blocks(message)
        if role == "assistant" and number == last and blocks and blocks[-1]["type"] == "text":
            blocks[-1] = {"type": "text", "text": blocks[-1]["text"].rstrip()}  # which the API demands of its end
        if found and found[-1]["role"] == role:
            found[-1]["content"] += blocks
        elif blocks:
            found.append({"role": role, "content": blocks})
    return "\n\n".join(filter(None, systems)), found


def _blocks(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the content blocks of one message. The API refuses empty texts."""
    if message["role"] == "tool":
        result = {"type": "tool_result", "tool_use_id": _call_id(message["tool_call_id"])}
        return [result | {"content": _parts(message["content"])}]
    blocks = _parts(message["content"])
    for call in message.get("tool_calls") or ():
        function = call["function"]
        arguments = as_object(parsed_arguments(function["arguments"]))
        blocks.append(
            {"type": "tool_use", "id": _call_id(call["id"]), "name": function["name"], "input": arguments}
        )  # fmt: skip
    return blocks


def _parts(content: Any) -> list[dict[str, Any]]:
    if not isinstance(content, list):
        return [{"type": "text", "text": content}] if content else []
    blocks = []
    for part in content:
        if part["type"] == "image":
            media_type, _, data = part["image"].encoded[1:-1].removeprefix(b"data:").partition(b";base64,")
            source = {"type": "base64", "media_type": media_type.decode(), "data": data.decode()}
            blocks.append({"type": "image", "source": source})
        elif part["text"]:
            blocks.append({"type": "text", "text": part["text"]})
    return blocks


def _text_of(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content if part["type"] == "text")
    return content or ""


def _call_id(call_id: str) -> str:
    """Return the id in the characters that the API accepts; the same for a call and its result."""
    return _NOT_OF_IDS.sub("_", call_id)[:_MAX_ID_CHARS] or "call"


def _tool(function: Mapping[str, Any]) -> dict[str, Any]:
    tool = {"name": function["name"], "input_schema": {"type": "object"} | function["parameters"]}
    if function.get("description"):
        tool["description"] = function["description"]
    return tool | ({"strict": True} if function.get("strict") else {})


def _tool_choice(options: Mapping[str, Any]) -> dict[str, Any]:
    chosen = options.get("tool_choice", "auto")
    found: dict[str, Any] = {"type": "any" if chosen == "required" else "auto"}
    if isinstance(chosen, dict):
        found = {"type": "tool", "name": chosen["function"]["name"]}
    return found | ({"disable_parallel_tool_use": True} if options.get("parallel_tool_calls") is False else {})
