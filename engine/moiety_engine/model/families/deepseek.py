"""DeepSeek-V2, V3 and V3.2, and models with their architecture: Kimi K2, Sarvam, GLM-4.7-Flash, GLM-5, A.X-K1, K2."""

from __future__ import annotations

from dataclasses import replace

from moiety_engine.model.attention_options import IndexerSpec, QueryGrowth
from moiety_engine.model.errors import ConfigError, UnsupportedModelError
from moiety_engine.model.families.config import (
    Config,
    Features,
    first,
    is_dense_layer,
    need,
    read_activation,
    read_rope,
    read_routing,
    read_sigmoid_experts,
    read_sigmoid_mixture,
    require,
    rope_parameters,
    yarn_magnitude,
)
from moiety_engine.model.rope_spec import RopeSpec
from moiety_engine.model.spec import (
    DenseSpec,
    LatentAttentionSpec,
    LayerSpec,
    MoeSpec,
    SharedSpec,
)


def deepseek_v2(config: Config, index: int) -> LayerSpec:
    require(config, "deepseek_v2", scoring_func="softmax", moe_layer_freq=1)
    return LayerSpec(read_latent_attention(config, interleaved=True), _softmax_mixture(config, index))


def deepseek_v3(config: Config, index: int) -> LayerSpec:
    require(config, "deepseek_v3", scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)
    attention = read_latent_attention(config, interleaved=bool(config["rope_interleave"]))
    return LayerSpec(attention, read_sigmoid_mixture(config, index))


def deepseek_v32(config: Config, index: int) -> LayerSpec:
    """Return a layer of DeepSeek-V3.2, whose attention is sparse."""
    require(config, "deepseek_v32", scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)
    return LayerSpec(_sparse_attention(config), _sigmoid_mixture_by_type(config, index))


def glm_moe_dsa(config: Config, index: int) -> LayerSpec:
    """Return a layer of GLM-5, whose attention is sparse; some layers use the selection of a layer before them."""
    require(config, "glm_moe_dsa", scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)
    require(config, "glm_moe_dsa", rope_interleave=True, indexer_rope_interleave=True)
    reuses = index < config["num_hidden_layers"] and _reuses_selection(config, index)  # the MTP layer has an indexer
    attention = _sparse_attention(config, interleaved=True, reuses=reuses)
    return LayerSpec(attention, _sigmoid_mixture_by_type(config, index))


def _sparse_attention(config: Config, *, interleaved: bool = False, reuses: bool = False) -> LatentAttentionSpec:
    """Return sparse latent attention; `interleaved`: that of the indexer's rotary embedding."""
    attention = read_latent_attention(config, interleaved=True)
    if attention.query_rank is None:
        raise UnsupportedModelError("sparse attention needs a q_lora_rank, the input of its index queries")
    others = {*(config.get("layer_types") or ())} - {"indexed_attention"}
    if others:
        raise UnsupportedModelError(f"layer type {min(others)!r} is not supported; known: indexed_attention")
    rotary_width, head_dim = attention.rope.rotary_width, config["index_head_dim"]
    if not 0 < rotary_width <= head_dim:
        raise ConfigError(f"index_head_dim {head_dim} must be at least qk_rope_head_dim {rotary_width}")
    for key in ("index_topk", "index_n_heads"):
        if config[key] < 1:
            raise ConfigError(f"{key} {config[key]} must be at least 1")
    indexer = IndexerSpec(config["index_n_heads"], head_dim, config["index_topk"], interleaved, reuses)
    return replace(attention, indexer=indexer)


def _reuses_selection(config: Config, index: int) -> bool:
    """Return whether the layer has no indexer. Raises ConfigError if there is none before it either."""
    kinds, names = config.get("indexer_types") or config.get("index_topk_pattern"), {"F": "full", "S": "shared"}
    if kinds is None:
        period, offset = max(config.get("index_topk_freq", 1), 1), config.get("index_skip_topk_offset", 2)
        kinds = ["SF"[max(i - offset + 1, 0) % period == 0] for i in range(config["num_hidden_layers"])]
    kinds = [names.get(kind, kind) for kind in kinds]
    if len(kinds) != config["num_hidden_layers"] or not {*kinds} <= {"full", "shared"} or kinds[0] != "full":
        raise ConfigError(f"indexer_types {kinds} must be full or shared, one for each layer, and full for the first")
    return bool(kinds[index] == "shared")


def _sigmoid_mixture_by_type(config: Config, index: int) -> DenseSpec | MoeSpec:
    if is_dense_layer(config, index, num_dense=config["first_k_dense_replace"]):
        return DenseSpec(config["intermediate_size"], activation=read_activation(config))
    return read_sigmoid_experts(config)


def sarvam_mla(config: Config, index: int) -> LayerSpec:
    return deepseek_v3(_with_usual_yarn(config), index)


