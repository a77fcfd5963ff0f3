"""Specification of a decoder as data: a list of layers, each with an attention and a feed-forward spec.

Independent of tensors and model families: `families` reads a checkpoint's config.json into a ModelSpec. A family with a
new kind of attention or routing adds a spec here and its layer in `layers`, not a branch in the forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from moiety_engine.model.attention_options import DividedNormSpec, IndexerSpec, OutputGateSpec, QueryGrowth
from moiety_engine.model.compressed_specs import StreamsSpec, has_entries
from moiety_engine.model.layer_embedding_spec import LayerEmbeddingSpec
from moiety_engine.model.mtp_names import MtpNames
from moiety_engine.model.paged_state_spec import PagedStateSpec
from moiety_engine.model.recurrent_specs import RecurrentSpec
from moiety_engine.model.residual_specs import NormedResidual, ScaledResidual
from moiety_engine.model.rope_spec import LongRopeScaling, RopeSpec
from moiety_engine.model.router_mlp_spec import RouterMlpSpec
from moiety_engine.model.vision_spec import VisionSpec
from moiety_kernels.moe.activation import SILU, Activation
from moiety_kernels.quantization.weight import WeightFormat
from moiety_kernels.route.spec import RoutingSpec

KV_SCALE_BYTES = 4  # per scale; `cached_rows` counts the scales of a position


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Grouped-query attention.

    `own_value_width`: width of a head's value, if it is not `head_dim`. `value_scale`: factor of values. `value_norm`:
    RMS normalization of each head's value without weights. `keys_are_values`: values are projected as keys are, by the
    same tensor on disk (Gemma 4). `scale`: factor of scores before the softmax. `qk_norm`: RMS normalization of each
    head, of each head without weights ("unit"), or of the whole width of all heads, before the rotation or, with
    `rotates_first`, after it. `window`: number of positions that a query sees; with `chunked`, a query sees those of
    its own chunk of `window` positions (Llama 4). `sinks`: attention sinks: each head has an extra score in the softmax
    without a value. `gate`: the output of heads is multiplied by an activation of a projection of the layer's input.
    `query_growth`: queries are multiplied by a factor of their position. `divided_norm`: set on a rank if all heads are
    normalized together and other ranks have some. `kv_layer`: index of the earlier layer whose keys and values the
    queries read; None: the layer's own (Gemma 4 E2B).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec
    scale: float
    own_value_width: int | None = None
    value_scale: float = 1.0
    value_norm: bool = False
    keys_are_values: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: Literal["none", "head", "unit", "full"] = "none"
    clip: float | None = None
    window: int | None = None
    chunked: bool = False
    sinks: bool = False
    rotates_first: bool = False
    gate: OutputGateSpec | None = None
    query_growth: QueryGrowth | None = None
    divided_norm: DividedNormSpec | None = None
    kv_layer: int | None = None

    @property
    def q_width(self) -> int:
        """Width of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def gate_width(self) -> int:
        """Number of gates of the output; 0 if it has none."""
        if self.gate is None:
            return 0
        return self.num_heads if self.gate.per_head else self.output_width

    @property
    def value_width(self) -> int:
        """Width of one head's value."""
        return self.head_dim if self.own_value_width is None else self.own_value_width

    @property
    def output_width(self) -> int:
        """Width of the output of all heads."""
        return self.num_heads * self.value_width

    @property
    def qkv_widths(self) -> tuple[int, int, int]:
        """Widths of all query heads, of all key heads, and of all value heads that the layer projects."""
        if self.kv_layer is not None:
            return self.q_width, 0, 0
        return self.q_width, self.kv_width, self.num_kv_heads * self.value_width

    @property
    def kv_width(self) -> int:
        """Width of all key heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def cached_values(self) -> int:
        """Values that a position takes in the cache."""
        return self.num_kv_heads * (self.head_dim + self.value_width) if self.kv_layer is None else 0

    @property
    def cached_rows(self) -> int:
        """Scales per position in an int8 cache: one for each key and each value."""
        return 2 * self.num_kv_heads if self.kv_layer is None else 0

    @property
    def cache_shape(self) -> tuple[int, ...]:
        """Number of key-value heads, and widths of a key and of a value."""
        return self.num_kv_heads, self.head_dim, self.value_width


@dataclass(frozen=True, slots=True)
class LatentAttentionSpec:
    """Multi-head latent attention (DeepSeek-V2).

    Keys and values of all heads come from one latent row per position; all heads share one rotated key part.
    `query_rank`: width of the latent row of queries, if they have one. `indexer`: set if attention is sparse. `gated`:
    queries are projected from their latent row before and after its normalization, together with an output gate for
    each value of all heads (A.X-K2). `head_gates`: the output of each head is multiplied by the sigmoid of a projection
    of the layer's input. `query_factor`, `latent_factor`: factors of the normalized latent rows of queries, and of keys
    and values, which the norms' weights contain here (LongCat-Flash).
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
    indexer: IndexerSpec | None = None
    gated: bool = False
    head_gates: bool = False
    query_factor: float = 1.0
    latent_factor: float = 1.0

    @property
    def head_dim(self) -> int:
        """Width of a query or key of one head."""
        return self.nope_width + self.rope.rotary_width

    @property
    def output_width(self) -> int:
        """Width of the output of all heads."""
        return self.num_heads * self.value_width

    @property
    def query_output_width(self) -> int:
        """Width of all heads' queries, and of their gates if there are any."""
        return self.num_heads * (self.head_dim + (self.value_width if self.gated else 0))

    @property
    def query_input_width(self) -> int:
        """Width of the queries' first projection: that of their latent row, or of all heads."""
        return self.num_heads * self.head_dim if self.query_rank is None else self.query_rank

    @property
    def cached_values(self) -> int:
        """Values that a position takes in the cache, without its index key."""
        return self.latent_width + self.rope.rotary_width

    @property
    def index_key_width(self) -> int:
        """Values of a position's index key in the cache; 0 if the layer has no indexer."""
        return 0 if self.indexer is None or self.indexer.reuses else self.indexer.head_dim

    @property
    def cached_rows(self) -> int:
        """Scales per position in an int8 cache: one for the latent part and one for the rotated part."""
        return 2

    @property
    def cache_shape(self) -> tuple[int, ...]:
        """Widths of the latent part and of the rotated part of a row, and of an index key."""
        return self.latent_width, self.rope.rotary_width, self.index_key_width


