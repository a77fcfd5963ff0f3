"""Specification of residual connections that are not the usual ones."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ScaledResidual:
    """Residual connections with learned factors and biases for both terms (ZAYA1).

    x becomes (x + b) · s + (half(norm(x)) + c) · t, with vectors for attention and for the feed-forward. The first
    layer's input is (embedding + b) · s.
    """


@dataclass(frozen=True, slots=True)
class NormedResidual:
    """Residual connections that start after the norms (MiniMax-01, arXiv 2501.08313).

    x becomes alpha · norm(x) + beta · half(norm(x)), with factors for attention and for the feed-forward.
    """

    attention_alpha: float
    attention_beta: float
    ffn_alpha: float
    ffn_beta: float
