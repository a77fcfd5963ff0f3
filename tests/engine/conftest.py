"""A small random Qwen3-MoE checkpoint in the Hugging Face format, written by transformers itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import torch

from moiety_engine.config import EngineConfig, Speculate
from moiety_engine.loop import EngineLoop
from moiety_engine.loop_setup import build_loop
from moiety_engine.startup import load_loop


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
        config = EngineConfig(model=str(folder), name="tiny", dtype=dtype, device=device, **loading)
        self.model = load_loop(config).executor.model

    def make(self, clock_ns: Callable[[], int] = time.time_ns, **settings: object) -> EngineLoop:
        config = EngineConfig(model=str(self.folder), name="tiny", **settings)
        return build_loop(self.model, config, clock_ns=clock_ns)


@pytest.fixture(scope="session")
def loops(checkpoint: Path) -> Loops:
    return Loops(checkpoint)


@pytest.fixture(scope="session")
def sketch_loops(tmp_path_factory: pytest.TempPathFactory) -> Loops:
    """A smaller model of another family with the same tokens, to draft for the first; it has other opinions."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("sketch")
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=32,
        max_position_embeddings=512,
        initializer_range=0.2,
        eos_token_id=2,
        bos_token_id=None,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return Loops(folder)


@pytest.fixture(scope="session")
def windowed_loops(tmp_path_factory: pytest.TempPathFactory) -> Loops:
    """A model with the same tokens whose upper layer sees 20 positions, so that it has two cache groups."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder = tmp_path_factory.mktemp("windowed")
    torch.manual_seed(2)
    config = Qwen2Config(
        vocab_size=320,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        intermediate_size=64,
        max_position_embeddings=512,
        use_sliding_window=True,
        sliding_window=20,
        max_window_layers=1,
        initializer_range=0.2,
        eos_token_id=2,
        bos_token_id=None,
        pad_token_id=0,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return Loops(folder)


@pytest.fixture(scope="session")
def sparse_loops(tmp_path_factory: pytest.TempPathFactory) -> Loops:
    """A model with the same tokens that attends to 16 of them; its middle layer uses the first one's selection."""
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    folder = tmp_path_factory.mktemp("sparse")
    torch.manual_seed(3)
    config = GlmMoeDsaConfig(
        vocab_size=320,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=48,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
        index_topk=16,
        index_head_dim=32,
        index_n_heads=8,
        indexer_types=["full", "shared", "full"],
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        intermediate_size=64,
        first_k_dense_replace=1,
        max_position_embeddings=512,
        initializer_range=0.2,
        eos_token_id=2,
        bos_token_id=None,
        pad_token_id=0,
    )
    GlmMoeDsaForCausalLM(config).save_pretrained(folder)
    return Loops(folder)


Drafting = Callable[..., EngineLoop]


def make_drafting(loops: Loops, draft: Loops | None, **settings: object) -> EngineLoop:
    """A loop to which rows cost nothing, so that it drafts whatever may come true: by look-up, or by a model."""
    ticks = count(10**18, 10**7)  # a clock by which all steps take the same
    by = {"speculate": Speculate.NGRAM} if draft is None else {"speculate": Speculate.DRAFT}
    folder = "" if draft is None else str(draft.folder)
    config = EngineConfig(model=str(loops.folder), name="tiny", draft_model=folder, **by | settings)
    model = None if draft is None else draft.model
    return build_loop(loops.model, config, clock_ns=lambda: next(ticks), draft_model=model)


@pytest.fixture(params=["ngram", "draft"])
def drafting(request: pytest.FixtureRequest, loops: Loops) -> Drafting:
    """Makes such loops, with their settings."""
    draft = request.getfixturevalue("sketch_loops") if request.param == "draft" else None
    return partial(make_drafting, loops, draft)


@pytest.fixture
def draft_by(loops: Loops) -> Drafting:
    """Makes such loops with the model that drafts, and their settings."""
    return partial(make_drafting, loops)
