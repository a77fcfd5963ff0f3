"""DeepSeek-V2, DeepSeek-V3 and models with the same architecture."""

from __future__ import annotations

from dataclasses import replace

from moiety_engine.model.errors import UnsupportedModelError
from moiety_engine.model.families.config import (
    Config,
    Features,
    first,
    need,
    read_activation,
    read_mtp,
    read_rope,
    read_routing,
    read_sigmoid_mixture,
    require,
    rope_parameters,
    yarn_magnitude,
)
from moiety_engine.model.spec import DenseSpec, LatentAttentionSpec, LayerSpec, MoeSpec, SharedSpec


def deepseek_v2(config: Config, index: int) -> LayerSpec:
    require(config, "deepseek_v2", scoring_func="softmax", moe_layer_freq=1)
    return LayerSpec(_attention(config, interleaved=True), _softmax_mixture(config, index))


def deepseek_v3(config: Config, index: int) -> LayerSpec:
    require(config, "deepseek_v3", scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)
    attention = _attention(config, interleaved=bool(config["rope_interleave"]))
    return LayerSpec(attention, read_sigmoid_mixture(config, index))


def deepseek_v2_features(config: Config) -> Features:
    return read_mtp(config, deepseek_v2)


def deepseek_v3_features(config: Config) -> Features:
    return read_mtp(config, deepseek_v3)


def _softmax_mixture(config: Config, index: int) -> DenseSpec | MoeSpec:
    """Return the feed-forward of a DeepSeek-V2 layer."""
    activation, bias = read_activation(config), bool(config["mlp_bias"])
    if index < config["first_k_dense_replace"]:
        return DenseSpec(config["intermediate_size"], bias, activation)
    method = config["topk_method"]
    if method not in ("greedy", "group_limited_greedy"):
        raise UnsupportedModelError(f"topk_method {method!r} is not supported; known: greedy, group_limited_greedy")
    if config["norm_topk_prob"]:
        raise UnsupportedModelError("norm_topk_prob is not supported in deepseek_v2, where no released model has it")
    limited = method == "group_limited_greedy"
    routing = read_routing(
        config,
        "n_routed_experts",
        renormalize=False,
        num_groups=need(config, "n_group") if limited else 1,
        top_groups=need(config, "topk_group") if limited else 1,
        scale=float(config["routed_scaling_factor"]),
    )
    width, num_shared = config["moe_intermediate_size"], config["n_shared_experts"]
    shared = SharedSpec(DenseSpec(num_shared * width, bias, activation)) if num_shared else None
    return MoeSpec(width, routing, activation, exact_router=True, shared=shared)


def _attention(config: Config, *, interleaved: bool) -> LatentAttentionSpec:
    nope_width, rotary_width = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    bias = bool(config["attention_bias"])
    if bias and config["q_lora_rank"] is None:
        raise UnsupportedModelError("attention_bias without a q_lora_rank is not supported; no released model has that")
    return LatentAttentionSpec(
        num_heads=config["num_attention_heads"],
        query_rank=config["q_lora_rank"],
        latent_width=config["kv_lora_rank"],
        nope_width=nope_width,
        value_width=config["v_head_dim"],
        rope=replace(read_rope(config, rotary_width), interleaved=interleaved),
        scale=(nope_width + rotary_width) ** -0.5 * _score_growth(config) ** 2,
        input_bias=bias,
        output_bias=bias,
    )


def _score_growth(config: Config) -> float:
    """Return YaRN's factor of queries and of keys from `mscale_all_dim`, in addition to that of cosines and sines."""
    parameters = rope_parameters(config)
    weight = parameters.get("mscale_all_dim")
    if first(parameters, "rope_type", "type", default="default") == "default" or not weight:
        return 1.0
    return yarn_magnitude(float(parameters["factor"]), float(weight))
