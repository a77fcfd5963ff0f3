"""Generation parameters for Python callers, in the terms of `Sampling` and `Stopping`."""

from __future__ import annotations

import msgspec

from moiety_wire.messages import Sampling, Stopping


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters. The defaults sample the model's distribution until it stops or its context is full."""

    n: int = 1  # answers per prompt
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    max_tokens: int | None = None  # None: as many as the context allows
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none; N: those of the chosen token and of the N most likely
    prompt_logprobs: int | None = None  # likewise for the prompt's tokens

    def sampling(self, seed: int | None, *, is_first: bool) -> Sampling:
        """Return the sampling of one answer; only the first requests the prompt's log-probabilities."""
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
            seed=seed,
            num_logprobs=self.logprobs,
            num_prompt_logprobs=self.prompt_logprobs if is_first else None,
        )

    def stopping(self, max_tokens: int) -> Stopping:
        return Stopping(max_tokens, min(self.min_tokens, max_tokens), self.stop, self.stop_token_ids, self.ignore_eos)
