"""Edits of a conversation before the model reads it: clearing of old reasoning and of old tool uses. Pure.

They are those of Anthropic's context editing
(https://platform.claude.com/docs/en/build-with-claude/context-editing).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import msgspec

REASONING = "reasoning_content"  # field of chat templates' messages
CLEARED_RESULT = "[The result of this tool call was cleared to save context.]"

Messages = tuple[dict[str, Any], ...]


class ReasoningClearing(msgspec.Struct, frozen=True):
    """Removal of the reasoning of all answers but the last `num_kept` that have any."""

    num_kept: int

    def is_triggered(self, messages: Messages, num_tokens: int, max_context_tokens: int) -> bool:
        return True

    def clears_enough(self, num_tokens: int) -> bool:
        return True

    def edit(self, messages: Messages) -> tuple[Messages, int]:
        """Return the messages after the edit, and the number of answers whose reasoning is removed."""
        cleared = {place for place, message in enumerate(messages) if REASONING in message}
        cleared.difference_update(sorted(cleared)[-self.num_kept :])
        edited = tuple(
            {key: value for key, value in message.items() if key != REASONING} if place in cleared else message
            for place, message in enumerate(messages)
        )
        return edited, len(cleared)


class ToolUseClearing(msgspec.Struct, frozen=True):
    """Replacement of the results of all tool uses but the last `num_kept` by a text that says so.

    The edit is made if the conversation has more than `trigger_tokens` tokens or more than `trigger_uses` tool uses,
    whichever is given, or does not fit the model's context, and if it clears at least `least_tokens` tokens.
    """

    trigger_tokens: int | None
    trigger_uses: int | None
    num_kept: int
    least_tokens: int = 0
    excluded_tools: Collection[str] = ()  # whose uses stay as they are
    clears_inputs: bool | Collection[str] = False  # whether inputs are cleared too, or the tools whose inputs are

    def is_triggered(self, messages: Messages, num_tokens: int, max_context_tokens: int) -> bool:
        """Return whether the conversation of `num_tokens` tokens is to be edited."""
        if num_tokens >= max_context_tokens or (self.trigger_tokens is not None and num_tokens > self.trigger_tokens):
            return True
        return self.trigger_uses is not None and sum(1 for _ in _calls_of(messages)) > self.trigger_uses

    def clears_enough(self, num_tokens: int) -> bool:
        """Return whether the edit is worth the cached prefix that it changes."""
        return num_tokens >= self.least_tokens

    def edit(self, messages: Messages) -> tuple[Messages, int]:
        """Return the messages after the edit, and the number of tool uses that it changes.

        A result that is not longer than its replacement stays as it is.
        """
        names = [call["function"]["name"] for call in _calls_of(messages)]
        old_names = names[: max(0, len(names) - self.num_kept)]
        old = {use for use, name in enumerate(old_names) if name not in self.excluded_tools}
        edited, cleared, uses, num_uses = list(messages), set[int](), dict[str, int](), 0
        for place, message in enumerate(messages):
            if message["role"] == "tool":
                use = uses.get(message["tool_call_id"], -1)
                if use in old and _is_long(message["content"]):
                    edited[place] = {**message, "content": CLEARED_RESULT}
                    cleared.add(use)
            elif calls := message.get("tool_calls"):
                numbered = list(enumerate(calls, num_uses))
                emptied = {use for use, call in numbered if use in old and self._empties(call["function"])}
                if emptied:
                    kept = [_without_input(call) if use in emptied else call for use, call in numbered]
                    edited[place] = {**message, "tool_calls": kept}
                cleared |= emptied
                uses.update((call["id"], use) for use, call in numbered)  # an id may be used again
                num_uses += len(calls)
        return tuple(edited), len(cleared)

    def _empties(self, function: dict[str, Any]) -> bool:
        clears = self.clears_inputs
        return bool(function["arguments"]) and (clears if isinstance(clears, bool) else function["name"] in clears)


ContextEdit = ReasoningClearing | ToolUseClearing


class AppliedEdit(msgspec.Struct, frozen=True):
    """An edit that has changed the conversation."""

    edit: ContextEdit
    num_cleared: int  # answers without their reasoning, or tool uses
    num_tokens: int  # cleared tokens of the prompt


def _calls_of(messages: Messages) -> Iterator[dict[str, Any]]:
    for message in messages:
        yield from message.get("tool_calls", ())


def _is_long(content: Any) -> bool:
    """Return whether a tool's result is longer than its replacement; one with images is."""
    return not isinstance(content, str) or len(content) > len(CLEARED_RESULT)


def _without_input(call: dict[str, Any]) -> dict[str, Any]:
    return {**call, "function": {**call["function"], "arguments": {}}}
