"""config.json of a model from the metadata of its GGUF file. Handles no tensors."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from moiety_engine.errors import CheckpointError
from moiety_engine.gguf.names import is_mixtral

if TYPE_CHECKING:
    from collections.abc import Callable

    from moiety_engine.gguf.header import GgufHeader

_FAMILIES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "gpt-oss": "gpt_oss",
    "deepseek2": "deepseek_v3",  # or deepseek_v2
}
_SOFTMAX, _SIGMOID = 1, 2  # llama.cpp's numbers of the routers' scoring functions
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_ORIGINAL = 1.0, 4.0, 8192


def config_of(header: GgufHeader, rope_factors: Callable[[], list[float]]) -> dict[str, Any]:
    """Return the configuration that the metadata describe, with the keys of a Hugging Face config.json.

    `rope_factors` returns the numbers of the tensor of rotary factors, if the file has one. Raises CheckpointError for
    an unknown architecture or missing values.
    """
    if header.architecture not in _FAMILIES:
        known = ", ".join(_FAMILIES)
        raise CheckpointError(
            f"{header.paths[0]} has a model of the architecture {header.architecture!r}; of GGUF files these are read: "
            f"{known}. Use the model's checkpoint in Hugging Face's format"
        )
    try:
        config = _config(header)
        if "rope_freqs.weight" in header.tensors:
            config["rope_parameters"] = _llama3_scaling(config, rope_factors())
    except (KeyError, TypeError, ValueError, ArithmeticError) as exc:
        raise CheckpointError(f"{header.paths[0]} has metadata that do not describe a model: {exc}") from exc
    return config


def _config(header: GgufHeader) -> dict[str, Any]:
    if _need(header, "block_count") > len(header.tensors):
        raise ValueError(f"{header.architecture}.block_count is {_need(header, 'block_count')}")
    heads, hidden = _need(header, "attention.head_count"), _need(header, "embedding_length")
    config: dict[str, Any] = {
        "model_type": "mixtral" if is_mixtral(header) else _FAMILIES[header.architecture],
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": _need(header, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _one(header.value("attention.head_count_kv", heads)),
        "max_position_embeddings": _need(header, "context_length"),
        "rms_norm_eps": header.value("attention.layer_norm_rms_epsilon", 1e-6),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "dtype": "float32" if all(one.type.name == "F32" for one in header.tensors.values()) else "bfloat16",
    }
    if (width := _one(header.value("feed_forward_length"))) is not None:
        config["intermediate_size"] = width
    if header.architecture != "deepseek2":
        config["head_dim"] = header.value("attention.key_length") or hidden // heads
    config |= _rope(header)
    if "blk.0.attn_q.bias" in header.tensors and header.architecture in ("llama", "qwen3moe", "gpt-oss"):
        config["attention_bias"] = True
    return config | _EXPERTS.get(header.architecture, _no_experts)(header)


def _need(header: GgufHeader, key: str) -> int:
    value = _one(header.value(key))
    if not isinstance(value, int) or value <= 0:
        raise ValueError(f"{header.architecture}.{key} is {value!r}")
    return value


def _one(value: Any) -> Any:
    """Return the value that all layers have. Raises ValueError if they differ."""
    if not isinstance(value, list):
        return value
    if len(set(value)) != 1:
        raise ValueError("layers differ in their heads or widths, which is not supported")
    return value[0]


def _rope(header: GgufHeader) -> dict[str, Any]:
    theta = {"rope_theta": header.value("rope.freq_base", 10_000.0)}
    kind = header.value("rope.scaling.type", "none")
    if kind == "none":
        return theta
    factor = header.value("rope.scaling.factor", 1.0)
    if kind == "linear":
        return theta | {"rope_scaling": {"rope_type": "linear", "factor": factor}}
    if kind != "yarn":
        raise ValueError(f"rope scaling {kind!r} is not supported")
    yarn: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": header.value("rope.scaling.original_context_length"),
    }
    if header.architecture == "gpt-oss":
        yarn["truncate"] = False
    if (log_multiplier := header.value("rope.scaling.yarn_log_multiplier")) is not None:
        yarn |= {"mscale": log_multiplier * 10, "mscale_all_dim": log_multiplier * 10}
    return theta | {"rope_scaling": yarn}


def _llama3_scaling(config: dict[str, Any], factors: list[float]) -> dict[str, Any]:
    """Return Llama 3's scaling, whose factors by frequency are in the file. Raises ValueError if they are others."""
    theta, factor = config["rope_theta"], max(factors)
    for index, found in enumerate(factors):
        turns = _LLAMA3_ORIGINAL * theta ** (-index / len(factors)) / (2 * math.pi)
        share = min(1.0, max(0.0, (turns - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)))
        if abs(found - 1 / ((1 - share) / factor + share)) > 1e-3 * factor:
            raise ValueError("the tensor rope_freqs.weight has other factors than Llama 3's, which is not supported")
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_ORIGINAL,
    }


