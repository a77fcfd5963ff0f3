"""Small random checkpoints in the Hugging Face format, written by transformers, and engine loops over them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from moiety_engine.config import EngineConfig, Speculate
from moiety_engine.loop import EngineLoop
from moiety_engine.loop_setup import build_loop
from moiety_engine.messages import CoreSubmit
from moiety_engine.offline import run_all
from moiety_engine.startup import load_loop

from .rank_processes import alone, folders, processes

__all__ = ["alone", "folders", "processes"]  # fixtures

# of every model: one vocabulary, so that one can draft for another
SMALL: dict[str, Any] = {
    **{"vocab_size": 320, "max_position_embeddings": 512, "initializer_range": 0.2},
    **{"eos_token_id": 2, "bos_token_id": None, "pad_token_id": 0},
    **{"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
}


def write_model(folder: Path, family: str, seed: int, settings: dict[str, Any]) -> Path:
    """Write a random checkpoint of a family, with `settings` in addition to SMALL, and return its folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(SMALL | settings))).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
    settings |= {"moe_intermediate_size": 32, "intermediate_size": 64}
    return write_model(tmp_path_factory.mktemp("qwen3_moe"), "qwen3_moe", 0, settings)


class Loops:
    """Makes loops over one loaded model, since loading is the slow part."""

    def __init__(self, folder: Path, device: str = "cpu", dtype: str = "float32", **loading: object) -> None:
        self.folder = folder
        config = EngineConfig(model=str(folder), name="tiny", dtype=dtype, device=device, **loading)
        self.model = load_loop(config).executor.model

    def make(self, clock_ns: Callable[[], int] = time.time_ns, **settings: object) -> EngineLoop:
        config = EngineConfig(model=str(self.folder), name="tiny", **settings)
        return build_loop(self.model, config, clock_ns=clock_ns)


def tokens(loop: EngineLoop, submits: Iterable[CoreSubmit]) -> dict[int, list[int]]:
    """Run the requests together, and return the tokens of each by its key."""
    return {key: result.token_ids for key, result in run_all(loop, submits).items()}


def tokens_alone(loops: Loops, submits: Iterable[CoreSubmit]) -> dict[int, list[int]]:
    """Run each request by itself, without prefix cache and in one chunk, and return its tokens by its key."""
    return {key: one for submit in submits for key, one in tokens(loops.make(prefix_caching=False), [submit]).items()}


@pytest.fixture(scope="session")
def loops(checkpoint: Path) -> Loops:
    return Loops(checkpoint)


@pytest.fixture(scope="session")
def sketch_loops(tmp_path_factory: pytest.TempPathFactory) -> Loops:
    """Loops of a smaller model of another family with the same vocabulary, which drafts for the first and often
    disagrees."""
    settings = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    settings |= {"intermediate_size": 32}
    return Loops(write_model(tmp_path_factory.mktemp("sketch"), "llama", 1, settings))


@pytest.fixture(scope="session")
def windowed_loops(tmp_path_factory: pytest.TempPathFactory) -> Loops:
    """A model with the same tokens whose upper layer sees 20 positions, so that it has two cache groups."""
    settings = {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 64}
    settings |= {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
    return Loops(write_model(tmp_path_factory.mktemp("windowed"), "qwen2", 2, settings))


@pytest.fixture(scope="session")
def recurrent_loops(tmp_path_factory: pytest.TempPathFactory) -> Loops:
    """A model with the same tokens whose first and last layer are recurrent (Mamba-2)."""
    settings = {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_hidden_layers": 3}
    settings |= {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32}
    settings |= {"shared_intermediate_size": 32, "mamba_n_heads": 2, "mamba_n_groups": 1, "mamba_d_state": 16}
    return Loops(write_model(tmp_path_factory.mktemp("recurrent"), "granitemoehybrid", 4, settings))


@pytest.fixture(scope="session")
def sparse_loops(tmp_path_factory: pytest.TempPathFactory) -> Loops:
    """A model with the same tokens that attends to 16 of them; its middle layer uses the first one's selection."""
    settings = {"num_hidden_layers": 3, "num_key_value_heads": 4, "q_lora_rank": 48, "kv_lora_rank": 32}
    settings |= {"qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
    indexer = {"index_topk": 16, "index_head_dim": 32, "index_n_heads": 8, "indexer_types": ["full", "shared", "full"]}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    experts |= {"intermediate_size": 64, "first_k_dense_replace": 1}
    folder = tmp_path_factory.mktemp("sparse")
    return Loops(write_model(folder, "glm_moe_dsa", 3, settings | indexer | experts))


Drafting = Callable[..., EngineLoop]


def make_drafting(loops: Loops, draft: Loops | None, **settings: object) -> EngineLoop:
    """Return a loop for which rows cost nothing, so that it always drafts, by prompt look-up or by a model."""
    ticks = count(10**18, 10**7)  # a clock by which all steps take the same
    by = {"speculate": Speculate.NGRAM} if draft is None else {"speculate": Speculate.DRAFT}
    folder = "" if draft is None else str(draft.folder)
    config = EngineConfig(model=str(loops.folder), name="tiny", draft_model=folder, **by | settings)
    models = () if draft is None else (draft.model,)
    return build_loop(loops.model, config, clock_ns=lambda: next(ticks), draft_models=models)


@pytest.fixture(params=["ngram", "draft"])
def drafting(request: pytest.FixtureRequest, loops: Loops) -> Drafting:
    """Return a function that makes such loops with the given settings."""
    draft = request.getfixturevalue("sketch_loops") if request.param == "draft" else None
    return partial(make_drafting, loops, draft)


@pytest.fixture
def draft_by(loops: Loops) -> Drafting:
    """Return a function that makes such loops with a draft model and the given settings."""
    return partial(make_drafting, loops)
