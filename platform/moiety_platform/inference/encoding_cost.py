"""Estimate of how long it takes to encode prompts, in bytes of text. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moiety_platform.inference.generation import Conversation, Prompt, TextPair
from moiety_text.conversation import ConversationEncoder, texts_of
from moiety_text.tools.offer import ToolOffer

MESSAGE_COST = 64  # of rendering one more message
ID_COST = 4  # of checking one token id
PLAIN_FIELDS = 2  # of a message with a role and a text


def is_short(prompts: Sequence[Prompt], inline_bytes: int, encoder: ConversationEncoder | None) -> bool:
    """Return whether encoding takes less time than a thread costs, and no text spells a control token.

    `inline_bytes` is the cost of a thread. The cost of the prompts is an estimate, but True is always safe.
    """
    left = inline_bytes
    for prompt in prompts:
        if isinstance(prompt, tuple):
            left -= ID_COST * len(prompt)
        elif isinstance(prompt, str):
            left -= _num_bytes(prompt, left)
        elif isinstance(prompt, TextPair):
            return False
        else:
            left = _after_conversation(prompt, left, encoder)
        if left < 0:
            return False
    return True


def tools_for_template(offer: ToolOffer) -> list[dict[str, Any]]:
    """Return the tools in the format of chat templates."""
    return [tool.for_template() for tool in offer.tools]


def _after_conversation(prompt: Conversation, left: int, encoder: ConversationEncoder | None) -> int:
    """Return the rest of the byte budget `left` after the conversation's texts.

    A negative result means that the budget is exceeded or that a text spells a control token.
    """
    tools = [] if prompt.tools is None else tools_for_template(prompt.tools)
    left -= MESSAGE_COST * (len(prompt.messages) - 1 + len(tools))
    if left < 0:
        return left
    texts, room = [prompt.prefill] if prompt.prefill else [], left - len(prompt.prefill)
    others: list[Any] = [tools, prompt.template_options] if tools or prompt.template_options else []
    for message in prompt.messages:
        content = message.get("content")
        if len(message) > PLAIN_FIELDS or not isinstance(content, str):
            others.append(message)
        else:
            room -= len(content)
            texts.append(content)
    for text in texts_of(others) if others and room >= 0 else ():
        room -= len(text)
        if room < 0:  # stop early: the rest may be megabytes
            return room
        texts.append(text)
    if room < 0:
        return room
    text = "".join(texts)
    left -= len(text) if text.isascii() else _num_bytes(text, left)
    return -1 if encoder is not None and encoder.is_control_token_in(texts) else left


def _num_bytes(text: str, at_most: int) -> int:
    return len(text) if len(text) > at_most or text.isascii() else len(text.encode(errors="replace"))
