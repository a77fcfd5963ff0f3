"""The model on disk: a Hugging Face Qwen3-MoE folder, written so that a reader never sees a partial file."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from tokenizers import Tokenizer

from moiety_demo.network import DemoNetwork, NetworkConfig
from moiety_demo.tokenizer import CHAT_TEMPLATE, END_OF_TEXT, TURN_END, token_id

WEIGHTS = "model.safetensors"


class DemoCheckpointError(Exception):
    """The folder does not hold a demo model."""


def save_folder(network: DemoNetwork, tokenizer: Tokenizer, folder: Path) -> None:
    """Write or replace the model in `folder`: bfloat16 weights, each file atomically and the weights last."""
    folder.mkdir(parents=True, exist_ok=True)
    config = network.config
    turn_end, padding = token_id(tokenizer, TURN_END), token_id(tokenizer, END_OF_TEXT)
    _replace(folder / "tokenizer.json", tokenizer.to_str(pretty=False).encode())
    _replace_json(folder / "tokenizer_config.json", _tokenizer_config(config))
    _replace_json(folder / "config.json", _model_config(config, turn_end, padding))
    generation = {"do_sample": False, "eos_token_id": [turn_end, padding], "pad_token_id": padding}
    _replace_json(folder / "generation_config.json", generation)
    tensors = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in network.state_dict().items()}
    _replace(folder / WEIGHTS, save(tensors, metadata={"format": "pt"}))


def load_folder(folder: Path) -> tuple[DemoNetwork, Tokenizer]:
    """Return the network, in float32 with the stored values, and its tokenizer.

    Raises DemoCheckpointError where the folder lacks a file or holds another architecture.
    """
    try:
        raw = json.loads((folder / "config.json").read_text())
        if raw.get("model_type") != "qwen3_moe":
            raise DemoCheckpointError(f"{folder} holds a {raw.get('model_type')!r} model; give a demo model's folder")
        network = DemoNetwork(_network_config(raw))
        tensors = load_file(folder / WEIGHTS)
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except (FileNotFoundError, KeyError, json.JSONDecodeError) as exc:
        raise DemoCheckpointError(f"{folder} is not a complete model folder: {exc}; train one with `train`") from exc
    network.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return network.eval(), tokenizer


def _model_config(config: NetworkConfig, turn_end: int, padding: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "torch_dtype": "bfloat16",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.expert_hidden_size * config.num_experts_per_token,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_positions,
        "initializer_range": config.init_std,
        "rms_norm_eps": config.rms_norm_eps,
        "use_cache": True,
        "tie_word_embeddings": True,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "sliding_window": None,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": config.expert_hidden_size,
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.num_experts_per_token,
        "norm_topk_prob": True,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.0,
        "bos_token_id": None,
        "eos_token_id": turn_end,
        "pad_token_id": padding,
    }


def _network_config(raw: Mapping[str, Any]) -> NetworkConfig:
    return NetworkConfig(
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=raw["num_attention_heads"],
        num_kv_heads=raw["num_key_value_heads"],
        head_dim=raw["head_dim"],
        num_experts=raw["num_experts"],
        num_experts_per_token=raw["num_experts_per_tok"],
        expert_hidden_size=raw["moe_intermediate_size"],
        rope_theta=raw["rope_theta"],
        rms_norm_eps=raw["rms_norm_eps"],
        max_positions=raw["max_position_embeddings"],
        init_std=raw["initializer_range"],
    )


def _tokenizer_config(config: NetworkConfig) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.max_positions,
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def _replace_json(path: Path, value: Mapping[str, Any]) -> None:
    _replace(path, (json.dumps(value, indent=2) + "\n").encode())


def _replace(path: Path, content: bytes) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_bytes(content)
    partial.replace(path)