@dataclass(frozen=True, slots=True)
class DenseSpec:
    """Dense feed-forward. `activation` says whether it has gates. `factor`: factor of the output."""

    width: int
    bias: bool = False
    activation: Activation = SILU
    factor: float = 1.0

    @property
    def up_width(self) -> int:
        """Number of rows of the first product: gates and ups, or ups only."""
        return self.activation.num_inputs * self.width


@dataclass(frozen=True, slots=True)
class SharedSpec:
    """Shared experts, which process every token, as one dense feed-forward of their total width.

    `gated`: their output is multiplied by the sigmoid of a projection of the token. `factor`: factor of their output.
    """

    dense: DenseSpec
    gated: bool = False
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """Routed experts. `activation` says whether they have gates.

    `bias`: the experts' products have biases. `output_bias`: their weighted sum has one, as all second products of
    experts whose weights sum to 1 (JetMoe). `router_bias`: bias of the router's logits. `selection_bias`: bias that
    applies to the selection of experts only. `weighs_input`: the weight of a token's only expert multiplies its input
    in place of its output (Llama 4). `normed`: the router, routed and shared experts normalize their input and output,
    each by its own weights, and experts have a factor (Gemma 4). `exact_router`: the router's weights and logits are
    float32. `hashed_tokens`: number of tokens in a table that chooses the experts of each token, which the router only
    weighs then (DeepSeek-V4); 0: there is no table. `latent_width`: width of experts' input and output, if it is not
    the model's; all experts of a layer share a projection into it and one out of it (Nemotron 3 Super). `zero_experts`:
    number of the router's last experts, which return their input (LongCat-Flash), or
    nothing after a `router_mlp`, hidden layers of the router (ZAYA1). `held`: the expert of each slot on
    this rank, if the other experts are on other ranks.
    """

    width: int
    routing: RoutingSpec
    activation: Activation = SILU
    bias: bool = False
    output_bias: bool = False
    router_bias: bool = False
    selection_bias: bool = False
    weighs_input: bool = False
    normed: bool = False
    exact_router: bool = False
    hashed_tokens: int = 0
    shared: SharedSpec | None = None
    latent_width: int | None = None
    zero_experts: int = 0
    router_mlp: RouterMlpSpec | None = None
    held: tuple[int, ...] | None = None

    @property
    def up_width(self) -> int:
        """Number of rows of an expert's first product: gates and ups, or ups only."""
        return self.activation.num_inputs * self.width

    def input_width(self, hidden_size: int) -> int:
        """Return the width of experts' input and output in a model of width `hidden_size`."""
        return hidden_size if self.latent_width is None else self.latent_width

    @property
    def num_experts(self) -> int:
        """Number of experts with weights, on all ranks."""
        return self.routing.num_experts - self.zero_experts

    @property
    def num_held(self) -> int:
        """Number of experts with weights on this rank."""
        return self.num_experts if self.held is None else len(self.held)


