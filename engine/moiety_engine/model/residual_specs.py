"""Specification of residual connections that are not the usual ones."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NormedResidual:
    """Residual connections that start after the norms (MiniMax-01, arXiv 2501.08313).

    x becomes alpha · norm(x) + beta · half(norm(x)), with factors for attention and for the feed-forward.
    """

    attention_alpha: float
    attention_beta: float
    ffn_alpha: float
    ffn_beta: float
