"""Complete answers of `/v1/chat/completions` and `/v1/completions` to requests that do not stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from moiety_platform.errors import EngineFailed
from moiety_platform.inference.answer_collection import AnswerChoice, EndedRun, parts_of, without_output
from moiety_platform.inference.request_record import RequestRecord
from moiety_platform.inference.run import InferenceRun, Usage
from moiety_platform.openai_api.answer_types import (
    AnswerFields,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    CompletionUsage,
    PromptLogprobs,
    TextChoice,
    TextCompletion,
    TextLogprobs,
)
from moiety_platform.openai_api.schemas import ChatBody, CompletionBody, GenerationBody
from moiety_platform.openai_api.text_logprobs import TextOffsets, echoed_logprobs, prompt_logprobs, text_logprobs
from moiety_platform.openai_api.tool_message import MessageForm, has_called
from moiety_text.tools.deltas import Parts
from moiety_wire.messages import TokenLogprob, TopLogprob


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


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """Fields of an answer besides its text."""

    with_logprobs: bool
    names_ids: bool = False  # tokens of log probabilities are named by their ids
    prompt_ids: Sequence[list[int]] = ()  # token ids to return: of the prompt of each choice,
    output_ids: Sequence[list[int]] = ()  # and of each choice
    prompt_logprobs: Sequence[PromptLogprobs] = ()  # of the prompt of each choice

    @classmethod
    def of(cls, body: GenerationBody, run: EndedRun, *, with_logprobs: bool) -> AnswerOptions:
        """Return the options that a body asks for."""
        names_ids = bool(body.return_tokens_as_token_ids)
        if not body.return_token_ids:
            return cls(with_logprobs, names_ids)
        prompt_ids = [prompt for prompt in run.prompts for _ in range(body.n or 1)]
        output_ids = [[] for _ in prompt_ids] if body.max_tokens == 0 else run.output_ids
        return cls(with_logprobs, names_ids, prompt_ids, output_ids)


def chat_answer(
    head: AnswerHead,
    choices: Sequence[AnswerChoice],
    parts: Sequence[Parts],
    usage: Usage,
    form: MessageForm,
    options: AnswerOptions,
) -> ChatCompletion:
    """Return a complete chat answer. `parts` holds the parsed parts of each choice's text."""
    found: list[ChatChoice] = []
    for index, choice in enumerate(choices):
        answered: ChatChoice = {
            "index": index,
            "message": form.message_of(parts[index]),
            "logprobs": chat_logprobs(choice.logprobs, names_ids=options.names_ids) if options.with_logprobs else None,
            "finish_reason": form.finish_reason_of(choice.end, has_called(parts[index])),
        }
        if options.output_ids:
            answered["token_ids"] = options.output_ids[index]
        found.append(answered)
    fields = {**head.fields("chat.completion"), "choices": found, "usage": usage_fields(usage)}
    answer: ChatCompletion = fields  # type: ignore[assignment]  # mypy takes no `**` where a key is optional
    if options.prompt_ids:
        answer["prompt_token_ids"] = options.prompt_ids[0]
    if options.prompt_logprobs:
        answer["prompt_logprobs"] = options.prompt_logprobs[0]
    return answer


def completion_answer(
    head: AnswerHead,
    choices: Sequence[AnswerChoice],
    usage: Usage,
    *,
    echoes: Sequence[str],
    echoed: Sequence[TextLogprobs | None],
    options: AnswerOptions,
) -> TextCompletion:
    """Return a complete text completion.

    `echoes` are the echoed prompts that precede the choices, empty without echo. `echoed` are their token log
    probabilities if requested.
    """
    found: list[TextChoice] = []
    for index, choice in enumerate(choices):
        logprobs = None
        if options.with_logprobs:
            offsets = TextOffsets(len(echoes[index]))
            logprobs = text_logprobs(choice.logprobs, offsets, echoed[index], names_ids=options.names_ids)
        answered: TextChoice = {
            "index": index,
            "text": echoes[index] + "".join(choice.text),
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
        }
        if options.output_ids:
            answered["token_ids"] = options.output_ids[index]
            answered["prompt_token_ids"] = options.prompt_ids[index]
        if options.prompt_logprobs:
            answered["prompt_logprobs"] = options.prompt_logprobs[index]
        found.append(answered)
    return {**head.fields("text_completion"), "choices": found, "usage": usage_fields(usage)}


