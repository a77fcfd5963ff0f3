"""Configurations of the first MiniMax models are read as those of today."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moiety_engine.model.errors import ModelError
from moiety_engine.model.families import ignored_keys, spec_from_config

from .transformers_configs import Config

MINIMAX_TEXT_01: Config = {  # its config.json as published, with fewer layers
    "model_type": "minimax_text_01",
    "attention_dropout": 0.0,
    "attn_type_list": [0, 0, 0, 0, 0, 0, 0, 1],
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 6144,
    "intermediate_size": 9216,
    "layernorm_full_attention_alpha": 3.5565588200778455,
    "layernorm_full_attention_beta": 1.0,
    "layernorm_linear_attention_alpha": 3.5565588200778455,
    "layernorm_linear_attention_beta": 1.0,
    "layernorm_mlp_alpha": 3.5565588200778455,
    "layernorm_mlp_beta": 1.0,
    "max_position_embeddings": 10240000,
    "num_attention_heads": 64,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 8,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "postnorm": True,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000000,
    "rotary_dim": 64,
    "router_aux_loss_coef": 0.001,
    "router_jitter_noise": 0.0,
    "shared_intermediate_size": 0,
    "shared_moe_mode": "sigmoid",
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 200064,
}


@pytest.mark.parametrize("family", ["minimax_text_01", "minimax_m1"])
def test_the_first_minimax_models_are_read_as_they_are_published(family: str, tmp_path: Path) -> None:
    published = MINIMAX_TEXT_01 | {"model_type": family}
    factors = {f"{part}_alpha_factor": 3.5565588200778455 for part in ("full_attn", "linear_attn", "mlp")}
    kinds = ["linear_attention"] * 7 + ["full_attention"]
    others = ("layernorm_", "attn_type", "rotary_dim", "postnorm", "shared_")
    now = {key: value for key, value in published.items() if not key.startswith(others)}
    now |= factors | {"model_type": "minimax", "layer_types": kinds, "partial_rotary_factor": 0.5}
    spec = spec_from_config(published)
    assert spec == spec_from_config(now)
    assert (spec.family, spec.recurrent_layers, spec.ropes[0].rotary_width) == ("minimax", tuple(range(7)), 64)
    residual = spec.layers[0].residual
    assert residual is not None and residual.attention_alpha == residual.ffn_alpha == 3.5565588200778455
    (tmp_path / "config.json").write_text(json.dumps(published))
    assert ignored_keys(tmp_path) == []
    for changes, match in (
        ({"postnorm": False}, f"postnorm False is not supported in {family}"),
        ({"attn_type_list": None}, "has no attn_type_list"),
        ({"attn_type_list": [0] * 7}, "7 layer_types for 8 num_hidden_layers"),
        ({"attn_type_list": [0] * 7 + [2]}, "layer type 2 is not supported"),
    ):
        with pytest.raises(ModelError, match=match):
            spec_from_config(published | changes)
