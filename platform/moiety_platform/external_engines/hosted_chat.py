"""OpenAI's chats at a hosted provider: only fields of OpenAI's documentation, and none with its default value.

Models differ in the parameters that they accept, so a default that the client did not send must not be sent either.
"""

from __future__ import annotations

from typing import Any

from moiety_platform.engine_addresses import ExternalAddress
from moiety_platform.engine_client.chat_submit import ChatSubmit
from moiety_platform.external_engines.chat import ChatCompletions
from moiety_platform.external_engines.completions import MAX_STOP_STRINGS
from moiety_wire.messages import Submit

MAX_CHAT_LOGPROBS = 20
_DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


class HostedChat(ChatCompletions):
    """Dialect of a hosted provider with OpenAI's chats, for one request. Implements Dialect."""

    def __init__(self, address: ExternalAddress) -> None:
        super().__init__(address)
        assert address.hosted is not None, "made for hosted providers"
        self._limit_field = address.hosted.limit_field

    @property
    def max_num_logprobs(self) -> int:
        return MAX_CHAT_LOGPROBS

    def body(self, submit: Submit, prompt_ids: list[int], max_tokens: int, min_tokens: int) -> dict[str, Any]:
        assert isinstance(submit, ChatSubmit), "made for chats"
        body = super().body(submit, prompt_ids, max_tokens, min_tokens)
        for name, default in _DEFAULTS.items():
            if body[name] == default:
                del body[name]
        body[self._limit_field] = body.pop("max_tokens")
        stops = submit.stopping.stop  # the provider's reasoning is no part of what it searches for them
        if stops and len(stops) <= MAX_STOP_STRINGS:
            body["stop"] = list(stops)
        return body
