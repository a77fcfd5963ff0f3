"""Weights of a decoder, allocated from its spec. Independent of names on disk and of the computation.

Related matrices are fused (query, key and value; gate and up; all experts of a layer), so that one product computes
them.

V vocabulary, D model width, J twice the model width, C fused query-key-value width, E experts, F feed-forward width.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from moiety_engine.model.attention_options import IndexerSpec
from moiety_engine.model.compressed_weights import StreamsWeights, allocate_streams
from moiety_engine.model.layer_embedding_weights import (
    AddedEmbeddingWeights,
    LayerEmbeddingWeights,
    allocate_added,
    allocate_table,
)
from moiety_engine.model.norm_weights import NormGateWeights, NormWeights
from moiety_engine.model.recurrent_specs import RecurrentSpec
from moiety_engine.model.recurrent_weights import RECURRENT_PRODUCTS, RecurrentWeights, allocate_recurrent
from moiety_engine.model.residual_specs import ScaledResidual
from moiety_engine.model.residual_weights import ResidualScales, TermScale, allocate_scales, allocate_term
from moiety_engine.model.routed_attention_spec import (
    ROUTED_PRODUCTS,
    RoutedAttentionSpec,
    RoutedAttentionWeights,
    allocate_routed,
)
from moiety_engine.model.router_mlp import RouterMlpWeights, allocate_router_mlp
from moiety_engine.model.spec import (
    AttentionSpec,
    DenseSpec,
    LatentAttentionSpec,
    LayerSpec,
    ModelSpec,
    MoeSpec,
    SharedSpec,
)
from moiety_engine.model.vision_weights import LinearWeights, PatchMergerWeights, VisionLayerWeights, VisionWeights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from moiety_engine.model.vision_spec import VisionSpec
    from moiety_kernels.quantization import Weight


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    qkv_CD: Weight
    output_DC: Weight
    qkv_bias_C: Tensor | None
    output_bias_D: Tensor | None
    q_norm: Tensor | None  # float32, head width or width of all heads
    k_norm: Tensor | None
    sinks_H: Tensor | None  # float32
    gate_CD: Weight | None  # of the output


@dataclass(frozen=True, slots=True)
class IndexerWeights:
    query_up_QC: Tensor  # from the queries' latent row to all index queries
    key_ID: Tensor
    key_norm: NormWeights  # a layer norm of the index key
    head_weight_HD: Tensor  # float32, to the weight of each index query


@dataclass(frozen=True, slots=True)
class LatentAttentionWeights:
    input_CD: Tensor  # rows: queries or their latent row, then the latent row, then the rotated part of keys
    input_bias_C: Tensor | None
    query_norm: Tensor | None  # float32
    query_up: Weight | None  # from the queries' latent row to all heads, and then to all gates
    latent_norm_L: Tensor  # float32
    key_up_HLd: Tensor  # from the unrotated part of a head's query into the latent space
    value_up_HdL: Tensor
    output_DC: Weight
    output_bias_D: Tensor | None
    gate_HD: Tensor | None = None
    indexer: IndexerWeights | None = None


@dataclass(frozen=True, slots=True)
class DenseWeights:
    gate_up_2FD: Weight  # without gates it has F rows, as have the experts' tensors of this name
    down_DF: Weight
    gate_up_bias_2F: Tensor | None
    down_bias_D: Tensor | None


@dataclass(frozen=True, slots=True)
class SharedWeights:
    dense: DenseWeights
    gate_1D: Tensor | None


@dataclass(frozen=True, slots=True)
class MixtureNorms:
    """Weights of the norms in an MoE layer, all float32."""

    router_D: Tensor
    routed_D: Tensor  # of the routed experts' input
    routed_output_D: Tensor
    shared_D: Tensor
    shared_output_D: Tensor
    expert_scale_E: Tensor  # factor of each expert's weight


@dataclass(frozen=True, slots=True)
class LatentProjections:
    """Projections between the model's width and the width of experts, L."""

    down_LD: Weight
    up_DL: Weight


@dataclass(frozen=True, slots=True)
class MoeWeights:
    router_ED: Tensor  # float32 if the router is exact
    gate_up_E2FD: Weight
    down_EDF: Weight
    router_bias_E: Tensor | None  # all biases are float32
    selection_bias_E: Tensor | None
    gate_up_bias_E2F: Tensor | None
    down_bias_ED: Tensor | None
    shared: SharedWeights | None
    norms: MixtureNorms | None = None
    expert_of_token_VK: Tensor | None = None  # int32, if a table has the experts of each token
    latent: LatentProjections | None = None
    router_mlp: RouterMlpWeights | None = None  # before the router


