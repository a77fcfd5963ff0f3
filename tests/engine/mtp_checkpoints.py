"""Checkpoints with an MTP layer, in which it drafts well, for tests.

In one, the MTP layer copies the only layer of the model and reads tokens: it predicts what the model generates, except
for the first token, which it lacks, and some noise. In the other, tokens follow each other in a circle, and the layer
sees only the model's hidden states of earlier tokens: it is right if and only if these are there."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from moiety_engine.model.mtp_names import QWEN_MTP, MtpNames, nemotron_mtp_names

VOCABULARY = WIDTH = 64
STEP = 5  # from a token to the one that follows it in the circle
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 0,
    "num_nextn_predict_layers": 1,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "bos_token_id": None,
    "pad_token_id": None,
}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}


def write(folder: Path, family: str, **more: Any) -> dict[str, torch.Tensor]:
    """Write transformers' checkpoint with the same layer once more."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(SMALL | more))
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(written | {"num_nextn_predict_layers": 1}))
    tensors = load_file(folder / "model.safetensors")
    again = {
        name.replace("layers.0.", "layers.1."): one.clone() for name, one in tensors.items() if "layers.0." in name
    }
    norms = {f"model.layers.1.{name}.weight": torch.ones(WIDTH) for name in ("enorm", "hnorm", "shared_head.norm")}
    return tensors | again | norms


def write_one_that_reads_tokens(folder: Path) -> None:
    tensors = write(folder, "deepseek_v3", **LATENT)
    for name, one in tensors.items():
        if name.endswith("o_proj.weight"):
            one.mul_(0.2)  # so that the first token matters little
    rows = tensors["model.embed_tokens.weight"]
    tensors["model.embed_tokens.weight"] = rows / rows.square().mean(-1, keepdim=True).sqrt()
    noise = 0.01 * torch.randn(WIDTH, WIDTH)
    tensors["model.layers.1.eh_proj.weight"] = torch.cat((torch.eye(WIDTH), noise), dim=1)
    save_file(tensors, folder / "model.safetensors")


def write_one_that_reads_what_was_made(folder: Path) -> None:
    tensors = write(folder, "glm4_moe", head_dim=16)
    for name, one in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            one.zero_()
    one_each, following = torch.eye(WIDTH), (torch.arange(VOCABULARY) + STEP) % VOCABULARY
    tensors["model.embed_tokens.weight"] = 8 * one_each
    tensors["lm_head.weight"] = 4 * one_each[(torch.arange(VOCABULARY) - STEP) % VOCABULARY]
    tensors["model.layers.1.eh_proj.weight"] = torch.cat((0 * one_each, one_each[:, following]), dim=1)
    save_file(tensors, folder / "model.safetensors")


def write_one_with_several_layers(folder: Path, num_layers: int = 3) -> None:
    """Write the same with several MTP layers, of which each is right about one more token of the circle."""
    write_one_that_reads_what_was_made(folder)
    tensors = load_file(folder / "model.safetensors")
    for index in range(2, 1 + num_layers):
        tensors |= {
            name.replace("layers.1.", f"layers.{index}."): tensor.clone()
            for name, tensor in tensors.items()
            if "layers.1." in name
        }
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": num_layers}))


@dataclass(frozen=True)
class TokenNames:
    """Names of the tensors between which the newest token decides, and the value of norms that change nothing."""

    embedding: str = "model.embed_tokens.weight"
    norm: str = "model.norm.weight"
    mtp: MtpNames = QWEN_MTP
    neutral_norm: float = 0.0  # those of Qwen are stored less 1


QWEN_NAMES = TokenNames()
NEMOTRON_NAMES = TokenNames("backbone.embeddings.weight", "backbone.norm_f.weight", nemotron_mtp_names(2), 1.0)


def let_tokens_decide(folder: Path, names: TokenNames = QWEN_NAMES) -> None:
    """Change random weights so that the next token depends on the newest one most of the time, for the layer too."""
    tensors, mtp = load_file(folder / "model.safetensors"), names.mtp
    for name, one in tensors.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj", "down_proj.weight")):
            one.mul_(0.1)
    rows, width = tensors[names.embedding], tensors[f"{mtp.projection}.weight"].shape[0]
    tensors[names.embedding] = rows / rows.square().mean(-1, keepdim=True).sqrt()
    tensors[f"{mtp.projection}.weight"] = torch.cat((torch.eye(width), torch.zeros(width, width)), dim=1)
    tensors[f"{mtp.final_norm}.weight"] = tensors[names.norm].clone()
    for name in (mtp.token_norm, mtp.before_norm):
        tensors[f"{name}.weight"] = torch.full((width,), names.neutral_norm)
    save_file(tensors, folder / "model.safetensors")
