"""Complete answers of `/v1/chat/completions` and `/v1/completions` to requests that do not stream."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from moiety_platform.inference.answer_collection import AnswerChoice
from moiety_platform.inference.run import Usage
from moiety_platform.openai_api.answer_types import (
    AnswerFields,
    ChatCompletion,
    ChatLogprobs,
    CompletionUsage,
    TextCompletion,
    TextLogprobs,
)
from moiety_platform.openai_api.text_logprobs import TextOffsets, text_logprobs
from moiety_platform.openai_api.tool_message import finish_reason_of, has_called, message_of
from moiety_text.tools.deltas import Parts
from moiety_wire.messages import TokenLogprob


class AnswerHead(msgspec.Struct, frozen=True):
    """Fields common to every chunk and answer of a request."""

    answer_id: str
    created: int
    model: str
    system_fingerprint: str
    service_tier: str  # the tier that served it, as OpenAI names it

    def fields(self, kind: str) -> AnswerFields:
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "service_tier": self.service_tier,
            "system_fingerprint": self.system_fingerprint,
        }


def usage_fields(usage: Usage) -> CompletionUsage:
    fields: CompletionUsage = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
    if usage.reasoning_tokens is not None:
        fields["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    return fields


def chat_answer(
    head: AnswerHead, choices: Sequence[AnswerChoice], parts: Sequence[Parts], usage: Usage, *, with_logprobs: bool
) -> ChatCompletion:
    """Return a complete chat answer. `parts` holds the parsed parts of each choice's text."""
    return {
        **head.fields("chat.completion"),
        "choices": [
            {
                "index": index,
                "message": message_of(parts[index]),
                "logprobs": chat_logprobs(choice.logprobs) if with_logprobs else None,
                "finish_reason": finish_reason_of(choice.end, has_called(parts[index])),
            }
            for index, choice in enumerate(choices)
        ],
        "usage": usage_fields(usage),
    }


def completion_answer(
    head: AnswerHead,
    choices: Sequence[AnswerChoice],
    usage: Usage,
    *,
    echoes: Sequence[str],
    echoed: Sequence[TextLogprobs | None],
    with_logprobs: bool,
) -> TextCompletion:
    """Return a complete text completion.

    `echoes` are the echoed prompts that precede the choices, empty without echo. `echoed` are their token log
    probabilities if requested.
    """
    return {
        **head.fields("text_completion"),
        "choices": [
            {
                "index": index,
                "text": echoes[index] + "".join(choice.text),
                "logprobs": (
                    text_logprobs(choice.logprobs, TextOffsets(len(echoes[index])), echoed[index])
                    if with_logprobs
                    else None
                ),
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(choices)
        ],
        "usage": usage_fields(usage),
    }


def chat_logprobs(logprobs: Sequence[TokenLogprob]) -> ChatLogprobs:
    return {
        "content": [
            {
                "token": entry.token,
                "bytes": list(entry.token_bytes),
                "logprob": entry.logprob,
                "top_logprobs": [
                    {"token": top.token, "bytes": list(top.token_bytes), "logprob": top.logprob} for top in entry.top
                ],
            }
            for entry in logprobs
        ],
        "refusal": None,
    }