@dataclass(frozen=True, slots=True)
class LayerWeights:
    attention_norm: NormWeights | None
    attention: AttentionWeights | RoutedAttentionWeights | LatentAttentionWeights | RecurrentWeights
    ffn_norm: NormWeights | None
    ffn: DenseWeights | MoeWeights | None
    attention_post_norm: NormWeights | None
    ffn_post_norm: NormWeights | None
    scale_1: Tensor | None = None  # float32, factor of the layer's output
    attention_streams: StreamsWeights | None = None  # of the mixtures that attention and the feed-forward read
    ffn_streams: StreamsWeights | None = None
    embedding: AddedEmbeddingWeights | None = None
    attention_scales: ResidualScales | None = None
    ffn_scales: ResidualScales | None = None


@dataclass(frozen=True, slots=True)
class MtpInputWeights:
    """Weights that combine a token's embedding with the model's hidden state of the token before it."""

    token_norm: NormWeights
    before_norm: NormWeights
    projection_DJ: Tensor  # input: the token's half, then the hidden state's half


@dataclass(frozen=True, slots=True)
class ModelWeights:
    embedding_VD: Tensor  # embedding and head have no rows if another model's are used
    layers: tuple[LayerWeights, ...]
    final_norm: NormWeights
    head_VD: Weight  # the embedding itself if tied, unless the head is quantized
    head_bias_V: Tensor | None
    mtp_input: MtpInputWeights | None = None
    vision: VisionWeights | None = None
    streams: StreamsWeights | None = None  # of the mixture that the head reads
    layer_embeddings: LayerEmbeddingWeights | None = None
    input_scale: TermScale | None = None  # of the first layer's input


def allocate(
    spec: ModelSpec,
    *,
    device: torch.device,
    dtype: torch.dtype,
    product_dtype: torch.dtype | None = None,
    groups: Callable[[int], int] | None = None,
    experts_in: Callable[[tuple[int, ...], torch.dtype], Tensor] | None = None,
) -> ModelWeights:
    """Return uninitialized tensors for every weight of the spec.

    `product_dtype`: type of the large products, if different. `groups`: number of groups that products have in place of
    their inputs. `experts_in`: allocator of the experts' products.
    """
    new = _Allocator(spec, device, dtype, product_dtype or dtype, groups, experts_in)
    if any(one.only_experts for one in spec.layers):
        new = replace(new, rows=0)
    is_mtp_layer = spec.mtp_after is not None
    rows = 0 if is_mtp_layer else spec.vocab_size
    embedding = new.matrix(rows, spec.hidden_size)
    return ModelWeights(
        embedding_VD=embedding,
        layers=tuple(new.layer(one) for one in spec.layers),
        final_norm=new.norm(),
        head_VD=embedding if spec.tie_word_embeddings else new.matrix(rows, spec.hidden_size),
        head_bias_V=new.vector(rows) if spec.head_bias else None,
        mtp_input=new.mtp_input() if is_mtp_layer else None,
        vision=None if spec.vision is None else new.vision(spec.vision),
        streams=new.streams(head=True),
        layer_embeddings=allocate_table(spec, new),
        input_scale=allocate_term(spec.hidden_size, new) if _scales_terms(spec.layers[0]) else None,
    )


_PRODUCTS: dict[type, tuple[str, ...]] = {  # the weights with most of the memory and compute time
    AttentionWeights: ("qkv_CD", "output_DC", "gate_CD"),
    **RECURRENT_PRODUCTS,
    **ROUTED_PRODUCTS,
    LatentAttentionWeights: ("input_CD", "query_up", "output_DC"),
    DenseWeights: ("gate_up_2FD", "down_DF"),
    MoeWeights: ("gate_up_E2FD", "down_EDF"),
    LatentProjections: ("down_LD", "up_DL"),
}


def products_of(part: Any, *, experts_only: bool = False) -> Iterator[Tensor]:
    """Yield the weights of large products in a part of a model, always in the same order."""
    if isinstance(part, tuple):
        for one in part:
            yield from products_of(one, experts_only=experts_only)
    elif is_dataclass(part):
        names = _PRODUCTS.get(type(part), ()) if isinstance(part, MoeWeights) or not experts_only else ()
        for field in fields(part):
            value = getattr(part, field.name)
            if field.name in names and value is not None:
                yield value
            else:
                yield from products_of(value, experts_only=experts_only)


def _scales_terms(layer: LayerSpec) -> bool:
    return isinstance(layer.residual, ScaledResidual)


