"""Writer of GGUF files from checkpoints of transformers, with llama.cpp's own package: names, blocks and metadata."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

Type = gguf.GGMLQuantizationType
ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen2_moe": gguf.MODEL_ARCH.QWEN2MOE,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
    "deepseek_v2": gguf.MODEL_ARCH.DEEPSEEK2,
    "deepseek_v3": gguf.MODEL_ARCH.DEEPSEEK2,
}
_EXPERT = re.compile(r"experts\.(\d+)\.")


def write_gguf(folder: Path, path: Path, kind: Type = Type.F32, *, splits_keys: bool = False, **metadata: Any) -> None:
    """Write the checkpoint in `folder` as a GGUF file; matrices of layers have the type `kind`.

    `splits_keys`: latent attention's keys and values are apart, as newer files have them.
    """
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[ARCHITECTURES[config["model_type"]]])
    _describe(writer, config, splits_keys=splits_keys)
    _add_tokenizer(writer, config["vocab_size"])
    for key, value in metadata.items():
        writer.add_string(f"general.{key}", value)
    for name, tensor in tensors_of(folder, config, splits_keys=splits_keys).items():
        narrow = tensor.dim() > 1 and name.startswith("blk.") and "gate_inp" not in name
        array = tensor.float().contiguous().numpy()
        own = kind if narrow else Type.F32
        data = array if own is Type.F32 else gguf.quants.quantize(array, own)
        writer.add_tensor(name, data, raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensors_of(folder: Path, config: dict[str, Any], *, splits_keys: bool) -> dict[str, Tensor]:
    """The checkpoint's tensors by llama.cpp's names and in its order of rows."""
    names = gguf.get_tensor_name_map(ARCHITECTURES[config["model_type"]], config["num_hidden_layers"])
    found: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if (match := _EXPERT.search(name)) is not None:
            experts.setdefault(name.replace(match[0], "experts."), {})[int(match[1])] = tensor
        elif splits_keys and "kv_b_proj" in name:
            heads, nope = config["num_attention_heads"], config["qk_nope_head_dim"]
            keys, values = tensor.view(heads, -1, tensor.shape[1]).split([nope, config["v_head_dim"]], dim=1)
            layer = name.split(".")[2]
            found |= {f"blk.{layer}.attn_k_b.weight": keys.mT, f"blk.{layer}.attn_v_b.weight": values}
        elif config["model_type"] == "gpt_oss" and "experts.gate_up_proj" in name:
            layer, end = name.split(".")[2], "bias" if name.endswith("_bias") else "weight"
            for which, part in (("gate", tensor[..., ::2]), ("up", tensor[..., 1::2])):
                found[f"blk.{layer}.ffn_{which}_exps.{end}"] = part.mT if part.dim() > 2 else part
        else:
            found[_name(names, name, config)] = _in_order(name, tensor, config)
    for name, each in experts.items():
        found[_name(names, name, config)] = torch.stack([each[index] for index in range(len(each))])
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "llama3":
        found["rope_freqs.weight"] = llama3_factors(rope, config["head_dim"])
    return found


def llama3_factors(rope: dict[str, Any], width: int) -> Tensor:
    """By wavelengths, as llama.cpp's converter computes them."""
    low, high = (rope["original_max_position_embeddings"] / rope[f"{end}_freq_factor"] for end in ("low", "high"))
    factors = []
    for frequency in 1 / rope["rope_theta"] ** (torch.arange(0, width, 2) / width):
        length = 2 * torch.pi / frequency
        smooth = (low / length * rope["low_freq_factor"] - rope["low_freq_factor"]) / (
            rope["high_freq_factor"] - rope["low_freq_factor"]
        )
        between = 1 / ((1 - smooth) / rope["factor"] + smooth)
        factors.append(1.0 if length < high else rope["factor"] if length > low else float(between))
    return torch.tensor(factors)


def _name(names: Any, name: str, config: dict[str, Any]) -> str:
    stem, _, end = name.rpartition(".")
    if name.endswith("e_score_correction_bias"):
        return f"blk.{name.split('.')[2]}.exp_probs_b.bias"
    if name.endswith("sinks"):
        return f"blk.{name.split('.')[2]}.attn_sinks.weight"
    if config["model_type"] == "gpt_oss" and "experts.down_proj" in name:
        return f"blk.{name.split('.')[2]}.ffn_down_exps.{'bias' if name.endswith('_bias') else 'weight'}"
    found = names.get_name(stem)
    assert found is not None, name
    return f"{found}.{end}"


def _in_order(name: str, tensor: Tensor, config: dict[str, Any]) -> Tensor:
    if config["model_type"] == "gpt_oss" and name.endswith("experts.down_proj"):
        return tensor.mT
    if name.endswith("shared_expert_gate.weight"):
        return tensor[0]
    if config["model_type"] in ("llama", "mixtral") and (".q_proj." in name or ".k_proj." in name):
        heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
        return tensor.reshape(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
    return tensor


def _describe(writer: Any, config: dict[str, Any], *, splits_keys: bool) -> None:
    rope = config.get("rope_parameters") or {}
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config.get("num_key_value_heads") or config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    if "intermediate_size" in config:
        writer.add_feed_forward_length(config["intermediate_size"])
    experts = config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts")
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        if config["model_type"] != "mixtral":
            writer.add_expert_feed_forward_length(config.get("moe_intermediate_size") or config["intermediate_size"])
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if config["model_type"] == "gpt_oss":
        writer.add_sliding_window(config["sliding_window"])
    if "kv_lora_rank" in config:
        _describe_latent(writer, config, splits_keys=splits_keys)
    else:
        writer.add_key_length(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "mscale_all_dim" in rope:
            writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def _describe_latent(writer: Any, config: dict[str, Any], *, splits_keys: bool) -> None:
    width, rotary = config["qk_nope_head_dim"] + config["qk_rope_head_dim"], config["qk_rope_head_dim"]
    if config["q_lora_rank"]:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(config["kv_lora_rank"])
    if splits_keys:
        writer.add_key_length(config["kv_lora_rank"] + rotary)
        writer.add_value_length(config["kv_lora_rank"])
        writer.add_key_length_mla(width)
        writer.add_value_length_mla(config["v_head_dim"])
    else:
        writer.add_key_length(width)
        writer.add_value_length(config["v_head_dim"])
    writer.add_rope_dimension_count(rotary)
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    sigmoid = config["model_type"] == "deepseek_v3"
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID if sigmoid else gguf.ExpertGatingFuncType.SOFTMAX)
    writer.add_expert_weights_norm(bool(config["norm_topk_prob"]))
    writer.add_expert_group_count(config["n_group"])
    writer.add_expert_group_used_count(config["topk_group"])


def _add_tokenizer(writer: Any, size: int) -> None:
    """One token a byte, one pair, and special tokens."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    tokens = [*bytes_to_unicode().values(), *(f"<|{index}|>" for index in range(256, size - 1)), "ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 256 + [3] * (size - 257) + [1])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(257)
    writer.add_eot_token_id(258)
    writer.add_bos_token_id(256)
    writer.add_chat_template("{% for message in messages %}{{ message.content }}{% endfor %}")


def random_blocks(kind: Type, rows: int, blocks: int) -> np.ndarray:
    """Blocks of any bytes, whose scales are finite."""
    size = gguf.GGML_QUANT_SIZES[kind][1]
    raw = np.random.default_rng(int(kind)).integers(0, 256, (rows, blocks * size), dtype=np.uint8)
    raw.reshape(-1, size)[:, 1::2] &= 0x3B  # no exponent of a float16 is the highest
    return raw
