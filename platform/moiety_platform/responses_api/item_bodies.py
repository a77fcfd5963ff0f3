"""Fields of all bodies that have a conversation: `/v1/responses`, its compaction and its count of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, PrivateAttr, StringConstraints, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from moiety_platform.errors import BadRequest
from moiety_platform.inference.body_fields import InferenceBody, ModelName, StrictBody, refuse, shape_of
from moiety_platform.inference.field_support import mapped
from moiety_platform.responses_api.call_input import CustomResultItem, ResultItem, SearchResultItem
from moiety_platform.responses_api.calls import OfferedTool
from moiety_platform.responses_api.content import has_detail
from moiety_platform.responses_api.history import check_results, messages_of
from moiety_platform.responses_api.input import (
    AdditionalTools,
    CompactionTrigger,
    InputItem,
    InputItems,
    MessageItem,
    SkippedItem,
)
from moiety_platform.responses_api.items import HAVE_TOOLS, Continued, Item
from moiety_platform.responses_api.tool_choice import ResponseChoice
from moiety_platform.responses_api.tools import (
    ResponseTool,
    ResponseTools,
    check_offered,
    offered_by,
    readable_type,
    skipped_types,
    tools_of_item,
)


class ConversationReference(StrictBody):
    """A conversation, by its id."""

    id: Annotated[str, StringConstraints(min_length=1, max_length=128)]


def _as_reference(value: Any) -> Any:
    return {"id": value} if isinstance(value, str) else value


GivenConversation = Annotated[
    ConversationReference, BeforeValidator(_as_reference, json_schema_input_type=str | ConversationReference)
]


class ItemsBody(InferenceBody):
    """Base of bodies with items in `input`. Items are complete once `resolved` has returned the body."""

    model: ModelName
    input: InputItems | None = None
    instructions: str | None = None
    previous_response_id: str | None = None

    _continued: Continued = PrivateAttr(Continued())
    _given: tuple[Item, ...] | None = PrivateAttr(None)
    _read: tuple[Item, ...] | None = PrivateAttr(None)

    @property
    def wants_compaction(self) -> bool:
        """True if the last item asks for a compaction of the conversation in place of an answer."""
        return isinstance(next(reversed(self.input or []), None), CompactionTrigger)

    @property
    def conversation_id(self) -> str | None:
        """The conversation that the request adds to. Only some bodies can name one."""
        return None

    @property
    def continued(self) -> Continued:
        """The conversation that the request continues."""
        return self._continued

    def items(self) -> list[Item]:
        """Return the items of the request itself, as they are stored."""
        if self._given is not None:
            return list(self._given)
        return [checked for item in self.input or () if (checked := item.checked()) is not None]

    def resolved(self, continued: Continued, given: Sequence[Item], read: Sequence[Item]) -> Self:
        """Return a copy of the request that continues a conversation.

        `given` are the request's own items without references, and `read` are all items of the conversation as the
        model reads them.
        """
        body = self.model_copy()
        body._continued, body._given, body._read = continued, tuple(given), tuple(read)
        return body

    def all_items(self) -> list[Item]:
        """Return all items of the conversation, as the model reads them."""
        return self.items() if self._read is None else list(self._read)

    def messages(self) -> tuple[dict[str, Any], ...]:
        """Return the conversation for the chat template. Raises BadRequest if calls and results do not match."""
        items = self.all_items()
        check_results(items)
        instructions = [{"role": "system", "content": self.instructions}] if self.instructions else []
        return (*instructions, *messages_of(items))

    def skipped_entries(self) -> Iterator[str]:
        """Yield the types of items that have no effect."""
        yield from {f"input.{readable_type(item.type)}" for item in self.input or () if isinstance(item, SkippedItem)}
        contents = [item.content for item in self.input or () if isinstance(item, MessageItem)]
        contents += [item.output for item in self.input or () if isinstance(item, ResultItem | CustomResultItem)]
        if any(map(has_detail, contents)):
            yield "input.input_image.detail"


class ToolItemsBody(ItemsBody):
    """Base of bodies with tools beside items, some of which may have tools too, and with a conversation."""

    conversation: GivenConversation | None = None
    tools: Annotated[
        ResponseTools | None,
        mapped(
            "Tools that OpenAI's servers run are skipped, unless `tool_choice` requires one. A custom tool's grammar "
            "that cannot be enforced is refused."
        ),
    ] = None
    tool_choice: ResponseChoice | None = None
    parallel_tool_calls: bool | None = None

    _max_tools: int = PrivateAttr(0)

    @field_validator("tool_choice")
    @classmethod
    def _choice_among_tools(cls, value: ResponseChoice | None, info: ValidationInfo) -> ResponseChoice | None:
        is_new = not info.data.get("previous_response_id") and not info.data.get("conversation")
        if value is not None and is_new and info.data.keys() >= {"tools", "input"}:
            value.check(_offered(_all_tools(info.data["tools"], info.data["input"])))
        return value

    @model_validator(mode="after")
    def _check_continued(self, info: ValidationInfo) -> Self:
        if self.conversation is not None and self.previous_response_id is not None:
            raise refuse("'conversation' and 'previous_response_id' exclude each other; send one of them")
        self._max_tools = shape_of(info).max_tools
        check_offered(self.offered, self._max_tools)
        return self

    @property
    def conversation_id(self) -> str | None:
        """The conversation that the request adds to."""
        return None if self.conversation is None else self.conversation.id

    @cached_property
    def offered(self) -> list[OfferedTool]:
        """The functions of the model for the tools in `tools` and in items of the whole conversation."""
        learned = [tool for item in self._read or () if item["type"] in HAVE_TOOLS for tool in tools_of_item(item)]
        return _offered([*_all_tools(self.tools, self.input), *learned])

    def resolved(self, continued: Continued, given: Sequence[Item], read: Sequence[Item]) -> Self:
        """Return a copy of the request that continues a conversation, whose items may have tools too.

        Raises BadRequest if they are too many, or `tool_choice` requires another one.
        """
        body = super().resolved(continued, given, read)
        body.__dict__.pop("offered", None)  # of the request alone
        for param, check in (("tools", body._check_tools), ("tool_choice", body._check_choice)):
            try:
                check()
            except PydanticCustomError as error:
                raise BadRequest(f"{param!r}: {error.message()}", param=param) from None
        return body

    def _check_tools(self) -> None:
        check_offered(self.offered, self._max_tools)

    def _check_choice(self) -> None:
        if self.tool_choice is not None:
            self.tool_choice.check(self.offered)

    def skipped_entries(self) -> Iterator[str]:
        """Yield the types of tools and items that have no effect."""
        yield from super().skipped_entries()
        yield from {f"tools.{kind}" for kind in skipped_types(_all_tools(self.tools, self.input))}


def _all_tools(tools: Sequence[ResponseTool] | None, items: Sequence[InputItem] | None) -> list[ResponseTool]:
    found = list(tools or ())
    for item in items or ():
        if isinstance(item, AdditionalTools | SearchResultItem):
            found += item.tools
    return found


def _offered(tools: Sequence[ResponseTool]) -> list[OfferedTool]:
    """Return the functions of the model for the tools. A search may find a tool again."""
    found: dict[str, OfferedTool] = {}
    for one in offered_by(tools):
        found.setdefault(one.tool.name, one)
    return list(found.values())
