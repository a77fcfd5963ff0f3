"""GLM-4.5 and its kin."""

from __future__ import annotations

from moiety_engine.model.families.config import (
    Config,
    Features,
    first,
    read_activation,
    read_attention,
    read_routing,
)
from moiety_engine.model.spec import DenseSpec, LayerSpec, MoeSpec, SharedSpec


def glm4_moe(config: Config, index: int) -> LayerSpec:
    activation = read_activation(config)
    attention = read_attention(
        {"partial_rotary_factor": 0.5, **config},
        qkv_bias=bool(config.get("attention_bias", False)),
        qk_norm="head" if config.get("use_qk_norm") else "none",
    )
    if index < config.get("first_k_dense_replace", 1):
        return LayerSpec(attention, DenseSpec(config["intermediate_size"], activation=activation))
    routing = read_routing(
        config,
        renormalize=bool(config.get("norm_topk_prob", True)),
        scoring="sigmoid",
        num_groups=config.get("n_group", 1),
        top_groups=config.get("topk_group", 1),
        group_score="best_two",
        scale=float(config.get("routed_scaling_factor", 1.0)),
    )
    width, num_shared = config["moe_intermediate_size"], config.get("n_shared_experts", 1)
    mixture = MoeSpec(
        width,
        routing,
        activation,
        selection_bias=True,
        exact_router=True,
        shared=SharedSpec(DenseSpec(num_shared * width, activation=activation)),
    )
    return LayerSpec(attention, mixture)


def glm_features(config: Config) -> Features:
    """The layers after the last, which draft tokens, are left on disk."""
    layers, drafting = (
        config["num_hidden_layers"],
        first(config, "num_nextn_predict_layers", "num_mtp_layers", default=0),
    )
    return {"ignored_prefixes": tuple(f"model.layers.{layers + index}." for index in range(drafting))}
