"""A small random Qwen3-MoE checkpoint in the Hugging Face format, written by transformers itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from moiety_engine.config import EngineConfig
from moiety_engine.loop import EngineLoop, load_loop


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    folder = tmp_path_factory.mktemp("qwen3_moe")
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=320,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        intermediate_size=64,
        max_position_embeddings=512,
        norm_topk_prob=True,
        initializer_range=0.2,
        eos_token_id=2,
        bos_token_id=None,
        pad_token_id=0,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


class Loops:
    """Makes loops over one loaded model, since loading is the slow part."""

    def __init__(self, folder: Path, device: str = "cpu", dtype: str = "float32", **loading: object) -> None:
        self.folder = folder
        config = EngineConfig(model=str(folder), name="tiny", dtype=dtype, device=device, **loading)  # type: ignore[arg-type]
        self.model = load_loop(config).model

    def make(self, clock_ns: Callable[[], int] = time.time_ns, **settings: object) -> EngineLoop:
        config = EngineConfig(model=str(self.folder), name="tiny", **settings)  # type: ignore[arg-type]
        return EngineLoop(self.model, config, clock_ns=clock_ns)


@pytest.fixture(scope="session")
def loops(checkpoint: Path) -> Loops:
    return Loops(checkpoint)
