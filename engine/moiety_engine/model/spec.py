"""Specification of a decoder as data: a list of layers, each with an attention and a feed-forward spec.

Independent of tensors and model families: `families` reads a checkpoint's config.json into a ModelSpec. A family with a
new kind of attention or routing adds a spec here and its layer in `layers`, not a branch in the forward pass.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Literal

from moiety_engine.model.rope_spec import LongRopeScaling, RopeSpec
from moiety_kernels.moe.activation import SILU, Activation
from moiety_kernels.output_gate.spec import GateKind
from moiety_kernels.quantization.weight import WeightFormat
from moiety_kernels.route.spec import RoutingSpec

KV_SCALE_BYTES = 4  # per scale; `cached_rows` counts the scales of a position


@dataclass(frozen=True, slots=True)
class OutputGateSpec:
    """Gate of attention's output (Qiu et al. 2025, arXiv 2505.06708); `per_head`: one gate for all values of a head."""

    kind: GateKind
    per_head: bool = False


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """Growth of queries with the position, which keeps attention focused in long contexts (Llama 4).

    Queries at position p are multiplied by 1 + beta · ln(1 + floor(p / original_max_positions)).
    """

    beta: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Grouped-query attention.

    `scale`: factor of scores before the softmax. `qk_norm`: RMS normalization of each head, or of the whole width of
    all heads, before the rotation or, with `rotates_first`, after it. `sinks`: attention sinks: each head has an extra
    score in the softmax without a value. `gate`: the output of heads is multiplied by an activation of a projection of
    the layer's input.
    """

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
    rotates_first: bool = False
    gate: OutputGateSpec | None = None

    @property
    def q_width(self) -> int:
        """Width of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def gate_width(self) -> int:
        """Number of gates of the output; 0 if it has none."""
        if self.gate is None:
            return 0
        return self.num_heads if self.gate.per_head else self.q_width

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
        """Scales per position in an int8 cache: one for each key and each value."""
        return 2 * self.num_kv_heads


@dataclass(frozen=True, slots=True)
class LatentAttentionSpec:
    """Multi-head latent attention (DeepSeek-V2).

    Keys and values of all heads come from one latent row per position; all heads share one rotated key part.
    `query_rank`: width of the latent row of queries, if they have one. `head_gates`: the output of each head is
    multiplied by the sigmoid of a projection of the layer's input.
    """

    num_heads: int
    query_rank: int | None
    latent_width: int
    nope_width: int  # unrotated part of a head's key
    value_width: int
    rope: RopeSpec
    scale: float
    input_bias: bool = False  # bias of the projections into latent rows
    output_bias: bool = False
    norm_eps: float = 1e-6  # independent of the other norms
    query_growth: QueryGrowth | None = None
    head_gates: bool = False

    @property
    def head_dim(self) -> int:
        """Width of a query or key of one head."""
        return self.nope_width + self.rope.rotary_width

    @property
    def query_input_width(self) -> int:
        """Width of the queries' first projection: that of their latent row, or of all heads."""
        return self.num_heads * self.head_dim if self.query_rank is None else self.query_rank

    @property
    def cached_values(self) -> int:
        """Values that a position takes in the cache."""
        return self.latent_width + self.rope.rotary_width

    @property
    def cached_rows(self) -> int:
        """Scales per position in an int8 cache: one for the latent part and one for the rotated part."""
        return 2


@dataclass(frozen=True, slots=True)
class StatePart:
    """One tensor of the state that a recurrent layer keeps of a sequence.

    `shape` is that of one sequence, on one rank. `exact`: float32; otherwise the part has the type of activations.
    """

    shape: tuple[int, ...]
    exact: bool = True


