"""Cosines and sines are transformers' own at any position that a model takes, up to 131,071."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from moiety_engine.model.families import spec_from_config
from moiety_engine.model.families.config import read_rope
from moiety_engine.model.loading import load_model
from moiety_engine.model.rotary import RotaryTable, inverse_frequencies
from moiety_wire.engine_choices import LoadFormat

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


LONG: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(32)],
    "long_factor": FACTORS,
    "original_max_position_embeddings": 4096,
}


@pytest.mark.parametrize("longest", [512, 4096, 4097, LONGEST, None])
def test_a_shorter_context_takes_longropes_short_factors_up_to_the_original_length(longest: int | None) -> None:
    """As transformers takes them for a sequence of that length, in Llama and in Phi-3, whose length lies elsewhere."""
    from transformers import LlamaConfig, Phi3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    sizes: dict[str, Any] = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}
    sizes |= {"max_position_embeddings": LONGEST}
    outside = {key: value for key, value in LONG.items() if key != "original_max_position_embeddings"}
    for theirs in (
        LlamaConfig(head_dim=64, rope_parameters=LONG, **sizes),
        Phi3Config(rope_parameters=outside, original_max_position_embeddings=4096, **sizes),
    ):
        stated = theirs.to_dict() | {"model_type": "llama", "head_dim": 64, "hidden_act": "silu"}
        spec = spec_from_config(stated).within(longest)
        expected, magnitude = ROPE_INIT_FUNCTIONS["longrope"](theirs, seq_len=longest or LONGEST)
        frequencies_R, ours = inverse_frequencies(spec.layers[0].attention.rope)
        assert torch.equal(frequencies_R, expected)
        assert ours == pytest.approx(magnitude)


@pytest.mark.parametrize("longest", [100, 1024, 1025, None])
def test_phimoe_takes_the_magnitude_of_its_longest_context_too(longest: int | None) -> None:
    rope: dict[str, Any] = {
        "short_mscale": 1.1,
        "long_mscale": 1.3,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
    }
    config: dict[str, Any] = {
        "model_type": "phimoe",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config |= {"max_position_embeddings": 4096, "original_max_position_embeddings": 1024}
    spec = spec_from_config(config | {"rope_scaling": {"type": "longrope", **rope}}).within(longest)
    frequencies_R, magnitude = inverse_frequencies(spec.layers[0].attention.rope)
    is_short = longest is not None and longest <= 1024
    assert magnitude == (1.1 if is_short else 1.3)
    assert frequencies_R[0] == (1.0 if is_short else 0.5)


def test_served_context_selects_the_rope_and_keys_of_another_rope_do_not_match(tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "model_type": "llama", "vocab_size": 64, "hidden_size": 64, "num_attention_heads": 1, "intermediate_size": 64,
        "num_hidden_layers": 1, "max_position_embeddings": 8192, "rope_scaling": LONG,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    made = [
        load_model(
            tmp_path, device="cpu", dtype="float32", load_format=LoadFormat.DUMMY, max_context_tokens=longest
        ).allocate_kv(2, 16)
        for longest in (4096, 100, 4097, None)
    ]
    assert made[0].rotation == made[1].rotation != made[2].rotation == made[3].rotation
