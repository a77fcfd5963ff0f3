"""What a decoder is, as data: a list of layers, each an attention and a feed-forward description.

Knows no tensor and no family: `families` reads a checkpoint's config.json into this. A family that attends or routes in
another way adds a description here and its layer in `layers`, not a branch in the forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from moiety_kernels.moe.activation import SILU, Activation
from moiety_kernels.quantization.weight import WeightFormat
from moiety_kernels.route.spec import RoutingSpec

KV_SCALE_BYTES = 4  # of each of `cached_rows`


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


@dataclass(frozen=True, slots=True)
class LongRopeFactors:
    """A factor for each rotated pair; `attention_factor` multiplies cosines and sines."""

    of_pairs: tuple[float, ...]
    attention_factor: float


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """LongRoPE (Ding et al. 2024): each rotated pair's frequency divided by a factor of its own. Contexts beyond
    `original_max_positions` have other factors than those within; `longest_context` decides for a model, since its keys
    stay in the cache and are shared."""

    short: LongRopeFactors
    long: LongRopeFactors
    original_max_positions: int
    longest_context: int

    @property
    def factors(self) -> LongRopeFactors:
        """Those of the model's longest context."""
        return self.long if self.longest_context > self.original_max_positions else self.short


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding of the first `rotary_width` entries of each head. The pairs that turn together are the entries i
    and i + rotary_width / 2; if `interleaved`, the checkpoint has them side by side, and its rows are put in order when
    they are loaded."""

    theta: float
    rotary_width: int
    scaling: RopeScaling | None = None
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Grouped-query attention. `scale`: what scores are multiplied by before the softmax. `qk_norm`: RMS normalisation
    of each head, or of all heads' width at once. `sinks`: each head has a score that takes its share of the softmax and
    adds nothing."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec
    scale: float
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: Literal["none", "head", "full"] = "none"
    clip: float | None = None
    window: int | None = None
    sinks: bool = False

    @property
    def q_width(self) -> int:
        """Width of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all key heads, and of all value heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def cached_values(self) -> int:
        """Values that a position takes in the cache."""
        return 2 * self.kv_width

    @property
    def cached_rows(self) -> int:
        """What of a position has a scale of its own in a cache of whole numbers: each key and each value."""
        return 2 * self.num_kv_heads


@dataclass(frozen=True, slots=True)
class LatentAttentionSpec:
    """Multi-head latent attention (DeepSeek-V2): keys and values of all heads come from one latent row a position,
    beside which one rotated key part is shared by all heads. `query_rank`: queries, too, come from a latent row."""

    num_heads: int
    query_rank: int | None
    latent_width: int
    nope_width: int  # of the part of a head's key that is not rotated
    value_width: int
    rope: RopeSpec
    scale: float
    input_bias: bool = False  # of the projections into latent rows
    output_bias: bool = False
    norm_eps: float = 1e-6  # whatever the other norms' is

    @property
    def head_dim(self) -> int:
        """Width of a query or key of one head."""
        return self.nope_width + self.rope.rotary_width

    @property
    def query_input_width(self) -> int:
        """What the first projection gives of the queries: their latent row, or all heads."""
        return self.num_heads * self.head_dim if self.query_rank is None else self.query_rank

    @property
    def cached_values(self) -> int:
        """Values that a position takes in the cache."""
        return self.latent_width + self.rope.rotary_width

    @property
    def cached_rows(self) -> int:
        """What of a position has a scale of its own in a cache of whole numbers: its latent part, and what is
        rotated."""
        return 2


@dataclass(frozen=True, slots=True)
class DenseSpec:
    """One gated feed-forward for every token."""

    width: int
    bias: bool = False
    activation: Activation = SILU


@dataclass(frozen=True, slots=True)
class SharedSpec:
    """Experts that serve every token beside the routed ones, as one dense feed-forward of their whole width. `gated`:
    what they give is multiplied by a sigmoid of a projection of the token."""

    dense: DenseSpec
    gated: bool = False


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """Routed gated experts. `bias`: of the experts' products; `router_bias`: added to the logits; `selection_bias`:
    added only for choosing; `exact_router`: the router's weights and the logits are float32. `held`: the experts whose
    weights are read to here, slot by slot, if the others are on other ranks."""

    width: int
    routing: RoutingSpec
    activation: Activation = SILU
    bias: bool = False
    router_bias: bool = False
    selection_bias: bool = False
    exact_router: bool = False
    shared: SharedSpec | None = None
    held: tuple[int, ...] | None = None

    @property
    def num_held(self) -> int:
        """Experts whose weights are here."""
        return self.routing.num_experts if self.held is None else len(self.held)


@dataclass(frozen=True, slots=True)
class NormSpec:
    """How a residual stream of some width is normalised: by its root mean square, or by mean and variance with a bias
    beside the weight ("layer", Ba et al. 2016). `weight_offset` is what the weights lack on disk."""

    eps: float
    kind: Literal["rms", "layer"] = "rms"
    weight_offset: float = 0.0


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer: norm → attention → add → norm → feed-forward → add. `post_norms`: what attention and the
    feed-forward give is normalised, too, before it is added. `only_experts`: all but the routed ones that are held is
    on other ranks."""

    attention: AttentionSpec | LatentAttentionSpec
    ffn: DenseSpec | MoeSpec
    post_norms: bool = False
    only_experts: bool = False


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A whole decoder. The multipliers are of the embeddings, of what a layer's halves add to the residual stream, and
    of the logits. `logit_softcap`: logits are bent to stay within it. `weight_format`: of a checkpoint whose weights,
    or of mxfp4 its experts, are in few bits. `ignored_prefixes`: of tensors in the checkpoint that are for something
    else than decoding. `mtp`: the layer after the last, if it has one, which says from what the model made of a
    token, and from the next one, what follows that (multi-token prediction). `mtp_after`: it is itself such a
    layer, of a model with so many others, whose vocabulary serves it."""

    family: str
    vocab_size: int
    hidden_size: int
    norm: NormSpec
    tie_word_embeddings: bool
    max_context_tokens: int
    checkpoint_dtype: str
    layers: tuple[LayerSpec, ...]
    head_bias: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_multiplier: float = 1.0
    logit_softcap: float | None = None
    weight_format: WeightFormat | None = None
    ignored_prefixes: tuple[str, ...] = ()
    mtp: LayerSpec | None = None
    mtp_after: int | None = None

    def within(self, max_context_tokens: int | None) -> ModelSpec:
        """Return the spec of the model as it computes contexts of at most so many tokens; None: of all that it takes.
        Only LongRoPE depends on that."""
        if max_context_tokens is None or max_context_tokens >= self.max_context_tokens:
            return self
        layers = tuple(_layer_within(layer, max_context_tokens) for layer in self.layers)
        mtp = None if self.mtp is None else _layer_within(self.mtp, max_context_tokens)
        return replace(self, layers=layers, mtp=mtp)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers with routed experts."""
        return tuple(i for i, layer in enumerate(self.layers) if isinstance(layer.ffn, MoeSpec))


def _layer_within(layer: LayerSpec, max_context_tokens: int) -> LayerSpec:
    rope = layer.attention.rope
    if not isinstance(rope.scaling, LongRopeScaling):
        return layer
    scaling = replace(rope.scaling, longest_context=min(rope.scaling.longest_context, max_context_tokens))
    return replace(layer, attention=replace(layer.attention, rope=replace(rope, scaling=scaling)))
