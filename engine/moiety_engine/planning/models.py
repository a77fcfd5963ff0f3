"""Models to plan for: a preset, a folder with config.json or a hub id; and the format of the weights.

Presets are the keys of the releases' config.json; the hub id is in the comment beside each preset.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from moiety_engine.cache.table_layout import TableLayout
from moiety_engine.checkpoint import resolve_checkpoint
from moiety_engine.errors import InvalidConfig
from moiety_engine.model.cache_groups import cache_groups
from moiety_engine.model.compressed_specs import CompressedAttentionSpec
from moiety_engine.model.families import read_spec, spec_from_config
from moiety_engine.model.paged_state_spec import PagedStateSpec
from moiety_engine.model.recurrent_specs import RecurrentSpec
from moiety_engine.model.spec import KV_SCALE_BYTES, LatentAttentionSpec
from moiety_engine.model.weight_offload import weight_bytes
from moiety_engine.model.weight_quantizer import bytes_in
from moiety_kernels.quantization.weight import FORMATS
from moiety_wire.engine_choices import KvDtype

if TYPE_CHECKING:
    from moiety_engine.model.spec import AttentionSpec, ModelSpec
    from moiety_kernels.quantization.weight import WeightFormat

_QWEN3 = {"model_type": "qwen3_moe", "head_dim": 128, "num_key_value_heads": 4, "num_experts": 128}
_QWEN3 |= {"num_experts_per_tok": 8, "norm_topk_prob": True, "vocab_size": 151936, "max_position_embeddings": 40960}
_GPT_OSS = {"model_type": "gpt_oss", "head_dim": 64, "num_attention_heads": 64, "num_key_value_heads": 8}
_GPT_OSS |= {"hidden_size": 2880, "intermediate_size": 2880, "num_experts_per_tok": 4, "vocab_size": 201088}
_GPT_OSS |= {"sliding_window": 128, "max_position_embeddings": 131072, "quantization_config": {"quant_method": "mxfp4"}}
_GPT_OSS |= {"swiglu_limit": 7.0, "attention_bias": True}
_QWEN_3_NEXT = {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256}
_QWEN_3_NEXT |= {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "max_position_embeddings": 262_144}
_QWEN_3_NEXT |= {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
_KIMI_FULL = (4, 8, 12, 16, 20, 24, 27)  # layers with latent attention, counted from 1
_DEEPSEEK: dict[str, Any] = {
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}
PRESETS: dict[str, dict[str, Any]] = {
    "deepseek-v3": {"model_type": "deepseek_v3", **_DEEPSEEK},  # deepseek-ai/DeepSeek-V3
    "deepseek-v3.2": {"model_type": "deepseek_v32", **_DEEPSEEK},  # deepseek-ai/DeepSeek-V3.2
    "glm-5": {"model_type": "glm_moe_dsa"},  # zai-org/GLM-5, whose config.json has the class's defaults
    "kimi-linear-48b-a3b": {  # moonshotai/Kimi-Linear-48B-A3B-Instruct
        "model_type": "kimi_linear",
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "moe_intermediate_size": 1024,
        "num_hidden_layers": 27,
        "num_attention_heads": 32,
        "num_experts": 256,
        "num_experts_per_token": 8,
        "linear_attn_config": {
            "num_heads": 32,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
            "full_attn_layers": [*_KIMI_FULL],
            "kda_layers": [layer for layer in range(1, 28) if layer not in _KIMI_FULL],
        },
        "vocab_size": 163_840,
        "model_max_length": 1_048_576,
    },
    "qwen3-235b-a22b": {  # Qwen/Qwen3-235B-A22B
        **_QWEN3,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
    },
    "qwen3-30b-a3b": {  # Qwen/Qwen3-30B-A3B
        **_QWEN3,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
    },
    "qwen3.5-35b-a3b": {  # Qwen/Qwen3.5-35B-A3B, its text model
        **_QWEN_3_NEXT,
        "model_type": "qwen3_5_moe_text",
        "num_hidden_layers": 40,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "vocab_size": 248_320,
    },
    "qwen3-next-80b-a3b": {  # Qwen/Qwen3-Next-80B-A3B-Instruct
        **_QWEN_3_NEXT,
        "model_type": "qwen3_next",
        "num_hidden_layers": 48,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "vocab_size": 151_936,
    },
    "mixtral-8x7b": {  # mistralai/Mixtral-8x7B-v0.1
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 32000,
        "max_position_embeddings": 32768,
    },
    "gpt-oss-120b": {**_GPT_OSS, "num_hidden_layers": 36, "num_local_experts": 128},  # openai/gpt-oss-120b
    "gpt-oss-20b": {**_GPT_OSS, "num_hidden_layers": 24, "num_local_experts": 32},  # openai/gpt-oss-20b
    "glm-4.5-air": {  # zai-org/GLM-4.5-Air
        "model_type": "glm4_moe",
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 46,
        "first_k_dense_replace": 1,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "vocab_size": 151552,
        "max_position_embeddings": 131072,
    },
}


INDEX_KEY_ITEMSIZE = 2  # bytes of an index key's value, whatever the cache's type


@dataclass(frozen=True, slots=True)
class Served:
    """A model and the types of its weights and its KV cache."""

    name: str
    spec: ModelSpec
    form: WeightFormat | None  # of the large products; None: bfloat16, like everything else
    kv_itemsize: int = 2
    kv_scaled: bool = False  # integers with scales beside them

    def weight_bytes(self, own: ModelSpec) -> int:
        """Return the bytes of a rank's share of the weights."""
        if self.form is None:
            return weight_bytes(own, torch.bfloat16)
        return bytes_in(self.form, own, torch.bfloat16)

    def kv_bytes_per_token(self, own: ModelSpec, context: float, dcp: int = 1) -> int:
        """Return the bytes of a sequence of `context` tokens in a rank's KV cache, divided by its tokens.

        `dcp` ranks divide the positions. Layers with a sliding window keep the last tokens only; see
        `model.cache_groups`. Recurrent layers have a state, whose bytes are spread over the tokens.
        """
        groups = cache_groups(self.spec, one_shape=self.kv_scaled)
        if all(group.window is None for group in groups):
            states = sum(state_bytes(layer.attention) for layer in own.layers)
            return -(-sum(self.kv_bytes(layer.attention) for layer in own.layers) // dcp) + math.ceil(states / context)
        layout = TableLayout(1, tuple(group.window for group in groups))
        kept = [context if most is None else min(context, most) for most in layout.most_held]
        of_layers = [self.kv_bytes(layer.attention) for layer in self.spec.layers]
        share = sum(
            sum(of_layers[layer] for layer in group.layers) * tokens for group, tokens in zip(groups, kept, strict=True)
        )
        all_layers = sum(self.kv_bytes(layer.attention) for layer in own.layers)
        return math.ceil(all_layers * share / (sum(of_layers) * context * dcp))

    def kv_bytes(self, attention: AttentionSpec | LatentAttentionSpec | RecurrentSpec) -> int:
        """Return the bytes of one token in one layer's KV cache; 0 for a recurrent layer without entries."""
        if isinstance(attention, PagedStateSpec):
            pool = attention.pool if isinstance(attention, CompressedAttentionSpec) else None
            rate = 1 if pool is None else pool.rate
            return math.ceil(attention.block_values(rate) * self.kv_itemsize / rate)
        if isinstance(attention, RecurrentSpec):
            return 0
        scales = KV_SCALE_BYTES * attention.cached_rows if self.kv_scaled else 0
        index_key = attention.index_key_width if isinstance(attention, LatentAttentionSpec) else 0
        return attention.cached_values * self.kv_itemsize + scales + index_key * INDEX_KEY_ITEMSIZE


def state_bytes(attention: AttentionSpec | LatentAttentionSpec | RecurrentSpec) -> int:
    """Return the bytes of a sequence's state in one layer, with activations in bfloat16; 0 for attention."""
    parts = attention.state_parts if isinstance(attention, RecurrentSpec) else ()
    return sum((4 if part.exact else 2) * math.prod(part.shape) for part in parts)


def find_model(model: str, weights: str = "auto", kv_dtype: str = "auto") -> Served:
    """Return the model of a preset, folder or hub id.

    `weights`: auto (as in the checkpoint), bf16, or the name of a format. Raises EngineError.
    """
    if model.lower() in PRESETS:
        name, spec = model.lower(), spec_from_config(PRESETS[model.lower()])
    elif model and not Path(model).is_dir() and "/" not in model:
        raise InvalidConfig(
            f"{model!r} is not a folder with config.json, a hub id such as organisation/model, or one of: "
            f"{', '.join(PRESETS)}"
        )
    else:
        folder = resolve_checkpoint(model, ("config.json",))
        name, spec = folder.name, read_spec(folder)
    if kv_dtype not in list(KvDtype):
        raise InvalidConfig(f"--kv-dtype {kv_dtype!r} must be one of {', '.join(KvDtype)}")
    if weights in ("auto", "bf16"):
        form = spec.weight_format if weights == "auto" else None
    elif weights in FORMATS:
        stored = spec.weight_format
        form = stored if stored is not None and stored.name == weights else FORMATS[weights]
    else:
        raise InvalidConfig(f"--weights {weights!r} must be auto, bf16, {', '.join(FORMATS)}")
    return Served(name, spec, form, 2 if kv_dtype in ("auto", "bf16") else 1, kv_dtype == "int8")
