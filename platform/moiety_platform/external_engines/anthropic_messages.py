"""Anthropic's streamed `/v1/messages` at a hosted provider."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moiety_platform.engine_addresses import ExternalAddress
from moiety_platform.engine_client.chat_submit import ChatSubmit
from moiety_platform.errors import PlatformError
from moiety_platform.external_engines.answer_writer import AnswerWriter
from moiety_platform.external_engines.anthropic_request import messages_body, refused_fields
from moiety_platform.external_engines.dialect import FINISH_REASONS, AnswerDelta, MalformedAnswer, count_of
from moiety_platform.external_engines.failures import error_of_event
from moiety_wire.messages import FinishReason, Submit

VERSION_HEADERS = {"anthropic-version": "2023-06-01"}
_FINISH_REASONS = {
    **FINISH_REASONS,
    "tool_use": FinishReason.STOP,
    "pause_turn": FinishReason.STOP,
    "model_context_window_exceeded": FinishReason.LENGTH,
}


class AnthropicMessages:
    """Dialect of Anthropic's messages for one request. Implements Dialect."""

    path = "/v1/messages"
    keeps_alive = True
    max_num_logprobs = 0

    def __init__(self, address: ExternalAddress) -> None:
        self._model = address.model
        self._writer = AnswerWriter()
        self._calls: set[int | None] = set()  # indices of content blocks that call the client's tools

    def refusal(self, submit: Submit) -> str:
        assert isinstance(submit, ChatSubmit), "made for chats"
        return ", ".join(refused_fields(submit))

    def body(self, submit: Submit, prompt_ids: list[int], max_tokens: int, min_tokens: int) -> dict[str, Any]:
        assert isinstance(submit, ChatSubmit), "made for chats"
        return messages_body(submit, self._model, max_tokens)

    def read(self, event: dict[str, Any]) -> AnswerDelta | PlatformError:
        error = event.get("error")
        if error is not None:
            return error_of_event(error)
        index, text = count_of(event.get("index")), ""
        match event.get("type"):
            case "message_start":
                return _counted(_object(event.get("message")).get("usage"), with_output=False)
            case "message_delta":
                return self._ended(_object(event.get("delta")), event.get("usage"))
            case "content_block_start":
                text = self._begun(index, _object(event.get("content_block")))
            case "content_block_delta":
                text = self._more(index, _object(event.get("delta")))
        return AnswerDelta(text=text, is_last=event.get("type") == "message_stop")  # others, such as ping, have no text

    def _begun(self, index: int | None, block: Mapping[str, Any]) -> str:
        """Return the text that a new content block adds. Raises MalformedAnswer."""
        match block.get("type"):
            case "text":
                return self._writer.add_content(_text(block, "text"))
            case "thinking":
                return self._writer.add_thought(_text(block, "thinking"))
            case "tool_use":
                self._calls.add(index)
                self._writer.add_call(index, _text(block, "name"), "")
        return ""

    def _more(self, index: int | None, delta: Mapping[str, Any]) -> str:
        """Return the text that a part of a content block adds. Raises MalformedAnswer."""
        match delta.get("type"):
            case "text_delta":
                return self._writer.add_content(_text(delta, "text"))
            case "thinking_delta":
                return self._writer.add_thought(_text(delta, "thinking"))
            case "input_json_delta" if index in self._calls:
                self._writer.add_call(index, "", _text(delta, "partial_json"))
        return ""

    def _ended(self, delta: Mapping[str, Any], usage: Any) -> AnswerDelta:
        reason, stop = delta.get("stop_reason"), delta.get("stop_sequence")
        counted = _counted(usage, with_output=True)
        if not isinstance(reason, str) or not reason:
            return counted
        return AnswerDelta(
            text=self._writer.end(),
            num_output_tokens=counted.num_output_tokens,
            num_cached_tokens=counted.num_cached_tokens,
            num_prompt_tokens=counted.num_prompt_tokens,
            finish=_FINISH_REASONS.get(reason),
            stop_string=stop if isinstance(stop, str) else None,
        )


def _counted(usage: Any, *, with_output: bool) -> AnswerDelta:
    """Return the counts of a usage object.

    The prompt's tokens are those that the provider computed, wrote to its cache and read from it. The output's count at
    the start is only a beginning.
    """
    if not isinstance(usage, dict):
        return AnswerDelta(text="")
    computed, cached = count_of(usage.get("input_tokens")), count_of(usage.get("cache_read_input_tokens"))
    num_output = count_of(usage.get("output_tokens")) if with_output else None
    if computed is None:
        return AnswerDelta(text="", num_output_tokens=num_output)
    written = count_of(usage.get("cache_creation_input_tokens")) or 0
    num_prompt = computed + written + (cached or 0)
    return AnswerDelta(
        text="", num_output_tokens=num_output, num_prompt_tokens=num_prompt, num_cached_tokens=cached or 0
    )  # fmt: skip


def _object(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise MalformedAnswer("an event lacks an object of its type")
    return value


def _text(block: Mapping[str, Any], name: str) -> str:
    text = block.get(name) or ""
    if not isinstance(text, str):
        raise MalformedAnswer(f"{name!r} of a content block is not a string")
    return text
