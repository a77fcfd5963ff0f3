"""Parameters by which a token is sampled from the logits."""

from __future__ import annotations

import msgspec


class TokenSampling(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, kw_only=True):
    """Choice of a token. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 disable the filter."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
