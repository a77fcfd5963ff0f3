"""Llama 4, its text model."""

from __future__ import annotations

from moiety_engine.model.attention_options import QueryGrowth
from moiety_engine.model.errors import UnsupportedModelError
from moiety_engine.model.families.config import (
    Config,
    read_activation,
    read_attention,
    read_rope,
    read_routing,
    read_shared,
    require,
    require_oblong_experts,
)
from moiety_engine.model.rope_spec import NO_ROPE
from moiety_engine.model.spec import AttentionSpec, DenseSpec, LayerSpec, MoeSpec


def llama4_text(config: Config, index: int) -> LayerSpec:
    """Return a layer; some have no rotary embedding, and some are dense with a width of their own."""
    activation, step = read_activation(config), config["interleave_moe_layer_step"]
    of_experts = config.get("moe_layers")
    if index in of_experts if of_experts is not None else (index + 1) % step == 0:
        return LayerSpec(_attention(config, index), _experts(config))
    return LayerSpec(_attention(config, index), DenseSpec(config["intermediate_size_mlp"], activation=activation))


def _attention(config: Config, index: int) -> AttentionSpec:
    bias, chunk = bool(config["attention_bias"]), config["attention_chunk_size"]
    listed, interval = config.get("no_rope_layers"), config["no_rope_layer_interval"]
    rotates = bool(listed[index] if listed else (index + 1) % interval)  # despite the name, 1: with a rotary embedding
    growth = QueryGrowth(float(config["attn_scale"]), config["floor_scale"], first=1)
    rotated = {
        "rope": read_rope(config, config["head_dim"], interleaved=True),
        "qk_norm": "unit" if config["use_qk_norm"] else "none",
        "rotates_first": bool(config["use_qk_norm"]),
    }
    plain = {"rope": NO_ROPE, "query_growth": growth if config["attn_temperature_tuning"] else None}
    seen = {"window": chunk, "chunked": True} if _is_chunked(config, index, rotates=rotates) else {}
    return read_attention(config, qkv_bias=bias, output_bias=bias, **(rotated if rotates else plain), **seen)


def _is_chunked(config: Config, index: int, *, rotates: bool) -> bool:
    kinds, chunk = config.get("layer_types"), config["attention_chunk_size"]
    kind = kinds[index] if kinds else "chunked_attention" if rotates and chunk is not None else "full_attention"
    if kind not in ("chunked_attention", "full_attention") or (kind == "chunked_attention" and chunk is None):
        raise UnsupportedModelError(
            f"layer type {kind!r} with attention_chunk_size {chunk} is not supported; known: full_attention, and "
            "chunked_attention with the size of chunks"
        )
    return bool(kind == "chunked_attention")


def _experts(config: Config) -> MoeSpec:
    width, activation = config["intermediate_size"], read_activation(config)
    require(config, "llama4", num_experts_per_tok=1)  # a weight scales its expert's input, which then is one row
    require_oblong_experts(config, width, "llama4")
    routing = read_routing(config, "num_local_experts", renormalize=False, scoring="sigmoid_chosen")
    return MoeSpec(width, routing, activation, weighs_input=True, shared=read_shared(width, activation))
