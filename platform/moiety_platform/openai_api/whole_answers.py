"""Complete text answers for clients that do not stream and for batches. Independent of HTTP."""

from __future__ import annotations

from collections.abc import Sequence

from moiety_platform.errors import EngineFailed
from moiety_platform.inference.answer_collection import AnswerChoice, EndedRun, parts_of
from moiety_platform.inference.request_record import RequestRecord
from moiety_platform.inference.run import Run
from moiety_platform.openai_api.answer_types import ChatCompletion, TextCompletion, TextLogprobs
from moiety_platform.openai_api.answers import AnswerHead, chat_answer, completion_answer
from moiety_platform.openai_api.schemas import ChatBody, CompletionBody, GenerationBody
from moiety_platform.openai_api.text_logprobs import echoed_logprobs


async def whole_answer(
    body: GenerationBody, run: Run, record: RequestRecord, choices: Sequence[AnswerChoice]
) -> ChatCompletion | TextCompletion:
    """Return OpenAI's answer with the collected choices."""
    return await answer_of(body, run, head_of(run, record), choices)


async def answer_of(
    body: GenerationBody, run: EndedRun, head: AnswerHead, choices: Sequence[AnswerChoice]
) -> ChatCompletion | TextCompletion:
    """Return OpenAI's answer with the collected choices of a run with or without a gateway."""
    if isinstance(body, ChatBody):
        parts = await parts_of(run, choices)
        return chat_answer(head, choices, parts, run.usage(), with_logprobs=bool(body.logprobs))
    assert isinstance(body, CompletionBody)
    echoes = await echoes_of(body, run)
    echoed = _echoed_logprobs(body, run, choices, echoes)
    return completion_answer(
        head, choices, run.usage(), echoes=echoes, echoed=echoed, with_logprobs=body.logprobs is not None
    )


def head_of(run: Run, record: RequestRecord) -> AnswerHead:
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