@dataclass(frozen=True, slots=True)
class NormSpec:
    """Normalization of the residual stream: RMS norm, or layer norm with a bias ("layer", Ba et al. 2016).

    `weight_offset`: value to add to the weights on disk. `final_eps`: that of the model's last norm, if not `eps`.
    """

    eps: float
    kind: Literal["rms", "layer"] = "rms"
    weight_offset: float = 0.0
    final_eps: float | None = None


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer: norm → attention → add → norm → feed-forward → add.

    `ffn`: None if the layer ends after attention, as some of Nemotron-H do. `defers_experts`: the output of routed
    experts is added to that of the next layer's feed-forward; shared experts are a dense feed-forward (LongCat-Flash).
    `pre_norms`: the inputs of attention and feed-forward are normalized. `attention_post_norm`, `ffn_post_norm`: the
    output of attention or of the feed-forward is normalized before the addition. `scaled`: the layer's output is
    multiplied by a learned number. `embedded`: an embedding of the token for this layer is added (Gemma 4 E2B).
    `parallel`: the feed-forward reads the same normalized input as attention.
    `shares_input`: attention reads what that of the layer before reads, which has no feed-forward (Falcon-H1).
    `residual`: other residual connections than the usual ones. `attention_gate_rank` and `ffn_gate_rank`: inner width
    of the gate that the normalized input is multiplied by; 0: it has none. `only_experts`: this rank has only the held
    routed experts; the rest of the layer is on other ranks.
    """

    attention: AttentionSpec | LatentAttentionSpec | RecurrentSpec
    ffn: DenseSpec | MoeSpec | None
    attention_post_norm: bool = False
    ffn_post_norm: bool = False
    pre_norms: bool = True
    scaled: bool = False
    embedded: bool = False
    parallel: bool = False
    shares_input: bool = False
    attention_gate_rank: int = 0
    ffn_gate_rank: int = 0
    residual: NormedResidual | ScaledResidual | None = None
    defers_experts: bool = False
    only_experts: bool = False


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A whole decoder.

    `embedding_multiplier`, `residual_multiplier`, `logits_multiplier`: factors of the embeddings, of the layers' two
    contributions to the residual stream, and of the logits. `logit_softcap`: bound of the logits, applied with tanh.
    `weight_format`: format of a checkpoint whose weights (for mxfp4: experts) are quantized. `ignored_prefixes`:
    prefixes of tensors in the checkpoint that decoding does not use. `zero_if_absent`: suffixes of tensors that are
    zero if the checkpoint lacks them. `mtp_layers`: the multi-token prediction layers; the first one predicts a token
    from the token and the hidden state before it, each further one the token after that. `mtp_reads_model`: each reads
    the hidden states of the model, not those of the layer before it. `mtp_after`: set for the spec of an MTP layer: the
    number of layers of its model, whose vocabulary it uses. `mtp_index`: its index then. `mtp_names`: names of the
    first MTP layer's tensors, if they are not those of a further layer. `vision`: the encoder of images, if the model
    has one. `streams`: hyper-connections, if the residual stream has several rows for each token. `layer_embeddings`:
    the embeddings of tokens for each layer, if some layers add them. `block_starts`: index of each layer's attention on
    disk, where its feed-forward, if it has one, is the next layer (Nemotron-H), or where two layers are one on disk
    (LongCat-Flash, Falcon-H1); (): layers are as on disk.
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
    mtp_layers: tuple[LayerSpec, ...] = ()
    mtp_reads_model: bool = False
    mtp_after: int | None = None
    mtp_index: int = 0
    mtp_names: MtpNames | None = None
    vision: VisionSpec | None = None
    streams: StreamsSpec | None = None
    layer_embeddings: LayerEmbeddingSpec | None = None
    block_starts: tuple[int, ...] = ()

    def within(self, max_context_tokens: int | None) -> ModelSpec:
        """Return the spec for contexts of at most `max_context_tokens`, on which LongRoPE depends; None: no limit."""
        if max_context_tokens is None or max_context_tokens >= self.max_context_tokens:
            return self
        layers = tuple(_layer_within(layer, max_context_tokens) for layer in self.layers)
        mtp_layers = tuple(_layer_within(layer, max_context_tokens) for layer in self.mtp_layers)
        return replace(self, layers=layers, mtp_layers=mtp_layers)

    @property
    def mtp(self) -> LayerSpec | None:
        """First MTP layer; None if the model has none."""
        return self.mtp_layers[0] if self.mtp_layers else None

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """Rotary embeddings of the attention layers, each once."""
        attentions = [layer.attention for layer in self.layers]
        rotating = (a for a in attentions if isinstance(a, PagedStateSpec) or not isinstance(a, RecurrentSpec))
        return tuple(dict.fromkeys(attention.rope for attention in rotating))

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """Indices of the layers that keep a state of fixed size."""
        return tuple(i for i, layer in enumerate(self.layers) if isinstance(layer.attention, RecurrentSpec))

    @property
    def paged_layers(self) -> tuple[int, ...]:
        """Indices of the layers that keep keys and values, or compressed entries, in blocks."""
        attentions = [layer.attention for layer in self.layers]
        pages = (has_entries(a) if isinstance(a, RecurrentSpec) else kv_layer_of(a) is None for a in attentions)
        return tuple(index for index, has_pages in enumerate(pages) if has_pages)

    @property
    def needs_cpu(self) -> bool:
        """Return whether some layer has attention that no GPU kernel computes."""
        return any(isinstance(layer.attention, PagedStateSpec) for layer in self.layers)

    @property
    def num_stored_layers(self) -> int:
        """Number of layers on disk, MTP layers excluded."""
        if not self.block_starts:
            return len(self.layers)
        return self.block_starts[-1] + (1 if self.layers[-1].ffn is None or self.has_sublayers else 2)

    @property
    def has_sublayers(self) -> bool:
        """Return whether two layers are one on disk."""
        return len({*self.block_starts}) < len(self.block_starts)

    @property
    def has_parallel_layers(self) -> bool:
        """Return whether some layers read the input of the layer before."""
        return any(layer.shares_input for layer in self.layers)

    @property
    def defers_experts(self) -> bool:
        """Return whether some layer's experts are added by the layer after it."""
        return any(layer.defers_experts for layer in self.layers)

    @property
    def has_zero_experts(self) -> bool:
        """Return whether some experts return their input."""
        return any(isinstance(layer.ffn, MoeSpec) and layer.ffn.zero_experts > 0 for layer in self.layers)

    @property
    def has_latent_experts(self) -> bool:
        """Return whether experts compute in another width than the model's."""
        return any(isinstance(layer.ffn, MoeSpec) and layer.ffn.latent_width is not None for layer in self.layers)

    @property
    def has_normed_experts(self) -> bool:
        """Return whether some MoE layer normalizes the output of its experts before it is added to anything."""
        return any(isinstance(layer.ffn, MoeSpec) and layer.ffn.normed for layer in self.layers)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers with routed experts."""
        return tuple(i for i, layer in enumerate(self.layers) if isinstance(layer.ffn, MoeSpec))


def kv_layer_of(attention: AttentionSpec | LatentAttentionSpec | RecurrentSpec) -> int | None:
    """Return the index of the layer whose keys and values the attention reads; None: it has its own, or a state."""
    return attention.kv_layer if isinstance(attention, AttentionSpec) else None


def _layer_within(layer: LayerSpec, max_context_tokens: int) -> LayerSpec:
    if isinstance(layer.attention, RecurrentSpec):
        return layer
    rope = layer.attention.rope
    if not isinstance(rope.scaling, LongRopeScaling):
        return layer
    scaling = replace(rope.scaling, longest_context=min(rope.scaling.longest_context, max_context_tokens))
    return replace(layer, attention=replace(layer.attention, rope=replace(rope, scaling=scaling)))
