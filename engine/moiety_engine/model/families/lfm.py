"""LFM2 with experts: gated short convolutions, and in few layers attention with norms of heads."""

from __future__ import annotations

from moiety_engine.model.errors import UnsupportedModelError
from moiety_engine.model.families.config import Config, Features, first, need, read_attention, read_routing
from moiety_engine.model.recurrent_specs import ShortConvSpec
from moiety_engine.model.spec import DenseSpec, LayerSpec, MoeSpec, NormSpec


def lfm2_moe(config: Config, index: int) -> LayerSpec:
    ffn = DenseSpec(config["intermediate_size"]) if index < config["num_dense_layers"] else _mixture(config)
    kind = need(config, "layer_types")[index]
    if kind == "conv":
        return LayerSpec(
            ShortConvSpec(config["hidden_size"], config["conv_L_cache"], bias=bool(config["conv_bias"])), ffn
        )
    if kind != "full_attention":
        raise UnsupportedModelError(f"layer type {kind!r} is not supported in lfm2_moe; known: conv, full_attention")
    return LayerSpec(read_attention(config, qk_norm="head"), ffn)


def _mixture(config: Config) -> MoeSpec:
    routing = read_routing(
        config,
        "num_experts",
        renormalize=bool(config["norm_topk_prob"]),
        scoring="sigmoid",
        scale=float(config["routed_scaling_factor"]),
        added_sum=1e-6,
    )
    return MoeSpec(config["moe_intermediate_size"], routing, selection_bias=bool(config["use_expert_bias"]))


def lfm2_moe_features(config: Config) -> Features:
    """Return the norms, and whether embeddings are tied, which the first releases state under another key."""
    return {
        "norm": NormSpec(float(config["norm_eps"])),
        "tie_word_embeddings": bool(first(config, "tie_embedding", "tie_word_embeddings")),
    }