@dataclass(frozen=True, slots=True)
class RecurrentSpec(ABC):
    """Base of the specs of recurrent layers, which keep a state of fixed size instead of keys and values.

    Gated DeltaNet, Mamba-2 and short convolutions are of this kind. A subclass is a frozen dataclass.
    """

    @property
    @abstractmethod
    def state_parts(self) -> tuple[StatePart, ...]:
        """Parts of the state, for instance a matrix per head, and the last inputs of a convolution."""

    @property
    @abstractmethod
    def output_width(self) -> int:
        """Width of the output of all heads."""

    @property
    @abstractmethod
    def row_widths(self) -> tuple[int, ...]:
        """Widths of the rows that the layer computes with, beside the model's width."""

    @property
    @abstractmethod
    def divided_heads(self) -> tuple[tuple[str, str], ...]:
        """Names of the fields that tensor parallelism divides, each with what it counts, for error messages."""

    @property
    def matrix_values(self) -> int:
        """Values of the state's exact parts, which every token reads and changes."""
        return sum(math.prod(part.shape) for part in self.state_parts if part.exact)


@dataclass(frozen=True, slots=True)
class GatedDeltaSpec(RecurrentSpec):
    """Gated DeltaNet (Yang et al. 2024): linear attention by the gated delta rule after a short convolution.

    Queries, keys and values are convolved; the heads' outputs are normalized with a gate. Value heads share key heads
    in groups. `conv_taps`: tokens that the convolution sees.
    """

    num_key_heads: int
    num_value_heads: int
    key_width: int
    value_width: int
    conv_taps: int
    norm_eps: float

    @property
    def conv_channels(self) -> int:
        """Width of all queries, keys and values."""
        return 2 * self.num_key_heads * self.key_width + self.output_width

    @property
    def output_width(self) -> int:
        """Width of the output of all heads."""
        return self.num_value_heads * self.value_width

    @property
    def row_widths(self) -> tuple[int, ...]:
        """Widths of the rows that the layer computes with."""
        return self.key_width, self.value_width, self.conv_channels

    @property
    def divided_heads(self) -> tuple[tuple[str, str], ...]:
        """Fields that tensor parallelism divides."""
        return ("num_key_heads", "key heads of linear attention"), ("num_value_heads", "value heads")

    @property
    def state_parts(self) -> tuple[StatePart, ...]:
        """A matrix of keys by values per head, and the last inputs of the convolution."""
        matrices = StatePart((self.num_value_heads, self.key_width, self.value_width))
        return matrices, StatePart((self.conv_taps - 1, self.conv_channels), exact=False)


@dataclass(frozen=True, slots=True)
class DenseSpec:
    """Dense gated feed-forward."""

    width: int
    bias: bool = False
    activation: Activation = SILU


@dataclass(frozen=True, slots=True)
class SharedSpec:
    """Shared experts, which process every token, as one dense feed-forward of their total width.

    `gated`: their output is multiplied by the sigmoid of a projection of the token.
    """

    dense: DenseSpec
    gated: bool = False


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """Routed gated experts.

    `bias`: the experts' products have biases. `router_bias`: bias of the router's logits. `selection_bias`: bias that
    applies to the selection of experts only. `exact_router`: the router's weights and logits are float32. `held`: the
    expert of each slot on this rank, if the other experts are on other ranks.
    """

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
        """Number of experts with weights on this rank."""
        return self.routing.num_experts if self.held is None else len(self.held)


@dataclass(frozen=True, slots=True)
class NormSpec:
    """Normalization of the residual stream: RMS norm, or layer norm with a bias ("layer", Ba et al. 2016).

    `weight_offset`: value to add to the weights on disk.
    """

    eps: float
    kind: Literal["rms", "layer"] = "rms"
    weight_offset: float = 0.0


