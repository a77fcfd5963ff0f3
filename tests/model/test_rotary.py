"""Cosines and sines are transformers' own at any position that a model takes, up to 131,071."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moiety_engine.model.families.config import read_rope
from moiety_engine.model.rotary import RotaryTable

LONGEST = 131_072
# every position near the ends, and some between
POSITIONS = torch.cat((torch.arange(5000), torch.arange(5000, LONGEST, 97), torch.arange(LONGEST - 5000, LONGEST)))
FACTORS = [1.0 + 0.37 * i for i in range(32)]

KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "partial": {"rope_type": "default", "partial_rotary_factor": 0.5},
    "linear": {"rope_type": "linear", "factor": 8.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn of gpt-oss": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "yarn of deepseek": {
        "rope_type": "yarn",
        "factor": 40.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0] * 32,
        "long_factor": FACTORS,
        "original_max_position_embeddings": 4096,
    },
}


@pytest.mark.parametrize("theta", [10_000.0, 1_000_000.0])
@pytest.mark.parametrize("kind", KINDS)
def test_tables_agree_with_transformers_up_to_128k_positions(kind: str, theta: float) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

    parameters = KINDS[kind] | {"rope_theta": theta}
    config = LlamaConfig(
        head_dim=64, hidden_size=256, num_attention_heads=4, max_position_embeddings=LONGEST, rope_parameters=parameters
    )
    oracle = (Phi3RotaryEmbedding if kind == "partial" else LlamaRotaryEmbedding)(config)
    cos, sin = oracle(torch.empty(0), POSITIONS[None])
    pairs = cos.shape[-1] // 2
    ours_cos, ours_sin = RotaryTable(read_rope(config.to_dict(), 64), torch.device("cpu")).upto(LONGEST)
    assert ours_cos.shape[1] == pairs
    for ours, theirs in ((ours_cos, cos), (ours_sin, sin)):
        assert (ours[POSITIONS] - theirs[0, :, :pairs]).abs().max() <= 1e-6
