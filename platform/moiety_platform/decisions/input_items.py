"""Items of `input`: messages, calls of tools and their results, and the text in which a model reads them.

The items are what a question is about. They are no turns of the model's own conversation, so several items are shown
as JSON objects, one a line: this form needs no support of the model's chat template for roles and calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field, StringConstraints
from pydantic_core import PydanticCustomError

from moiety_platform.decisions.content import Parts, text_of
from moiety_platform.inference.body_fields import (
    MAX_MESSAGES,
    StrictBody,
    bounded,
    known_role,
    or_text,
    refuse,
    shows,
)
from moiety_platform.inference.typed_values import UnknownType, named_type

ROLES = ("user", "assistant", "system", "developer")

_CallId = Annotated[str, StringConstraints(min_length=1, max_length=256)]
_Name = Annotated[str, StringConstraints(min_length=1, max_length=256)]


class DecisionMessage(StrictBody):
    """One message."""

    type: Literal["message"] | None = None
    role: Annotated[str, known_role(ROLES), shows(enum=list(ROLES))]
    content: Parts

    def shown(self) -> dict[str, Any]:
        """Return the item as the model reads it."""
        return {"role": self.role, "content": text_of(self.content)}


class _AnyCall(StrictBody):
    """A call of a function or of a custom tool."""

    call_id: _CallId
    name: _Name
    namespace: _Name | None = None

    def _shown_with(self, **given: str) -> dict[str, Any]:
        """Return the call as the model reads it, with what it was given."""
        name = self.name if self.namespace is None else f"{self.namespace}.{self.name}"
        return {"call": name, "call_id": self.call_id, **given}


class DecisionCall(_AnyCall):
    """A function call."""

    type: Literal["function_call"]
    arguments: str

    def shown(self) -> dict[str, Any]:
        """Return the item as the model reads it."""
        return self._shown_with(arguments=self.arguments)


class DecisionCustomCall(_AnyCall):
    """A call of a custom tool."""

    type: Literal["custom_tool_call"]
    input: str

    def shown(self) -> dict[str, Any]:
        """Return the item as the model reads it."""
        return self._shown_with(input=self.input)


class DecisionCallOutput(StrictBody):
    """The result of a call that an earlier item has made."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: _CallId
    output: Parts

    def shown(self) -> dict[str, Any]:
        """Return the item as the model reads it."""
        return {"output_of": self.call_id, "output": text_of(self.output)}


class _OtherDecisionItem(UnknownType):
    """An item of an unknown type."""

    @staticmethod
    def refusal(kind: str) -> str:
        return f"items of type {kind!r} are unknown; send {', '.join(_ITEMS)}"


DecisionItem = DecisionMessage | DecisionCall | DecisionCustomCall | DecisionCallOutput

_ITEMS: dict[str, type[DecisionItem]] = {
    "message": DecisionMessage,
    "function_call": DecisionCall,
    "function_call_output": DecisionCallOutput,
    "custom_tool_call": DecisionCustomCall,
    "custom_tool_call_output": DecisionCallOutput,
}


DecisionItems = Annotated[
    list[Annotated[DecisionItem, named_type(_ITEMS, _OtherDecisionItem, DecisionItem, default="message")]],
    Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES),
    bounded(lambda shape: shape.max_messages),
    or_text(lambda text, _info: {"role": "user", "content": text}, "items"),
]


def problems_of_calls(items: Sequence[DecisionItem]) -> Iterator[PydanticCustomError]:
    """Yield an error for each result whose call no earlier item has made."""
    made: set[tuple[str, str]] = set()
    for number, item in enumerate(items):
        if isinstance(item, DecisionCall | DecisionCustomCall):
            made.add((item.type, item.call_id))
        elif isinstance(item, DecisionCallOutput) and (item.type.removesuffix("_output"), item.call_id) not in made:
            yield refuse(
                f"'input.{number}' has the result of the call {item.call_id[:64]!r}, but no earlier "
                f"{item.type.removesuffix('_output')!r} has this call_id; send the call, or leave the result out"
            )


def input_text(items: Sequence[DecisionItem]) -> str:
    """Return the text in which a model reads the items: a single user's message as its text, others as JSON lines."""
    if len(items) == 1 and isinstance(items[0], DecisionMessage) and items[0].role == "user":
        return text_of(items[0].content)
    return "\n".join(msgspec.json.encode(item.shown()).decode() for item in items)
