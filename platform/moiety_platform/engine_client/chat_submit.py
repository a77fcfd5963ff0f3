"""A request for an engine that gets the conversation itself in place of its token ids."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from moiety_wire.messages import Submit

NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


class ChatSubmit(Submit, frozen=True, tag="submit"):
    """Request with a conversation in OpenAI's fields for chats, for external engines.

    `prompt_ids` are an estimate: the tokens of the text, and an allowance for each image. The engine's own count is
    billed. Images are parts `{"type": "image", "image": PromptImage}` with their files encoded.
    """

    messages: tuple[dict[str, Any], ...] = ()
    options: Mapping[str, Any] = NO_OPTIONS  # further fields, such as `tools` and `chat_template_kwargs`
    is_hosted: bool = False  # for a hosted provider, which gets all conversations
