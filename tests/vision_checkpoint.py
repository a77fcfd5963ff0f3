"""A small random Qwen3-VL-MoE checkpoint, written by transformers, which is the oracle of its tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

IMAGE, START, END = 380, 381, 382
TEXT: dict[str, Any] = {
    "vocab_size": 384, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 1024, "head_dim": 32, "moe_intermediate_size": 48, "intermediate_size": 96,
    "num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": [1], "initializer_range": 0.15,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "mrope_section": [6, 5, 5]},
}  # fmt: skip
VISION: dict[str, Any] = {
    "depth": 4, "hidden_size": 48, "intermediate_size": 80, "num_heads": 3, "patch_size": 4, "out_hidden_size": 64,
    "num_position_embeddings": 36, "deepstack_visual_indexes": [0, 2, 3], "initializer_range": 0.1,
}  # fmt: skip


def write_checkpoint(folder: Path, *, dtype: torch.dtype = torch.float32, tied: bool = False) -> Any:
    """Write a small random checkpoint, and return transformers' model of it as the oracle."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    torch.manual_seed(5)
    config = AutoConfig.for_model(
        "qwen3_vl_moe", text_config=TEXT, vision_config=VISION, image_token_id=IMAGE, vision_start_token_id=START,
        vision_end_token_id=END, video_token_id=383, tie_word_embeddings=tied,
    )  # fmt: skip
    oracle = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").to(dtype).eval()
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            if "norm" in name and name.endswith("weight"):
                parameter.copy_(torch.rand_like(parameter) + 0.5)
            elif name.endswith("bias"):
                parameter.normal_(std=0.1)
    oracle.save_pretrained(folder)
    return oracle


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vision")


@pytest.fixture(scope="session")
def oracle(folder: Path) -> Any:
    """transformers' model of the checkpoint in `folder`."""
    return write_checkpoint(folder)
