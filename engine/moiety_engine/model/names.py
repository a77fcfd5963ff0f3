"""Which tensor on disk goes to which part of which weight. Knows names and shapes; reads no file.

Three ways of naming experts are known: one matrix each as Qwen and OLMoE publish them, Mixtral's w1/w3/w2, and all
experts stacked with gate and up fused, as transformers 5 holds them in memory. Models for embeddings are often saved
without their head, and then without `model.` before every name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moiety_engine.model.weights import MoeWeights

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from moiety_engine.model.spec import AttentionSpec, ModelSpec
    from moiety_engine.model.weights import AttentionWeights, DenseWeights, LayerWeights, ModelWeights

IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)  # tables that some old checkpoints carry

Placement = tuple[str, "Tensor"]


def placements(spec: ModelSpec, weights: ModelWeights, present: set[str]) -> dict[str, Tensor]:
    """Name on disk → the view that it fills. Of several ways to name a thing the one that is `present` is taken."""
    whole = "" if "embed_tokens.weight" in present else "model."
    found: dict[str, Tensor] = {
        f"{whole}embed_tokens.weight": weights.embedding_VD,
        f"{whole}norm.weight": weights.final_norm_D,
    }
    if not spec.tie_word_embeddings:
        found["lm_head.weight"] = weights.head_VD
    for index, (layer_spec, layer) in enumerate(zip(spec.layers, weights.layers, strict=True)):
        prefix = f"{whole}layers.{index}."
        found.update((prefix + name, view) for name, view in _layer(layer_spec.attention, layer, prefix, present))
    return found


def _layer(spec: AttentionSpec, layer: LayerWeights, prefix: str, present: set[str]) -> Iterator[Placement]:
    yield "input_layernorm.weight", layer.attention_norm_D
    yield "post_attention_layernorm.weight", layer.ffn_norm_D
    yield from _attention(spec, layer.attention)
    if isinstance(layer.ffn, MoeWeights):
        yield from _experts(layer.ffn, prefix, present)
    else:
        yield from _dense(layer.ffn)


def _attention(spec: AttentionSpec, weights: AttentionWeights) -> Iterator[Placement]:
    widths = [spec.q_width, spec.kv_width, spec.kv_width]
    for name, view in zip("qkv", torch.split(weights.qkv_CD, widths), strict=True):
        yield f"self_attn.{name}_proj.weight", view
    yield "self_attn.o_proj.weight", weights.output_DC
    if weights.qkv_bias_C is not None:
        for name, view in zip("qkv", torch.split(weights.qkv_bias_C, widths), strict=True):
            yield f"self_attn.{name}_proj.bias", view
    if weights.output_bias_D is not None:
        yield "self_attn.o_proj.bias", weights.output_bias_D
    if weights.q_norm is not None and weights.k_norm is not None:
        yield "self_attn.q_norm.weight", weights.q_norm
        yield "self_attn.k_norm.weight", weights.k_norm


def _dense(weights: DenseWeights) -> Iterator[Placement]:
    gate, up = weights.gate_up_2FD.chunk(2)
    yield "mlp.gate_proj.weight", gate
    yield "mlp.up_proj.weight", up
    yield "mlp.down_proj.weight", weights.down_DF
    if weights.gate_up_bias_2F is not None and weights.down_bias_D is not None:
        gate_bias, up_bias = weights.gate_up_bias_2F.chunk(2)
        yield "mlp.gate_proj.bias", gate_bias
        yield "mlp.up_proj.bias", up_bias
        yield "mlp.down_proj.bias", weights.down_bias_D


def _experts(weights: MoeWeights, prefix: str, present: set[str]) -> Iterator[Placement]:
    block = "block_sparse_moe" if f"{prefix}block_sparse_moe.gate.weight" in present else "mlp"
    yield f"{block}.gate.weight", weights.router_ED
    if f"{prefix}{block}.experts.gate_up_proj" in present:
        yield f"{block}.experts.gate_up_proj", weights.gate_up_E2FD
        yield f"{block}.experts.down_proj", weights.down_EDF
        return
    gate_name, up_name, down_name = ("w1", "w3", "w2") if block != "mlp" else ("gate_proj", "up_proj", "down_proj")
    for expert, (gate_up, down) in enumerate(zip(weights.gate_up_E2FD, weights.down_EDF, strict=True)):
        gate, up = gate_up.chunk(2)
        yield f"{block}.experts.{expert}.{gate_name}.weight", gate
        yield f"{block}.experts.{expert}.{up_name}.weight", up
        yield f"{block}.experts.{expert}.{down_name}.weight", down
