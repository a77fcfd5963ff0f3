"""From logits to tokens: penalties, filters, one reproducible draw a row, log-probabilities."""

from moiety_engine.sampling.rows import rows_of
from moiety_engine.sampling.sampler import Drawn, Sampler

__all__ = ["Drawn", "Sampler", "rows_of"]
