"""OpenAI's streamed `/v1/chat/completions`, for conversations with images.

The parts of the answer are written as one text, for the reader of `ExternalModelText`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import msgspec

from moiety_platform.engine_addresses import ExternalAddress, ExternalKind
from moiety_platform.engine_client.chat_submit import ChatSubmit
from moiety_platform.errors import PlatformError
from moiety_platform.external_engines.answer_writer import AnswerWriter
from moiety_platform.external_engines.completions import Completions, choice_of, counts_of
from moiety_platform.external_engines.dialect import (
    FAILED_FINISH,
    FINISH_REASONS,
    AnswerDelta,
    DeltaLogprob,
    MalformedAnswer,
    count_of,
)
from moiety_platform.external_engines.failures import ended_by_error, error_of_event
from moiety_wire.grammars import GrammarKind, GrammarSpec
from moiety_wire.messages import Submit

_JSON = (GrammarKind.JSON_OBJECT, GrammarKind.JSON_SCHEMA)
_NOT_OF_CHATS = ("logprobs", "prompt", "return_token_ids", "return_tokens_as_token_ids", "skip_special_tokens")
_EXTENDED = (ExternalKind.VLLM, ExternalKind.SGLANG)


class ChatCompletions:
    """Dialect of OpenAI's chats for one request. Implements Dialect."""

    path = "/v1/chat/completions"

    def __init__(self, address: ExternalAddress) -> None:
        self._kind = address.kind
        self._is_extended = address.kind in _EXTENDED
        as_documented = address if self._is_extended else dataclasses.replace(address, kind=ExternalKind.GENERIC)
        self._completions = Completions(as_documented)
        self._shares_cache = address.shared_cache
        self._writer = AnswerWriter()

    @property
    def max_num_logprobs(self) -> int:
        return self._completions.max_num_logprobs

    @property
    def keeps_alive(self) -> bool:
        return self._kind is not ExternalKind.LLAMA_CPP

    def refusal(self, submit: Submit) -> str:
        assert isinstance(submit, ChatSubmit), "made for chats"
        if submit.messages[-1]["role"] == "assistant" and not self._is_extended:
            return "an answer that the client has begun"
        grammar = submit.grammar
        if grammar is not None and grammar.kind not in _JSON and self._kind is not ExternalKind.VLLM:
            return f"a form of answers of the kind {grammar.kind.value!r}"
        return self._completions.refusal(_as_completion(submit))

    def body(self, submit: Submit, prompt_ids: list[int], max_tokens: int, min_tokens: int) -> dict[str, Any]:
        assert isinstance(submit, ChatSubmit), "made for chats"
        body = self._completions.body(_as_completion(submit), prompt_ids, max_tokens, min_tokens)
        for name in _NOT_OF_CHATS:
            body.pop(name, None)
        body |= {"messages": [self._message(message) for message in submit.messages], **submit.options}
        if not self._is_extended:
            body.pop("chat_template_kwargs", None)
        elif submit.messages[-1]["role"] == "assistant":
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        if self._kind is ExternalKind.LLAMA_CPP:
            body["cache_prompt"] = self._shares_cache
        if submit.sampling.num_logprobs is not None:
            body |= {"logprobs": True, "top_logprobs": submit.sampling.num_logprobs}
        if submit.grammar is not None:
            body |= _response_format(submit.grammar)
        return body

    def _message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message in the fields of the server."""
        sent = dict(message)
        if not self._is_extended:
            sent.pop("reasoning_content", None)
        if isinstance(message["content"], list):
            sent["content"] = [_part(part) for part in message["content"]]
        return sent

    def read(self, event: dict[str, Any]) -> AnswerDelta | PlatformError:
        error = event.get("error")
        if error is not None:
            return error_of_event(error)
        usage = event.get("usage")
        num_output, num_cached = counts_of(usage)
        counted = AnswerDelta(
            text="",
            num_output_tokens=num_output,
            num_cached_tokens=num_cached,
            num_prompt_tokens=count_of(usage.get("prompt_tokens")) if isinstance(usage, dict) else None,
        )
        choice = choice_of(event)
        if choice is None:
            return dataclasses.replace(counted, is_usage=isinstance(usage, dict))
        finish = choice.get("finish_reason")
        if isinstance(finish, str) and finish in FAILED_FINISH:
            return ended_by_error(finish)
        text = self._text_of(choice.get("delta") or choice.get("message") or {})
        if isinstance(finish, str) and finish:
            text += self._writer.end()
        stopped = choice.get("stop_reason", choice.get("matched_stop"))  # vLLM's and SGLang's field
        return dataclasses.replace(
            counted,
            text=text,
            logprobs=_logprobs(choice.get("logprobs")),
            finish=FINISH_REASONS.get(finish) if isinstance(finish, str) else None,
            stop_string=stopped if isinstance(stopped, str) else None,
        )

    def _text_of(self, delta: Any) -> str:
        """Return the text for the parts of a delta. Raises MalformedAnswer."""
        if not isinstance(delta, dict):
            raise MalformedAnswer("a delta is not an object")
        thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
        content, calls = delta.get("content") or "", delta.get("tool_calls") or []
        if not isinstance(thought, str) or not isinstance(content, str) or not isinstance(calls, list):
            raise MalformedAnswer("the content of a delta is not a string")
        text = self._writer.add_thought(thought) + self._writer.add_content(content)
        for call in calls:
            self._take_call(call)
        return text

    def _take_call(self, call: Any) -> None:
        """Add a part of a call. Raises MalformedAnswer."""
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise MalformedAnswer("a call has no function")
        name, arguments = function.get("name") or "", function.get("arguments") or ""
        if not isinstance(name, str) or not isinstance(arguments, str):
            raise MalformedAnswer("the name or the arguments of a call are not strings")
        self._writer.add_call(count_of(call.get("index")), name, arguments)


def _as_completion(submit: ChatSubmit) -> ChatSubmit:
    """Return the request without what chats have in other fields."""
    return msgspec.structs.replace(submit, grammar=None, shown_ids=())


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    if part["type"] != "image":
        return dict(part)
    return {"type": "image_url", "image_url": {"url": msgspec.Raw(part["image"].encoded)}}


def _response_format(grammar: GrammarSpec) -> dict[str, Any]:
    """Return the grammar as OpenAI's response format, or in vLLM's own field."""
    if grammar.kind is GrammarKind.JSON_OBJECT:
        return {"response_format": {"type": "json_object"}}
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        schema = msgspec.json.decode(grammar.text)
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}}
    choices = msgspec.json.decode(grammar.text) if grammar.kind is GrammarKind.CHOICE else grammar.text
    return {"structured_outputs": {grammar.kind.value: choices}}


def _logprobs(found: Any) -> list[DeltaLogprob] | None:
    """Parse the list of tokens, each with its logprob and the best alternatives."""
    if found is None or (isinstance(found, dict) and found.get("content") is None):
        return []
    try:
        return [
            DeltaLogprob(
                str(one["token"]),
                float(one["logprob"]),
                [(str(top["token"]), float(top["logprob"])) for top in one.get("top_logprobs") or []],
            )
            for one in found["content"]
        ]
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError):
        return None
