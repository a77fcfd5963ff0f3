"""From logits to tokens: penalties, filters, one reproducible draw a row, log-probabilities."""

from moiety_engine.sampling.rows import rows_of
from moiety_engine.sampling.sampler import Drawn, Logprobs, Sampler, logprobs_of

__all__ = ["Drawn", "Logprobs", "Sampler", "logprobs_of", "rows_of"]