def mistral4(config: Config, index: int) -> LayerSpec:
    """Return a layer of Mistral Small 4, whose queries grow with the position and whose experts compete by softmax."""
    attention = read_latent_attention(config, interleaved=bool(config["rope_interleave"]))
    parameters = rope_parameters(config)  # their partial_rotary_factor is that of a whole head, not of its rotated part
    attention = replace(attention, rope=replace(attention.rope, rotary_width=config["qk_rope_head_dim"]))
    beta = parameters.get("llama_4_scaling_beta")
    if beta:
        growth = QueryGrowth(float(beta), parameters["original_max_position_embeddings"])
        attention = replace(attention, query_growth=growth)
    activation = read_activation(config)
    if index < config["first_k_dense_replace"]:
        return LayerSpec(attention, DenseSpec(config["intermediate_size"], activation=activation))
    experts = read_sigmoid_experts(config)
    routing = replace(experts.routing, scoring="softmax")
    return LayerSpec(attention, replace(experts, routing=routing, selection_bias=False, exact_router=False))


def _with_usual_yarn(config: Config) -> Config:
    """Return the configuration with YaRN under its usual name; the first releases call it deepseek_yarn."""
    scaling = config.get("rope_scaling") or {}
    if "deepseek_yarn" not in (scaling.get("type"), scaling.get("rope_type")):
        return config
    return config | {"rope_scaling": {**scaling, "rope_type": "yarn"}}


def glm4_moe_lite(config: Config, index: int) -> LayerSpec:
    """Return a layer of GLM-4.7-Flash."""
    require(config, "glm4_moe_lite", scoring_func="sigmoid", topk_method="noaux_tc")
    attention = read_latent_attention(config, interleaved=bool(config["rope_interleave"]))
    dense = is_dense_layer(config, index)
    ffn = DenseSpec(config["intermediate_size"], activation=read_activation(config)) if dense else None
    return LayerSpec(attention, ffn or read_sigmoid_experts(config))


def axk1(config: Config, index: int) -> LayerSpec:
    """Return a layer of A.X-K1, which normalizes the output of experts."""
    require(config, "axk1", scoring_func="sigmoid")
    attention = read_latent_attention(config, interleaved=bool(config["rope_interleave"]))
    if _is_dense_in_axk1(config, index):
        return LayerSpec(attention, DenseSpec(config["intermediate_size"], activation=read_activation(config)))
    return LayerSpec(attention, read_sigmoid_experts(config), ffn_post_norm=True)


def _is_dense_in_axk1(config: Config, index: int) -> bool:
    if config.get("mlp_layer_types") is not None:
        return is_dense_layer(config, index)
    sparse = index >= config.get("first_k_dense_replace", 1) and index % config.get("moe_layer_freq", 1) == 0
    return not sparse


def axk2(config: Config, index: int) -> LayerSpec:
    """Return a layer of A.X-K2: sparse attention with output gates, and norms with gates except before dense layers."""
    require(config, "axk2", scoring_func="sigmoid")
    attention, rank = replace(_sparse_attention(config), gated=True), config["gated_norm_rank"]
    if rank < 1:
        raise ConfigError(f"gated_norm_rank {rank} must be at least 1")
    if _is_dense_in_axk1(config, index):
        dense = DenseSpec(config["intermediate_size"], activation=read_activation(config))
        return LayerSpec(attention, dense, attention_gate_rank=rank)
    groups = {key: first(config, key, default=1) for key in ("n_group", "topk_group")}  # null: one group
    return LayerSpec(attention, read_sigmoid_experts(config | groups), attention_gate_rank=rank, ffn_gate_rank=rank)


def axk1_features(config: Config) -> Features:
    """Return what released checkpoints have too much, norms after dense layers, and what they may lack: biases."""
    num_layers = config["num_hidden_layers"]
    dense = [index for index in range(num_layers) if _is_dense_in_axk1(config, index)]
    names = ("post_mlp_layernorm.", "mlp.post_mlp_layernorm.")
    return {
        "ignored_prefixes": tuple(f"model.layers.{index}.{name}" for index in dense for name in names),
        "zero_if_absent": ("e_score_correction_bias",),
    }


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


def read_latent_attention(config: Config, *, interleaved: bool) -> LatentAttentionSpec:
    """Return latent attention. `interleaved`: rotated pairs are next to each other in the checkpoint."""
    bias = bool(config["attention_bias"])
    if bias and config["q_lora_rank"] is None:
        raise UnsupportedModelError("attention_bias without a q_lora_rank is not supported; no released model has that")
    plain = plain_latent_attention(
        config, replace(read_rope(config, config["qk_rope_head_dim"]), interleaved=interleaved)
    )
    return replace(plain, scale=plain.scale * _score_growth(config) ** 2, input_bias=bias, output_bias=bias)


def plain_latent_attention(config: Config, rope: RopeSpec) -> LatentAttentionSpec:
    """Return latent attention without biases and with the usual scale, which the width of a head's key gives."""
    nope_width = config["qk_nope_head_dim"]
    return LatentAttentionSpec(
        num_heads=config["num_attention_heads"],
        query_rank=config["q_lora_rank"],
        latent_width=config["kv_lora_rank"],
        nope_width=nope_width,
        value_width=config["v_head_dim"],
        rope=rope,
        scale=(nope_width + config["qk_rope_head_dim"]) ** -0.5,
    )


def _score_growth(config: Config) -> float:
    """Return YaRN's factor of queries and of keys from `mscale_all_dim`, in addition to that of cosines and sines."""
    parameters = rope_parameters(config)
    weight = parameters.get("mscale_all_dim")
    if first(parameters, "rope_type", "type", default="default") == "default" or not weight:
        return 1.0
    return yarn_magnitude(float(parameters["factor"]), float(weight))
