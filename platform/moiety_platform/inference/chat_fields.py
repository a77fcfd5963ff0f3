"""Conversations in OpenAI's fields for chats, as external engines get those with images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moiety_platform.inference.generation import Conversation
from moiety_platform.inference.tool_fields import arguments_text, call_for_template
from moiety_platform.inference.tool_result_images import with_images_after_results
from moiety_text.tools.offer import Tool, ToolOffer


def chat_messages(conversation: Conversation) -> tuple[dict[str, Any], ...]:
    """Return the messages. OpenAI's results of tools are texts, so their images are in a user's message after them."""
    return tuple(map(_message, with_images_after_results(conversation.messages)))


def chat_options(conversation: Conversation, variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields beside the messages. `variables` are those of the chat template."""
    options: dict[str, Any] = {"chat_template_kwargs": dict(variables)} if variables else {}
    offer = conversation.tools
    if offer is not None:
        options |= {"tools": [_tool(tool) for tool in offer.tools], "tool_choice": _choice(offer)}
        if not offer.parallel:
            options["parallel_tool_calls"] = False
    return options


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_call(call) for call in calls]} if calls else dict(message)


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return call_for_template(call["id"], function["name"], arguments_text(function["arguments"]))


def _tool(tool: Tool) -> dict[str, Any]:
    shown = tool.for_template()
    return {**shown, "function": {**shown["function"], "strict": True}} if tool.strict else shown


def _choice(offer: ToolOffer) -> Any:
    if offer.forced is not None:
        return {"type": "function", "function": {"name": offer.forced}}
    return "required" if offer.must_call else "auto"