@dataclass(frozen=True, slots=True)
class _Allocator:
    spec: ModelSpec
    device: torch.device
    dtype: torch.dtype
    product_dtype: torch.dtype
    groups: Callable[[int], int] | None
    experts_in: Callable[[tuple[int, ...], torch.dtype], Tensor] | None = None
    rows: int | None = None  # overrides the number of rows of every tensor; None: no override

    def expert_product(self, *shape: int) -> Tensor:
        return self.product(*shape) if self.experts_in is None else self.experts_in(shape, self.product_dtype)

    def product(self, *shape: int) -> Tensor:
        if self.groups is not None:
            shape = (*shape[:-1], self.groups(shape[-1]))
        return self._empty(shape, self.product_dtype)

    def matrix(self, *shape: int) -> Tensor:
        return self._empty(shape, self.dtype)

    def vector(self, *shape: int) -> Tensor:
        return self._empty(shape, torch.float32)

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        shape = shape if self.rows is None else (self.rows, *shape[1:])
        return torch.empty(shape, device=self.device, dtype=dtype)

    def norm(self, gate_rank: int = 0) -> NormWeights:
        size = self.spec.hidden_size
        gate = NormGateWeights(self.matrix(gate_rank, size), self.matrix(size, gate_rank)) if gate_rank else None
        return NormWeights(self.vector(size), self.vector(size) if self.spec.norm.kind == "layer" else None, gate)

    def mtp_input(self) -> MtpInputWeights:
        size = self.spec.hidden_size
        return MtpInputWeights(self.norm(), self.norm(), self.matrix(size, 2 * size))

    def linear(self, num_outputs: int, num_inputs: int) -> LinearWeights:
        return LinearWeights(self.matrix(num_outputs, num_inputs), self.vector(num_outputs))

    def vision(self, v: VisionSpec) -> VisionWeights:
        def norm(size: int) -> NormWeights:
            return NormWeights(self.vector(size), self.vector(size))

        def merger(norm_width: int) -> PatchMergerWeights:
            up, down = self.linear(v.merged_width, v.merged_width), self.linear(self.spec.hidden_size, v.merged_width)
            return PatchMergerWeights(norm(norm_width), up, down)

        size = v.hidden_size
        return VisionWeights(
            patch=self.linear(size, v.patch_width),
            positions_QD=self.matrix(v.num_side_positions**2, size),
            layers=tuple(
                VisionLayerWeights(
                    attention_norm=norm(size),
                    qkv=self.linear(3 * size, size),
                    output=self.linear(size, size),
                    ffn_norm=norm(size),
                    up=self.linear(v.ffn_width, size),
                    down=self.linear(size, v.ffn_width),
                )
                for _ in range(v.num_layers)
            ),
            merger=merger(size),
            deepstack=tuple(merger(v.merged_width) for _ in v.deepstack_layers),
        )

    def layer(self, one: LayerSpec) -> LayerWeights:
        dense = None if one.ffn is None or isinstance(one.ffn, MoeSpec) else self.dense(one.ffn)
        ffn = self.experts(one.ffn) if isinstance(one.ffn, MoeSpec) else dense
        normed = isinstance(one.ffn, MoeSpec) and one.ffn.normed
        has_norm = one.pre_norms and ffn is not None and not (normed or one.parallel)
        return LayerWeights(
            attention_norm=self.norm(one.attention_gate_rank) if one.pre_norms and not one.shares_input else None,
            attention=self.attention(one.attention),
            ffn_norm=self.norm(one.ffn_gate_rank) if has_norm else None,
            ffn=ffn,
            attention_post_norm=self.norm() if one.attention_post_norm else None,
            ffn_post_norm=self.norm() if one.ffn_post_norm else None,
            scale_1=self.vector(1) if one.scaled else None,
            attention_streams=self.streams(),
            ffn_streams=self.streams(),
            embedding=allocate_added(self.spec, self) if one.embedded else None,
            attention_scales=allocate_scales(self.spec.hidden_size, self) if _scales_terms(one) else None,
            ffn_scales=allocate_scales(self.spec.hidden_size, self) if _scales_terms(one) else None,
        )

    def streams(self, *, head: bool = False) -> StreamsWeights | None:
        spec = self.spec.streams
        return None if spec is None else allocate_streams(spec, self.spec.hidden_size, self, head=head)

    def attention(
        self, a: AttentionSpec | LatentAttentionSpec | RecurrentSpec
    ) -> AttentionWeights | RoutedAttentionWeights | LatentAttentionWeights | RecurrentWeights:
        if isinstance(a, LatentAttentionSpec):
            return self.latent(a)
        if isinstance(a, RoutedAttentionSpec):
            return allocate_routed(a, self.spec.hidden_size, self)
        return self.grouped(a) if isinstance(a, AttentionSpec) else allocate_recurrent(a, self.spec.hidden_size, self)

    def latent(self, a: LatentAttentionSpec) -> LatentAttentionWeights:
        fused, size = a.query_input_width + a.cached_values, self.spec.hidden_size
        return LatentAttentionWeights(
            input_CD=self.product(fused, size),
            input_bias_C=self.vector(fused) if a.input_bias else None,
            query_norm=None if a.query_rank is None else self.vector(a.query_rank),
            query_up=None
            if a.query_rank is None
            else self.product(a.query_output_width, (2 if a.gated else 1) * a.query_rank),
            latent_norm_L=self.vector(a.latent_width),
            key_up_HLd=self.matrix(a.num_heads, a.latent_width, a.nope_width),
            value_up_HdL=self.matrix(a.num_heads, a.value_width, a.latent_width),
            output_DC=self.product(size, a.num_heads * a.value_width),
            output_bias_D=self.vector(size) if a.output_bias else None,
            gate_HD=self.matrix(a.num_heads, size) if a.head_gates else None,
            indexer=self.indexer(a.indexer, a.query_input_width) if a.indexer and not a.indexer.reuses else None,
        )

    def indexer(self, i: IndexerSpec, query_rank: int) -> IndexerWeights:
        size = self.spec.hidden_size
        return IndexerWeights(
            query_up_QC=self.matrix(i.num_heads * i.head_dim, query_rank),
            key_ID=self.matrix(i.head_dim, size),
            key_norm=NormWeights(self.vector(i.head_dim), self.vector(i.head_dim)),
            head_weight_HD=self.vector(i.num_heads, size),
        )

    def grouped(self, a: AttentionSpec) -> AttentionWeights:
        full, fused, size = a.qk_norm == "full", sum(a.qkv_widths), self.spec.hidden_size
        has_norms = a.qk_norm not in ("none", "unit")
        return AttentionWeights(
            qkv_CD=self.product(fused, size),
            output_DC=self.product(size, a.output_width),
            qkv_bias_C=self.vector(fused) if a.qkv_bias else None,
            output_bias_D=self.vector(size) if a.output_bias else None,
            q_norm=self.vector(a.q_width if full else a.head_dim) if has_norms else None,
            k_norm=self.vector(a.kv_width if full else a.head_dim) if has_norms and a.kv_layer is None else None,
            sinks_H=self.vector(a.num_heads) if a.sinks else None,
            gate_CD=self.product(a.gate_width, size) if a.gate is not None else None,
        )

    def dense(self, f: DenseSpec) -> DenseWeights:
        size = self.spec.hidden_size
        return DenseWeights(
            gate_up_2FD=self.product(f.up_width, size),
            down_DF=self.product(size, f.width),
            gate_up_bias_2F=self.vector(f.up_width) if f.bias else None,
            down_bias_D=self.vector(size) if f.bias else None,
        )

    def shared(self, s: SharedSpec) -> SharedWeights:
        return SharedWeights(self.dense(s.dense), self.matrix(1, self.spec.hidden_size) if s.gated else None)

    def mixture_norms(self, experts: int) -> MixtureNorms:
        size = self.spec.hidden_size
        return MixtureNorms(
            router_D=self.vector(size),
            routed_D=self.vector(size),
            routed_output_D=self.vector(size),
            shared_D=self.vector(size),
            shared_output_D=self.vector(size),
            expert_scale_E=self.vector(experts),
        )

    def experts(self, f: MoeSpec) -> MoeWeights:
        experts, held, size = f.routing.num_experts, f.num_held, self.spec.hidden_size
        width, latent = f.input_width(size), None
        if f.latent_width is not None:
            latent = LatentProjections(self.product(width, size), self.product(size, width))
        router = size if f.router_mlp is None else f.router_mlp.width
        all_rows = replace(self, rows=None)
        table = self._empty((f.hashed_tokens, f.routing.top_k), torch.int32) if f.hashed_tokens else None
        return MoeWeights(
            router_ED=self.vector(experts, router) if f.exact_router else self.matrix(experts, router),
            gate_up_E2FD=all_rows.expert_product(held, f.up_width, width),
            down_EDF=all_rows.expert_product(held, width, f.width),
            router_bias_E=self.vector(experts) if f.router_bias else None,
            selection_bias_E=self.vector(experts) if f.selection_bias else None,
            gate_up_bias_E2F=all_rows.vector(held, f.up_width) if f.bias else None,
            down_bias_ED=all_rows.vector(held, size) if f.bias or f.output_bias else None,
            shared=None if f.shared is None else self.shared(f.shared),
            norms=self.mixture_norms(experts) if f.normed else None,
            expert_of_token_VK=table,
            latent=latent,
            router_mlp=None if f.router_mlp is None else allocate_router_mlp(f.router_mlp, size, self),
        )
