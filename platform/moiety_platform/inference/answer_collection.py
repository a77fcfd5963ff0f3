"""Collects the choices of a text answer for clients that do not stream, for batch lines, and for offline inference.

Independent of HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from moiety_platform.inference.model_texts import ModelText
from moiety_platform.inference.run import InferenceRun, Usage
from moiety_text.reasoning import AnswerReader
from moiety_text.tools.deltas import Parts
from moiety_wire.messages import Finished, FinishReason, TokenLogprob

INLINE_CHARS = 16 * 1024  # longer answers with possible tool calls are parsed in a thread


@dataclass(slots=True)
class AnswerChoice:
    """Collected output of one choice."""

    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finished: Finished | None = None

    @property
    def end(self) -> Finished:
        assert self.finished is not None, "an answer has come to its end"
        return self.finished

    @property
    def finish_reason(self) -> str:
        return self.end.reason.value


class EndedRun(Protocol):
    """An ended run, with or without a gateway, from which an answer is built."""

    text: ModelText
    prompts: list[list[int]]

    @property
    def num_sequences(self) -> int: ...

    @property
    def output_ids(self) -> list[list[int]]: ...

    def new_readers(self) -> list[AnswerReader] | None: ...

    def usage(self) -> Usage: ...


async def collect(run: InferenceRun) -> list[AnswerChoice]:
    """Wait for all choices and return them."""
    choices = [AnswerChoice() for _ in range(run.num_sequences)]
    async for index, message in run:
        choice = choices[index]
        choice.text.append(message.text)
        if isinstance(message, Finished):
            choice.finished = message
        elif message.logprobs:
            choice.logprobs += message.logprobs
    return choices


def end_without_output(finished: Finished) -> Finished:
    """Return the end of a choice whose output is withheld: its limit has ended it, and scores of the prompt remain."""
    return msgspec.structs.replace(finished, reason=FinishReason.LENGTH, text="", detail="max_tokens")


def without_output(choices: Sequence[AnswerChoice]) -> list[AnswerChoice]:
    """Return the choices of a request for no output, for which the engine has generated a token all the same."""
    return [AnswerChoice(finished=end_without_output(choice.end)) for choice in choices]


async def parts_of(run: EndedRun, choices: Sequence[AnswerChoice]) -> list[Parts]:
    """Return the text and tool calls of each choice in order. Long texts are parsed in a thread."""
    texts = ["".join(choice.text) for choice in choices]
    readers = run.new_readers()
    if readers is None:
        return [[text] for text in texts]

    def read() -> list[Parts]:
        return [reader.read(text) for reader, text in zip(readers, texts, strict=True)]

    return read() if sum(map(len, texts)) <= INLINE_CHARS else await asyncio.to_thread(read)