def _no_experts(_header: GgufHeader) -> dict[str, Any]:
    return {}


def _mixtral(header: GgufHeader) -> dict[str, Any]:
    if not is_mixtral(header):
        return {}
    return {
        "num_local_experts": _need(header, "expert_count"),
        "num_experts_per_tok": _need(header, "expert_used_count"),
    }


def _qwen_experts(header: GgufHeader) -> dict[str, Any]:
    config = {
        "num_experts": _need(header, "expert_count"),
        "num_experts_per_tok": _need(header, "expert_used_count"),
        "moe_intermediate_size": _need(header, "expert_feed_forward_length"),
        "decoder_sparse_step": 1,
        "norm_topk_prob": header.architecture == "qwen3moe",
    }
    if header.architecture == "qwen2moe":
        config["shared_expert_intermediate_size"] = _need(header, "expert_shared_feed_forward_length")
    return config


def _gpt_oss(header: GgufHeader) -> dict[str, Any]:
    return {
        "num_local_experts": _need(header, "expert_count"),
        "num_experts_per_tok": _need(header, "expert_used_count"),
        "intermediate_size": _need(header, "expert_feed_forward_length"),
        "sliding_window": _need(header, "attention.sliding_window"),
    }


def _deepseek(header: GgufHeader) -> dict[str, Any]:
    sigmoid = header.value("expert_gating_func", _SOFTMAX) == _SIGMOID
    rotary, latent = _need(header, "rope.dimension_count"), _need(header, "attention.kv_lora_rank")
    apart = "attn_k_b" in {name.split(".")[-2] for name in header.tensors}
    width = header.value("attention.key_length_mla") or header.value("attention.key_length")
    value_width = header.value("attention.value_length_mla") or header.value("attention.value_length")
    if not all(isinstance(one, int) and one > 0 for one in (width, value_width)):
        raise ValueError(f"the widths of keys and values are {width!r} and {value_width!r}")
    if apart and not header.value("attention.key_length_mla"):
        raise ValueError("attention.key_length_mla is missing")
    num_groups = header.value("expert_group_count", 1)
    config: dict[str, Any] = {
        "model_type": "deepseek_v3" if sigmoid else "deepseek_v2",
        "num_key_value_heads": _need(header, "attention.head_count"),
        "q_lora_rank": header.value("attention.q_lora_rank") or None,
        "kv_lora_rank": latent,
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": width - rotary,
        "v_head_dim": value_width,
        "first_k_dense_replace": header.value("leading_dense_block_count", 0),
        "n_routed_experts": _need(header, "expert_count"),
        "num_experts_per_tok": _need(header, "expert_used_count"),
        "n_shared_experts": header.value("expert_shared_count", 0),
        "moe_intermediate_size": _need(header, "expert_feed_forward_length"),
        "routed_scaling_factor": header.value("expert_weights_scale", 1.0) or 1.0,
        "norm_topk_prob": bool(header.value("expert_weights_norm", sigmoid)),
        "n_group": num_groups,
        "topk_group": header.value("expert_group_used_count", num_groups),
        "num_nextn_predict_layers": 0,
        "rope_interleave": True,
    }
    if not sigmoid:
        config["topk_method"] = "group_limited_greedy" if num_groups > 1 else "greedy"
    return config


_EXPERTS: dict[str, Callable[[GgufHeader], dict[str, Any]]] = {
    "llama": _mixtral,
    "qwen2moe": _qwen_experts,
    "qwen3moe": _qwen_experts,
    "gpt-oss": _gpt_oss,
    "deepseek2": _deepseek,
}