@dataclass(frozen=True, slots=True)
class NormedResidual:
    """Residual connections that start after the norms (MiniMax-01, arXiv 2501.08313).

    x becomes alpha · norm(x) + beta · half(norm(x)), with factors for attention and for the feed-forward.
    """

    attention_alpha: float
    attention_beta: float
    ffn_alpha: float
    ffn_beta: float


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer: norm → attention → add → norm → feed-forward → add.

    `pre_norms`: the inputs of attention and feed-forward are normalized. `attention_post_norm`, `ffn_post_norm`: the
    output of attention or of the feed-forward is normalized before the addition. `residual`: other residual connections
    than the usual ones. `only_experts`: this rank has only the held routed experts; the rest of the layer is on other
    ranks.
    """

    attention: AttentionSpec | LatentAttentionSpec | RecurrentSpec
    ffn: DenseSpec | MoeSpec
    attention_post_norm: bool = False
    ffn_post_norm: bool = False
    pre_norms: bool = True
    residual: NormedResidual | None = None
    only_experts: bool = False


@dataclass(frozen=True, slots=True)
class VisionSpec:
    """Vision encoder: a transformer over an image's patches, whose groups of patches become tokens of the decoder.

    An image of `temporal_patch_size` equal frames is cut into patches of `patch_size` pixels; the outputs of
    `merge_size` × `merge_size` patches are merged into one embedding. `num_side_positions`: side of the square of
    learned positions, which are interpolated to the image's grid. `deepstack_layers`: encoder layers whose output is
    merged too, and added to the output of the first decoder layers (Meng et al. 2024). `image_token_id`: token that
    holds the place of an embedding in a prompt.
    """

    num_layers: int
    hidden_size: int
    ffn_width: int
    num_heads: int
    num_channels: int
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    num_side_positions: int
    rope_theta: float
    deepstack_layers: tuple[int, ...]
    image_token_id: int
    vision_start_token_id: int
    vision_end_token_id: int
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)  # of a channel, subtracted from pixels in 0 … 1
    deviation: tuple[float, ...] = (0.5, 0.5, 0.5)
    norm_eps: float = 1e-6

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden_size // self.num_heads

    @property
    def patch_width(self) -> int:
        """Number of values of one patch."""
        return self.num_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def merged_width(self) -> int:
        """Width of the patches that are merged into one token."""
        return self.hidden_size * self.merge_size**2


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A whole decoder.

    `embedding_multiplier`, `residual_multiplier`, `logits_multiplier`: factors of the embeddings, of the layers' two
    contributions to the residual stream, and of the logits. `logit_softcap`: bound of the logits, applied with tanh.
    `weight_format`: format of a checkpoint whose weights (for mxfp4: experts) are quantized. `ignored_prefixes`:
    prefixes of tensors in the checkpoint that decoding does not use. `zero_if_absent`: suffixes of tensors that are
    zero if the checkpoint lacks them. `mtp`: the multi-token prediction layer after the last layer, if there is one; it
    predicts a token from the token before it and the hidden state before that. `mtp_after`: set if this spec is itself
    that of an MTP layer: the number of layers of its model, whose vocabulary it uses. `vision`: the encoder of images,
    if the model has one.
    """

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
    zero_if_absent: tuple[str, ...] = ()
    mtp: LayerSpec | None = None
    mtp_after: int | None = None
    vision: VisionSpec | None = None

    def within(self, max_context_tokens: int | None) -> ModelSpec:
        """Return the spec for contexts of at most `max_context_tokens`; None: the model's maximum.

        Only LongRoPE depends on this.
        """
        if max_context_tokens is None or max_context_tokens >= self.max_context_tokens:
            return self
        layers = tuple(_layer_within(layer, max_context_tokens) for layer in self.layers)
        mtp = None if self.mtp is None else _layer_within(self.mtp, max_context_tokens)
        return replace(self, layers=layers, mtp=mtp)

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """Rotary embeddings of the attention layers, each once."""
        attentions = [layer.attention for layer in self.layers]
        return tuple(dict.fromkeys(one.rope for one in attentions if not isinstance(one, RecurrentSpec)))

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """Indices of the layers that keep a state instead of keys and values."""
        return tuple(i for i, layer in enumerate(self.layers) if isinstance(layer.attention, RecurrentSpec))

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers with routed experts."""
        return tuple(i for i, layer in enumerate(self.layers) if isinstance(layer.ffn, MoeSpec))


def _layer_within(layer: LayerSpec, max_context_tokens: int) -> LayerSpec:
    if isinstance(layer.attention, RecurrentSpec):
        return layer
    rope = layer.attention.rope
    if not isinstance(rope.scaling, LongRopeScaling):
        return layer
    scaling = replace(rope.scaling, longest_context=min(rope.scaling.longest_context, max_context_tokens))
    return replace(layer, attention=replace(layer.attention, rope=replace(rope, scaling=scaling)))
