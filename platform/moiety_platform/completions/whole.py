"""An answer of text as a whole, for whoever asks: a client that does not stream, or a batch. Knows no HTTP."""

from __future__ import annotations

from collections.abc import Sequence

from moiety_platform.completions.answer_types import ChatCompletion, TextCompletion
from moiety_platform.completions.answers import AnswerHead, Choice, chat_answer, completion_answer
from moiety_platform.completions.record import RequestRecord
from moiety_platform.completions.run import Run
from moiety_platform.completions.schemas import ChatBody, CompletionBody, GenerationBody
from moiety_wire.messages import Finished


async def collect(run: Run) -> list[Choice]:
    """Wait for all choices."""
    choices = [Choice() for _ in range(run.num_sequences)]
    async for index, message in run:
        choice = choices[index]
        choice.text.append(message.text)
        if isinstance(message, Finished):
            choice.finished = message
        elif message.logprobs:
            choice.logprobs += message.logprobs
    return choices


async def whole_answer(
    body: GenerationBody, run: Run, record: RequestRecord, choices: Sequence[Choice]
) -> ChatCompletion | TextCompletion:
    """OpenAI's answer, of choices that were collected."""
    head = head_of(run, record)
    if isinstance(body, ChatBody):
        return chat_answer(head, choices, run.usage(), with_logprobs=bool(body.logprobs))
    assert isinstance(body, CompletionBody)
    echoes = await echoes_of(body, run)
    return completion_answer(head, choices, run.usage(), echoes=echoes, with_logprobs=body.logprobs is not None)


def head_of(run: Run, record: RequestRecord) -> AnswerHead:
    """What every chunk and answer of the request repeats."""
    return AnswerHead(
        answer_id=record.request_id,
        created=record.arrival_unix_ns // 1_000_000_000,
        model=record.served_model,
        system_fingerprint=run.text.fingerprint,
        service_tier=record.served_tier,
    )


async def echoes_of(body: CompletionBody, run: Run) -> Sequence[str]:
    """The prompt's text for each choice if the request wants it, else empty strings."""
    if not body.echo:
        return [""] * run.num_sequences
    prompts = [
        prompt if isinstance(prompt, str) else await run.text.decode(token_ids)
        for prompt, token_ids in zip(body.generation().prompts, run.prompts, strict=True)
    ]
    return [prompt for prompt in prompts for _ in range(body.n or 1)]
