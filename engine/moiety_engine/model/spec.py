"""What a decoder is, as data: a list of layers, each an attention and a feed-forward description.

Knows no tensor and no family: `families` reads a checkpoint's config.json into this. A family that attends or routes in
another way adds a description here and its layer in `layers`, not a branch in the forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moiety_kernels.route.spec import RoutingSpec


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by a factor."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Low frequencies divided by a factor, high ones kept, a smooth passage between (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (Peng et al. 2023); `attention_factor` multiplies cosines and sines."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_positions: int
    attention_factor: float
    truncate: bool


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding of the first `rotary_width` entries of each head."""

    theta: float
    rotary_width: int
    scaling: RopeScaling | None = None


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Grouped-query attention. `qk_norm`: RMS normalisation of each head, or of all heads' width at once."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: Literal["none", "head", "full"] = "none"
    clip: float | None = None
    window: int | None = None

    @property
    def scale(self) -> float:
        """What scores are multiplied by before the softmax."""
        return float(self.head_dim**-0.5)

    @property
    def q_width(self) -> int:
        """Width of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all key heads, and of all value heads."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class DenseSpec:
    """One SwiGLU feed-forward for every token."""

    width: int
    bias: bool = False


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """Routed SwiGLU experts."""

    width: int
    routing: RoutingSpec


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer: norm → attention → add → norm → feed-forward → add."""

    attention: AttentionSpec
    ffn: DenseSpec | MoeSpec


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A whole decoder."""

    family: str
    vocab_size: int
    hidden_size: int
    norm_eps: float
    tie_word_embeddings: bool
    max_context_tokens: int
    checkpoint_dtype: str
    layers: tuple[LayerSpec, ...]

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers with routed experts."""
        return tuple(i for i, layer in enumerate(self.layers) if isinstance(layer.ffn, MoeSpec))
