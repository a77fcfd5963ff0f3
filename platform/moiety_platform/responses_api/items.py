"""The items of a conversation: as clients send them, as they are kept and listed, and as the chat template gets them.

An item that was checked is a plain object in the form in which OpenAI's API lists it, whether a client or a model made
it. It gets an id when it is kept.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from moiety_platform.completions.fields import MAX_PARTS, StrictBody, refuse

Item = dict[str, Any]

ROLES = ("user", "assistant", "system", "developer")
MESSAGE = "message"
MESSAGE_PREFIX = "msg_"


@dataclass(frozen=True, slots=True)
class Continued:
    """The kept conversation that a response continues: its items in order, and their size as they are kept."""

    last_id: str | None = None
    items: tuple[Item, ...] = ()
    num_bytes: int = 0


class TextPart(StrictBody):
    type: str
    text: str

    @field_validator("type")
    @classmethod
    def _only_text(cls, value: str) -> str:
        if value not in ("input_text", "output_text"):
            raise refuse(f"parts of type {value[:64]!r} are not supported; send text as 'input_text' or 'output_text'")
        return value


def _part_type(role: str | None) -> str:
    return "output_text" if role == "assistant" else "input_text"


def _as_parts(value: Any, info: ValidationInfo) -> Any:
    """A string is short for one part. One form inside means that complaints name the place."""
    if isinstance(value, str):
        return [{"type": _part_type(info.data.get("role")), "text": value}]
    if value is not None and not isinstance(value, list):
        raise refuse("it must be a string or a list of text parts")
    return value


Parts = Annotated[list[TextPart], Field(fail_fast=True, max_length=MAX_PARTS)]


class InputItem(StrictBody):
    """One item of `input`: a message, for which the type may be left out."""

    type: str = MESSAGE
    role: str | None = None
    content: Annotated[Parts | None, BeforeValidator(_as_parts)] = None

    @field_validator("type")
    @classmethod
    def _known_type(cls, value: str) -> str:
        if value == "item_reference":
            raise refuse("references are not supported; send the item itself, or use 'previous_response_id'")
        if value != MESSAGE:
            raise refuse(f"items of type {value[:64]!r} are not supported yet; send messages")
        return value

    @field_validator("role")
    @classmethod
    def _known_role(cls, value: str | None) -> str | None:
        if value is not None and value not in ROLES:
            raise refuse(f"{value[:64]!r} is not a role; use one of {', '.join(ROLES)}")
        return value

    @model_validator(mode="after")
    def _check_whole(self) -> Self:
        if self.role is None or self.content is None:
            raise refuse("a message needs 'role' and 'content'")
        wanted = _part_type(self.role)
        for part in self.content:
            if part.type != wanted:
                raise refuse(f"a message whose role is {self.role!r} has parts of type {wanted!r}, not {part.type!r}")
        return self

    def checked(self) -> Item:
        """The item as it is kept."""
        parts = self.content or []
        if self.role == "assistant":
            return message_item([text_part(part.text) for part in parts])
        content = [{"type": "input_text", "text": part.text} for part in parts]
        return {"type": MESSAGE, "status": "completed", "role": self.role, "content": content}


def as_items(value: Any) -> Any:
    """A string is short for one message of the user's."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise refuse("it must be a string or a list of items")
    return value


def text_part(text: str, logprobs: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """A part of an answer."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs or []}


def message_item(parts: list[dict[str, Any]], status: str = "completed") -> Item:
    """A message of the model's."""
    return {"type": MESSAGE, "status": status, "role": "assistant", "content": parts}


def with_ids(items: Iterable[Item]) -> list[Item]:
    """The items, each of them with an id."""
    return [{"id": MESSAGE_PREFIX + secrets.token_hex(16), **item} for item in items]


def messages_of(items: Iterable[Item]) -> Iterable[dict[str, Any]]:
    """The items as messages for the model's chat template."""
    for item in items:
        role = "system" if item["role"] == "developer" else item["role"]
        yield {"role": role, "content": "\n".join(part["text"] for part in item["content"])}
