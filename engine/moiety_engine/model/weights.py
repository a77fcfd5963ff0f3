"""The tensors of a decoder, allocated from its spec. Knows neither their names on disk nor how they are computed with.

Related matrices are kept as one (query, key and value; gate and up; all experts of a layer), so that one product serves
them.

V vocabulary, D model width, C fused query-key-value width, E experts, F feed-forward width, H query heads, d width of a
head, L latent width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from moiety_engine.model.spec import AttentionSpec, DenseSpec, LatentAttentionSpec, LayerSpec, ModelSpec, MoeSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    qkv_CD: Tensor
    output_DC: Tensor
    qkv_bias_C: Tensor | None
    output_bias_D: Tensor | None
    q_norm: Tensor | None  # float32, head width or width of all heads
    k_norm: Tensor | None
    sinks_H: Tensor | None  # float32


@dataclass(frozen=True, slots=True)
class LatentAttentionWeights:
    input_CD: Tensor  # to the queries or their latent row, then the latent row, then the rotated part of keys
    input_bias_C: Tensor | None
    query_norm: Tensor | None  # float32
    query_up: Tensor | None  # from the queries' latent row to all heads
    latent_norm_L: Tensor  # float32
    key_up_HLd: Tensor  # from the unrotated part of a head's query into the latent space
    value_up_HdL: Tensor
    output_DC: Tensor
    output_bias_D: Tensor | None


@dataclass(frozen=True, slots=True)
class DenseWeights:
    gate_up_2FD: Tensor
    down_DF: Tensor
    gate_up_bias_2F: Tensor | None
    down_bias_D: Tensor | None


@dataclass(frozen=True, slots=True)
class MoeWeights:
    router_ED: Tensor
    gate_up_E2FD: Tensor
    down_EDF: Tensor


@dataclass(frozen=True, slots=True)
class LayerWeights:
    attention_norm_D: Tensor  # float32
    attention: AttentionWeights | LatentAttentionWeights
    ffn_norm_D: Tensor  # float32
    ffn: DenseWeights | MoeWeights
    attention_post_norm_D: Tensor | None = None  # float32
    ffn_post_norm_D: Tensor | None = None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    embedding_VD: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm_D: Tensor  # float32
    head_VD: Tensor  # the embedding itself where they are tied


def allocate(spec: ModelSpec, *, device: torch.device, dtype: torch.dtype) -> ModelWeights:
    """Uninitialised tensors for every weight of the spec."""

    def matrix(*shape: int) -> Tensor:
        return torch.empty(shape, device=device, dtype=dtype)

    def vector(size: int) -> Tensor:
        return torch.empty(size, device=device, dtype=torch.float32)

    def attention(a: AttentionSpec | LatentAttentionSpec) -> AttentionWeights | LatentAttentionWeights:
        return latent(a) if isinstance(a, LatentAttentionSpec) else grouped(a)

    def grouped(a: AttentionSpec) -> AttentionWeights:
        full, fused = a.qk_norm == "full", a.q_width + 2 * a.kv_width
        return AttentionWeights(
            qkv_CD=matrix(fused, spec.hidden_size),
            output_DC=matrix(spec.hidden_size, a.q_width),
            qkv_bias_C=vector(fused) if a.qkv_bias else None,
            output_bias_D=vector(spec.hidden_size) if a.output_bias else None,
            q_norm=None if a.qk_norm == "none" else vector(a.q_width if full else a.head_dim),
            k_norm=None if a.qk_norm == "none" else vector(a.kv_width if full else a.head_dim),
            sinks_H=vector(a.num_heads) if a.sinks else None,
        )

    def latent(a: LatentAttentionSpec) -> LatentAttentionWeights:
        fused = a.query_input_width + a.cached_values
        return LatentAttentionWeights(
            input_CD=matrix(fused, spec.hidden_size),
            input_bias_C=vector(fused) if a.input_bias else None,
            query_norm=None if a.query_rank is None else vector(a.query_rank),
            query_up=None if a.query_rank is None else matrix(a.num_heads * a.head_dim, a.query_rank),
            latent_norm_L=vector(a.latent_width),
            key_up_HLd=matrix(a.num_heads, a.latent_width, a.nope_width),
            value_up_HdL=matrix(a.num_heads, a.value_width, a.latent_width),
            output_DC=matrix(spec.hidden_size, a.num_heads * a.value_width),
            output_bias_D=vector(spec.hidden_size) if a.output_bias else None,
        )

    def ffn(f: DenseSpec | MoeSpec) -> DenseWeights | MoeWeights:
        if isinstance(f, MoeSpec):
            experts = f.routing.num_experts
            return MoeWeights(
                router_ED=matrix(experts, spec.hidden_size),
                gate_up_E2FD=matrix(experts, 2 * f.width, spec.hidden_size),
                down_EDF=matrix(experts, spec.hidden_size, f.width),
            )
        return DenseWeights(
            gate_up_2FD=matrix(2 * f.width, spec.hidden_size),
            down_DF=matrix(spec.hidden_size, f.width),
            gate_up_bias_2F=vector(2 * f.width) if f.bias else None,
            down_bias_D=vector(spec.hidden_size) if f.bias else None,
        )

    def layer(one: LayerSpec) -> LayerWeights:
        norms = [vector(spec.hidden_size) for _ in range(4 if one.post_norms else 2)]
        return LayerWeights(norms[0], attention(one.attention), norms[1], ffn(one.ffn), *norms[2:])

    embedding = matrix(spec.vocab_size, spec.hidden_size)
    return ModelWeights(
        embedding_VD=embedding,
        layers=tuple(layer(one) for one in spec.layers),
        final_norm_D=vector(spec.hidden_size),
        head_VD=embedding if spec.tie_word_embeddings else matrix(spec.vocab_size, spec.hidden_size),
    )
