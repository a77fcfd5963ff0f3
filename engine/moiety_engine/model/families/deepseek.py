"""DeepSeek-V2 and DeepSeek-V3, and what is built like them."""

from __future__ import annotations

from dataclasses import replace

from moiety_engine.model.errors import UnsupportedModelError
from moiety_engine.model.families.config import (
    Config,
    Features,
    draft_prefixes,
    first,
    read_activation,
    read_rope,
    read_routing,
    rope_parameters,
    yarn_magnitude,
)
from moiety_engine.model.spec import DenseSpec, LatentAttentionSpec, LayerSpec, MoeSpec, SharedSpec
from moiety_kernels.route.spec import RoutingSpec


def deepseek_v2(config: Config, index: int) -> LayerSpec:
    method = config.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise UnsupportedModelError(f"topk_method {method!r} is not supported; known: greedy, group_limited_greedy")
    if config.get("norm_topk_prob"):
        raise UnsupportedModelError("norm_topk_prob is not supported in deepseek_v2, where no released model has it")
    groups = _groups(config) if method == "group_limited_greedy" else {}
    routing = read_routing(config, renormalize=False, scale=float(config.get("routed_scaling_factor", 1.0)), **groups)
    return _layer(config, index, routing, mlp_bias=bool(config.get("mlp_bias", False)))


def deepseek_v3(config: Config, index: int) -> LayerSpec:
    routing = read_routing(
        config,
        renormalize=bool(config.get("norm_topk_prob", True)),
        scoring="sigmoid",
        group_score="best_two",
        scale=float(config.get("routed_scaling_factor", 2.5)),
        **_groups(config),
    )
    return _layer(config, index, routing, selection_bias=True, interleaved=bool(config.get("rope_interleave", True)))


def deepseek_features(config: Config) -> Features:
    """The layers after the last, which draft tokens, are left on disk."""
    return {"ignored_prefixes": draft_prefixes(config)}


def _groups(config: Config) -> dict[str, int]:
    return {"num_groups": first(config, "n_group", default=1), "top_groups": first(config, "topk_group", default=1)}


def _layer(
    config: Config,
    index: int,
    routing: RoutingSpec,
    *,
    selection_bias: bool = False,
    mlp_bias: bool = False,
    interleaved: bool = True,
) -> LayerSpec:
    attention, activation = _attention(config, interleaved), read_activation(config)
    if index < config["first_k_dense_replace"]:
        return LayerSpec(attention, DenseSpec(config["intermediate_size"], mlp_bias, activation))
    width, num_shared = config["moe_intermediate_size"], first(config, "n_shared_experts", default=0)
    shared = SharedSpec(DenseSpec(num_shared * width, mlp_bias, activation)) if num_shared else None
    mixture = MoeSpec(width, routing, activation, selection_bias=selection_bias, exact_router=True, shared=shared)
    return LayerSpec(attention, mixture)


def _attention(config: Config, interleaved: bool) -> LatentAttentionSpec:
    nope_width, rotary_width = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    bias = bool(config.get("attention_bias", False))
    return LatentAttentionSpec(
        num_heads=config["num_attention_heads"],
        query_rank=config.get("q_lora_rank"),
        latent_width=config["kv_lora_rank"],
        nope_width=nope_width,
        value_width=config["v_head_dim"],
        rope=replace(read_rope(config, rotary_width), interleaved=interleaved),
        scale=(nope_width + rotary_width) ** -0.5 * _score_growth(config) ** 2,
        input_bias=bias,
        output_bias=bias,
    )


def _score_growth(config: Config) -> float:
    """What YaRN makes of queries and of keys by `mscale_all_dim`, apart from cosines and sines."""
    parameters = rope_parameters(config)
    weight = parameters.get("mscale_all_dim")
    if first(parameters, "rope_type", "type", default="default") == "default" or not weight:
        return 1.0
    return yarn_magnitude(float(parameters["factor"]), float(weight))
