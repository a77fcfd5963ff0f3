"""Outputs of generation for Python programs."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from moiety_wire.messages import TokenLogprob


class ScoredToken(msgspec.Struct, frozen=True):
    """A token and its log-probability under the model itself, before temperature, penalties and filters.

    `top` holds the most likely tokens at its position, by id. `rank` is that of a prompt's token among all tokens, 1
    for the most likely one, and 0 for generated tokens.
    """

    token_id: int
    logprob: float
    top: dict[int, float]
    rank: int = 0


class Completion(msgspec.Struct, frozen=True):
    """One answer. `token_ids` are all generated tokens, with the one that ended it; `text` is without that one."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str  # stop, length
    stopped_by: str  # the stop string; else "stop_token", "max_tokens" or "context"
    num_cached_tokens: int  # prompt tokens found in the prefix cache
    logprobs: list[ScoredToken] | None = None


class Output(msgspec.Struct, frozen=True):
    """A prompt and its `n` answers.

    `prompt` is None where it was given as token ids.

    `prompt_logprobs` covers each of its tokens but the first, which has no predecessor.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    completions: list[Completion]
    prompt_logprobs: list[ScoredToken] | None = None

    @property
    def text(self) -> str:
        """Text of the first answer."""
        return self.completions[0].text


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """Output of one step for one answer."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None  # in the last delta


def scored(token_ids: list[int], logprobs: list[TokenLogprob]) -> list[ScoredToken]:
    """Return tokens with their log-probabilities from the wire format."""
    return [
        ScoredToken(token_id, scored.logprob, {top.token_id: top.logprob for top in scored.top}, scored.rank)
        for token_id, scored in zip(token_ids, logprobs, strict=True)
    ]
