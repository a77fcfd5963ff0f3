"""What a program gets of its prompts."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from moiety_wire.messages import TokenLogprob


class ScoredToken(msgspec.Struct, frozen=True):
    """A token and its log-probability under the model itself, before temperature, penalties and filters; `top` are the
    likeliest in its place, by id."""

    token_id: int
    logprob: float
    top: dict[int, float]


class Completion(msgspec.Struct, frozen=True):
    """One answer. `token_ids` are all that were generated, with the one that ended it; `text` is without that one."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str  # stop, length
    stopped_by: str  # the stop string; else "stop_token", "max_tokens" or "context"
    num_cached_tokens: int  # of the prompt, that the prefix cache held
    logprobs: list[ScoredToken] | None = None


class Output(msgspec.Struct, frozen=True):
    """A prompt and its `n` answers. `prompt` is None where it was given as token ids. `prompt_logprobs` are of each of
    its tokens but the first, which nothing precedes."""

    prompt: str | None
    prompt_token_ids: list[int]
    completions: list[Completion]
    prompt_logprobs: list[ScoredToken] | None = None

    @property
    def text(self) -> str:
        """Of the first answer."""
        return self.completions[0].text


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """What a step brought for one answer."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None  # in the last


def scored(token_ids: list[int], logprobs: list[TokenLogprob]) -> list[ScoredToken]:
    """Of tokens and what the wire says of each."""
    return [
        ScoredToken(token_id, told.logprob, {top.token_id: top.logprob for top in told.top})
        for token_id, told in zip(token_ids, logprobs, strict=True)
    ]
