"""Names of attention tensors.

C the widths of all heads' queries, keys and values, d head width, H heads, L width of a latent row.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from moiety_engine.model.names.recurrent import recurrent_places
from moiety_engine.model.names.tensor_mapping import Shares, TensorMapping, joined, plain, reshaped, whole
from moiety_engine.model.recurrent_weights import RecurrentWeights
from moiety_engine.model.routed_attention_spec import RoutedAttentionWeights
from moiety_engine.model.spec import AttentionSpec, LatentAttentionSpec
from moiety_engine.model.weights import AttentionWeights, LatentAttentionWeights

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from moiety_engine.model.names.tensor_mapping import Named
    from moiety_engine.model.recurrent_specs import RecurrentSpec


# Names of the block, of the output projection and of both norms; Ling's and Sarvam's have one fused input projection.
_USUAL = ("self_attn.", "o_proj", "q_norm", "k_norm")
_LING_NAMES = ("attention.", "dense", "query_layernorm", "key_layernorm")
_GATES = ("g_proj", "gate_proj")  # of the output
_SINKS_OF_MIMO = "attention_sink_bias"
_HUNYUAN_NAMES = ("self_attn.", "o_proj", "query_layernorm", "key_layernorm")
_LFM_NAMES = ("self_attn.", "out_proj", "q_layernorm", "k_layernorm")
_OF_DBRX = ("norm_attn_norm.attn.", "out_proj", "q_norm", "k_norm")
_FUSED = ("query_key_value", "Wqkv")  # the second in DBRX


def attention_places(
    spec: AttentionSpec | LatentAttentionSpec | RecurrentSpec,
    weights: AttentionWeights | RoutedAttentionWeights | LatentAttentionWeights | RecurrentWeights,
    present: set[str],
) -> Iterator[Named]:
    """Yield the names, relative to the layer's, and mappings of attention tensors.

    `present`: the names in the checkpoint.
    """
    if isinstance(spec, LatentAttentionSpec):
        assert isinstance(weights, LatentAttentionWeights)
        yield from _latent(spec, weights, present)
    elif isinstance(weights, RoutedAttentionWeights):
        yield from _routed(weights)
    elif isinstance(spec, AttentionSpec):
        assert isinstance(weights, AttentionWeights)
        yield from _grouped(spec, weights, present)
    else:
        assert isinstance(weights, RecurrentWeights)
        yield from recurrent_places(spec, weights, present)


def _grouped(spec: AttentionSpec, weights: AttentionWeights, present: set[str]) -> Iterator[Named]:
    widths = spec.qkv_widths
    block, output, q_norm, k_norm = _style(present)
    gate = next((name for name in _GATES if f"{block}{name}.weight" in present), _GATES[0])
    fused = next((name for name in _FUSED if f"{block}{name}.weight" in present), None)
    gate_with_queries = spec.gate is not None and spec.gate.in_query_projection
    for fused_C, kind in ((plain(weights.qkv_CD), "weight"), (weights.qkv_bias_C, "bias")):
        if fused_C is not None and fused is not None:
            yield f"{block}{fused}.{kind}", joined(fused_C, widths)
        elif fused_C is not None and weights.gate_CD is not None and gate_with_queries:
            query, key, value = torch.split(fused_C, list(widths))
            yield f"{block}q_proj.{kind}", _with_gates(query, plain(weights.gate_CD), spec)
            yield f"{block}k_proj.{kind}", whole(key)
            yield f"{block}v_proj.{kind}", whole(value)
        elif fused_C is not None and spec.kv_layer is not None:
            yield f"{block}q_proj.{kind}", whole(fused_C)
        elif fused_C is not None and spec.keys_are_values:
            query, key, value = torch.split(fused_C, list(widths))
            yield f"{block}q_proj.{kind}", whole(query)
            yield f"{block}k_proj.{kind}", Shares((key, value), tuple(key.shape), lambda source: (source, source))
        elif fused_C is not None:
            for name, view in zip("qkv", torch.split(fused_C, list(widths)), strict=True):
                turned = spec.rope.interleaved and name != "v"
                yield f"{block}{name}_proj.{kind}", _from_neighbours(view, spec) if turned else whole(view)
    yield f"{block}{output}.weight", whole(plain(weights.output_DC))
    if weights.output_bias_D is not None:
        yield f"{block}{output}.bias", whole(weights.output_bias_D)
    if weights.q_norm is not None:
        yield f"{block}{q_norm}.weight", whole(weights.q_norm)
    if weights.k_norm is not None:
        yield f"{block}{k_norm}.weight", whole(weights.k_norm)
    if weights.sinks_H is not None:
        of_mimo = f"{block}{_SINKS_OF_MIMO}" in present
        yield f"{block}{_SINKS_OF_MIMO if of_mimo else 'sinks'}", whole(weights.sinks_H)
    if weights.gate_CD is not None and not gate_with_queries:
        yield f"{block}{gate}.weight", whole(plain(weights.gate_CD))


def _routed(weights: RoutedAttentionWeights) -> Iterator[Named]:
    """Yield the names and mappings of JetMoe's query heads, which are those of experts."""
    kv_CD = plain(weights.kv_CD)
    yield "self_attention.experts.router.layer.weight", whole(weights.router_ED)
    yield "self_attention.experts.input_linear.weight", whole(plain(weights.query_EQD))
    yield "self_attention.experts.output_linear.weight", whole(plain(weights.output_EDQ))
    yield "self_attention.experts.bias", whole(weights.output_bias_D)
    yield "self_attention.kv_proj.weight", joined(kv_CD, (kv_CD.shape[0] // 2,) * 2)


def _style(present: set[str]) -> tuple[str, str, str, str]:
    """Return the names that the checkpoint has: of the block, the output projection and the norms of heads."""
    for style in (_LING_NAMES, _HUNYUAN_NAMES, _LFM_NAMES, _OF_DBRX):
        block, output, q_norm, _ = style
        own_block = block != _USUAL[0]
        if f"{block}{output}.weight" in present and (own_block or f"{block}{q_norm}.weight" in present):
            return style
    return _USUAL


def _with_gates(query_CD: Tensor, gate_CD: Tensor, spec: AttentionSpec) -> Shares:
    """Return the mapping of a projection that has, for each head, the rows of its query and then of its gate."""

    def parts(source: Tensor) -> tuple[Tensor, Tensor]:
        query, gate = source.view(-1, 2, spec.head_dim, *source.shape[1:]).unbind(1)
        return query.flatten(0, 1), gate.flatten(0, 1)

    return Shares((query_CD, gate_CD), (2 * spec.q_width, *query_CD.shape[1:]), parts)


def _from_neighbours(rows_C: Tensor, spec: AttentionSpec) -> TensorMapping:
    """Return a mapping that reorders rotated pairs.

    On disk the two rows of a pair are adjacent; in the weight each head has all first rows, then all second rows.
    """
    split = rows_C.view(-1, 2, spec.head_dim // 2, *rows_C.shape[1:])
    return reshaped(split.transpose(1, 2), tuple(rows_C.shape))


def _latent(spec: LatentAttentionSpec, weights: LatentAttentionWeights, present: set[str]) -> Iterator[Named]:
    block, output = _LING_NAMES[:2] if "attention.dense.weight" in present else _USUAL[:2]
    widths = [spec.query_input_width, spec.cached_values]
    names = "q_proj" if spec.query_rank is None else "q_a_proj", "kv_a_proj_with_mqa"
    for fused_C, kind in ((plain(weights.input_CD), "weight"), (weights.input_bias_C, "bias")):
        if fused_C is not None:
            query, latent = torch.split(fused_C, list(widths))
            heads = spec.num_heads if spec.query_rank is None else 0
            yield f"{block}{names[0]}.{kind}", _with_rotated_ends(query, spec, heads)
            yield f"{block}{names[1]}.{kind}", _with_rotated_ends(latent, spec, 1)
    if weights.query_norm is not None and weights.query_up is not None:
        yield f"{block}q_a_layernorm.weight", _times(weights.query_norm, spec.query_factor)
        up = plain(weights.query_up)
        mapping = _queries_and_gates(up, spec) if spec.gated else _with_rotated_ends(up, spec, spec.num_heads)
        yield f"{block}q_b_proj.weight", mapping
    yield f"{block}kv_a_layernorm.weight", _times(weights.latent_norm_L, spec.latent_factor)
    yield f"{block}kv_b_proj.weight", _up(spec, weights)
    yield f"{block}{output}.weight", whole(plain(weights.output_DC))
    if weights.output_bias_D is not None:
        yield f"{block}{output}.bias", whole(weights.output_bias_D)
    if weights.gate_HD is not None:
        yield f"{block}g_proj.weight", whole(weights.gate_HD)
    if spec.indexer is not None and weights.indexer is not None:
        indexer, norm, width = weights.indexer, weights.indexer.key_norm, spec.rope.rotary_width
        rotated = {
            "wq_b.weight": (indexer.query_up_QC, spec.indexer.num_heads),
            "wk.weight": (indexer.key_ID, 1),
            "k_norm.weight": (norm.weight_D, 1),
            "k_norm.bias": (norm.bias_D, 1),
        }
        for name, (rows, num_heads) in rotated.items():
            assert rows is not None, "an index key has a layer norm with a bias"
            one = _with_rotated_starts(rows, num_heads, width) if spec.indexer.interleaved else whole(rows)
            yield f"{block}indexer.{name}", one
        yield f"{block}indexer.weights_proj.weight", whole(indexer.head_weight_HD)


def _times(norm: Tensor, factor: float) -> TensorMapping:
    """Return the mapping of a norm's weight, times a factor, to the float32 view."""
    if factor == 1.0:
        return whole(norm)
    return TensorMapping(norm, tuple(norm.shape), lambda source: source.float() * factor)


def _queries_and_gates(rows_QC: Tensor, spec: LatentAttentionSpec) -> TensorMapping:
    """Return the mapping of a projection that has, for each head, the rows of its query and then of its gates.

    In the weight all queries come before all gates.
    """
    still, width = spec.nope_width, spec.head_dim
    order = torch.cat((torch.arange(still), torch.arange(still, width, 2), torch.arange(still + 1, width, 2)))

    def arrange(source: Tensor) -> Tensor:
        heads = source.view(spec.num_heads, -1, source.shape[-1])
        return torch.cat((heads[:, order].flatten(0, 1), heads[:, width:].flatten(0, 1)))

    return TensorMapping(rows_QC, tuple(rows_QC.shape), arrange)


def _with_rotated_starts(rows_C: Tensor, num_heads: int, rotary_width: int) -> TensorMapping:
    """Return the mapping like `_with_rotated_ends` of heads whose first rows are rotated."""
    if not math.prod(rows_C.shape):
        return whole(rows_C)

    def arrange(source: Tensor) -> Tensor:
        heads = source.view(num_heads, -1, *source.shape[1:])
        rotated, rest = heads[:, :rotary_width], heads[:, rotary_width:]
        return torch.cat((rotated[:, 0::2], rotated[:, 1::2], rest), dim=1).view(source.shape)

    return TensorMapping(rows_C, tuple(rows_C.shape), arrange)


def _with_rotated_ends(rows_C: Tensor, spec: LatentAttentionSpec, heads: int) -> TensorMapping:
    """Return a mapping that reorders the rotated rows at the end of each head.

    On disk the two rows of a pair may be adjacent; in the weight all first rows come before all second rows.
    """
    if not spec.rope.interleaved or not heads:
        return whole(rows_C)
    width = rows_C.shape[0] // heads
    still = width - spec.rope.rotary_width
    one = torch.cat((torch.arange(still), torch.arange(still, width, 2), torch.arange(still + 1, width, 2)))
    order_C = (torch.arange(heads)[:, None] * width + one).flatten()
    return TensorMapping(rows_C, tuple(rows_C.shape), lambda source: source[order_C])


def _up(spec: LatentAttentionSpec, weights: LatentAttentionWeights) -> Shares:
    """Return the mapping of the projection from the latent space to each head's key and value.

    The keys' part is stored transposed, since it projects queries into the latent space.
    """
    height = spec.nope_width + spec.value_width

    def parts(source: Tensor) -> tuple[Tensor, Tensor]:
        key, value = torch.split(source.view(spec.num_heads, height, -1), [spec.nope_width, spec.value_width], dim=1)
        return key.mT, value

    views = weights.key_up_HLd, weights.value_up_HdL
    return Shares(views, (spec.num_heads * height, spec.latent_width), parts)