def chat_logprobs(logprobs: Sequence[TokenLogprob], *, names_ids: bool = False) -> ChatLogprobs:
    """Return the log probabilities of a chat's tokens. With `names_ids` every token is named by its id."""
    return {
        "content": [
            {
                "token": _name_of(entry, names_ids),
                "bytes": list(entry.token_bytes),
                "logprob": entry.logprob,
                "top_logprobs": [
                    {"token": _name_of(top, names_ids), "bytes": list(top.token_bytes), "logprob": top.logprob}
                    for top in entry.top
                ],
            }
            for entry in logprobs
        ],
        "refusal": None,
    }


def _name_of(entry: TokenLogprob | TopLogprob, names_ids: bool) -> str:
    return f"token_id:{entry.token_id}" if names_ids and entry.token_id >= 0 else entry.token


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
        options = AnswerOptions.of(body, run, with_logprobs=bool(body.logprobs))
        if body.prompt_logprobs is not None:
            options = replace(options, prompt_logprobs=_prompt_logprobs(body, choices, body.prompt_logprobs))
        return chat_answer(head, choices, parts, run.usage(), body.message_form(), options)
    assert isinstance(body, CompletionBody)
    if body.max_tokens == 0:
        choices = without_output(choices)
    echoes = await echoes_of(body, run)
    echoed = _echoed_logprobs(body, run, choices, echoes)
    options = AnswerOptions.of(body, run, with_logprobs=body.logprobs is not None)
    if body.prompt_logprobs is not None:
        options = replace(options, prompt_logprobs=_prompt_logprobs(body, choices, body.prompt_logprobs))
    return completion_answer(head, choices, run.usage(), echoes=echoes, echoed=echoed, options=options)


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
        first, names_ids = run.text.token_bytes(prompt[0]), bool(body.return_tokens_as_token_ids)
        scores, num_best = _scores_of(choice), body.logprobs
        echoed = echoed_logprobs(echo, prompt[0], first, scores, num_best=num_best, names_ids=names_ids)
        found += [echoed] * num_choices
    return found


def _prompt_logprobs(body: GenerationBody, choices: Sequence[AnswerChoice], num_best: int) -> list[PromptLogprobs]:
    """Return the prompt log probabilities of each choice in vLLM's format, with `num_best` alternatives of each token.

    Raises EngineFailed if an engine was lost together with the scores.
    """
    num_choices = body.n or 1
    return [
        told
        for choice in choices[::num_choices]
        for told in [prompt_logprobs(_scores_of(choice), num_best)] * num_choices
    ]


def _scores_of(choice: AnswerChoice) -> list[TokenLogprob]:
    """Return the scores of the prompt of a first choice. Raises EngineFailed."""
    scores = choice.end.prompt_logprobs
    if scores is None:
        raise EngineFailed("the engine was lost after it had scored the prompt; send the request again")
    return scores


async def echoes_of(body: CompletionBody, run: EndedRun) -> Sequence[str]:
    """Return the prompt's text for each choice if the request wants an echo, else empty strings."""
    if not body.echo:
        return [""] * run.num_sequences
    prompts = [
        prompt if isinstance(prompt, str) else await run.text.decode(token_ids)
        for prompt, token_ids in zip(body.generation().prompts, run.prompts, strict=True)
    ]
    return [prompt for prompt in prompts for _ in range(body.n or 1)]
