"""Generation parameters for Python callers, in the terms of `Sampling` and `Stopping`."""

from __future__ import annotations

from moiety_wire.messages import Sampling, Stopping
from moiety_wire.token_sampling import TokenSampling


class SamplingParams(TokenSampling, frozen=True, kw_only=True):
    """Sampling parameters. The defaults sample the model's distribution until it stops or its context is full."""

    n: int = 1  # answers per prompt
    max_tokens: int | None = None  # None: as many as the context allows
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none; N: those of the chosen token and of the N most likely
    prompt_logprobs: int | None = None  # likewise for the prompt's tokens

    def sampling(self, seed: int | None, *, is_first: bool) -> Sampling:
        """Return the sampling of one answer; only the first requests the prompt's log-probabilities."""
        of_tokens = {name: getattr(self, name) for name in TokenSampling.__struct_fields__}
        return Sampling(
            **(of_tokens | {"seed": seed}),
            num_logprobs=self.logprobs,
            num_prompt_logprobs=self.prompt_logprobs if is_first else None,
        )

    def stopping(self, max_tokens: int) -> Stopping:
        return Stopping(max_tokens, min(self.min_tokens, max_tokens), self.stop, self.stop_token_ids, self.ignore_eos)
