"""Sampling of tokens from logits: penalties, filters, one reproducible draw per row, log-probabilities."""

from moiety_engine.sampling.rows import rows_of
from moiety_engine.sampling.sampler import Best, Drawn, Logprobs, Sampler, is_greedy, is_plain, logprobs_of

__all__ = ["Best", "Drawn", "Logprobs", "Sampler", "is_greedy", "is_plain", "logprobs_of", "rows_of"]
