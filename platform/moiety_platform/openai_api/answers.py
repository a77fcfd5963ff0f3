"""Complete answers of `/v1/chat/completions` and `/v1/completions` to requests that do not stream."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from moiety_platform.errors import EngineFailed
from moiety_platform.inference.answer_collection import AnswerChoice, EndedRun, parts_of
from moiety_platform.inference.request_record import RequestRecord
from moiety_platform.inference.run import InferenceRun, Usage
from moiety_platform.openai_api.answer_types import (
    AnswerFields,
    ChatCompletion,
    ChatLogprobs,
    CompletionUsage,
    TextCompletion,
    TextLogprobs,
)
from moiety_platform.openai_api.schemas import ChatBody, CompletionBody, GenerationBody
from moiety_platform.openai_api.text_logprobs import TextOffsets, echoed_logprobs, text_logprobs
from moiety_platform.openai_api.tool_message import MessageForm, has_called
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
    head: AnswerHead,
    choices: Sequence[AnswerChoice],
    parts: Sequence[Parts],
    usage: Usage,
    form: MessageForm,
    *,
    with_logprobs: bool,
) -> ChatCompletion:
    """Return a complete chat answer. `parts` holds the parsed parts of each choice's text."""
    return {
        **head.fields("chat.completion"),
        "choices": [
            {
                "index": index,
                "message": form.message_of(parts[index]),
                "logprobs": chat_logprobs(choice.logprobs) if with_logprobs else None,
                "finish_reason": form.finish_reason_of(choice.end, has_called(parts[index])),
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


async def whole_answer(
    body: GenerationBody, run: InferenceRun, record: RequestRecord, choices: Sequence[AnswerChoice]
) -> ChatCompletion | TextCompletion:
    """Return OpenAI's answer with the collected choices."""
    return await answer_of(body, run, head_of(run, record), choices)


async def answer_of(
    body: GenerationBody, run: EndedRun, head: AnswerHead, choices: Sequence[AnswerChoice]
) -> ChatCompletion | TextCompletion:
    """Return OpenAI's answer with the collected choices of a run with or without a gateway."""
    if isinstance(body, ChatBody):
        parts = await parts_of(run, choices)
        return chat_answer(head, choices, parts, run.usage(), body.message_form(), with_logprobs=bool(body.logprobs))
    assert isinstance(body, CompletionBody)
    echoes = await echoes_of(body, run)
    echoed = _echoed_logprobs(body, run, choices, echoes)
    return completion_answer(
        head, choices, run.usage(), echoes=echoes, echoed=echoed, with_logprobs=body.logprobs is not None
    )


def head_of(run: InferenceRun, record: RequestRecord) -> AnswerHead:
    """Return the fields common to every chunk and answer of the request."""
    return AnswerHead(
        answer_id=record.request_id,
        created=record.arrival_unix_ns // 1_000_000_000,
        model=record.served_model,
        system_fingerprint=run.text.fingerprint,
        service_tier=record.served_tier,
    )


def _echoed_logprobs(
    body: CompletionBody, run: EndedRun, choices: Sequence[AnswerChoice], echoes: Sequence[str]
) -> Sequence[TextLogprobs | None]:
    """Return the prompt log probabilities of each choice, None where not requested.

    The first choice of a prompt has the scores for all. Raises EngineFailed if an engine was lost together with the
    scores.
    """
    if not body.echo or body.logprobs is None:
        return [None] * len(choices)
    found: list[TextLogprobs | None] = []
    num_choices = body.n or 1
    for prompt, choice, echo in zip(run.prompts, choices[::num_choices], echoes[::num_choices], strict=True):
        scores = choice.end.prompt_logprobs
        if scores is None:
            raise EngineFailed("the engine was lost after it had scored the prompt; send the request again")
        found += [echoed_logprobs(echo, prompt[0], run.text.token_bytes(prompt[0]), scores)] * num_choices
    return found


async def echoes_of(body: CompletionBody, run: EndedRun) -> Sequence[str]:
    """Return the prompt's text for each choice if the request wants an echo, else empty strings."""
    if not body.echo:
        return [""] * run.num_sequences
    prompts = [
        prompt if isinstance(prompt, str) else await run.text.decode(token_ids)
        for prompt, token_ids in zip(body.generation().prompts, run.prompts, strict=True)
    ]
    return [prompt for prompt in prompts for _ in range(body.n or 1)]
