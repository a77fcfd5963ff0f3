"""Of multimodal checkpoints the text model is served, whichever family it is, and everything else stays on disk."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moiety_engine.model.errors import ConfigError, UnsupportedModelError, WeightsError
from moiety_engine.model.families import ignored_keys, read_spec, spec_from_config

from .variants import SMALL, VARIANTS

PROMPT = list(range(3, 90))
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
PIXTRAL = {"model_type": "pixtral", "head_dim": 16, "image_size": 28, "patch_size": 14, **VISION}
# the multimodal model, its class and text family, its vision encoder
CASES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "mistral": ("mistral3", "Mistral3ForConditionalGeneration", "mistral, sliding window", PIXTRAL),
    "mistral4": ("mistral3", "Mistral3ForConditionalGeneration", "mistral4", PIXTRAL),
    "aria": (
        "aria",
        "AriaForConditionalGeneration",
        "aria_text",
        VISION | {"model_type": "idefics3_vision", "image_size": 28, "patch_size": 14},
    ),
    "gemma4": (
        "gemma4",
        "Gemma4ForConditionalGeneration",
        "gemma4_text",
        VISION | {"head_dim": 16, "num_key_value_heads": 2},
    ),
    "gemma4, embeddings by layer": (
        "gemma4",
        "Gemma4ForConditionalGeneration",
        "gemma4_text, embeddings by layer",
        VISION | {"head_dim": 16, "num_key_value_heads": 2},
    ),
    "llama4": (
        "llama4",
        "Llama4ForConditionalGeneration",
        "llama4_text",
        VISION
        | {"vision_output_dim": 32, "image_size": 28, "patch_size": 14, "projector_input_dim": 32}
        | {"projector_output_dim": 32},
    ),
    "glm4v": (
        "glm4v_moe",
        "Glm4vMoeForConditionalGeneration",
        "glm4_moe",
        {
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": SMALL["hidden_size"],
        }
        | {"image_size": 28, "patch_size": 14},
    ),
    "kimi": ("kimi_k25", "Kimi_K25ForConditionalGeneration", "deepseek_v3", VISION | {"patch_size": 14}),
}
_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 3, 3]}
TEXT_SETTINGS = {"glm4v_moe": {"model_type": "glm4v_moe_text", "rope_parameters": _SECTIONS}}


@dataclass
class Wrapped:
    folder: Path
    oracle: Any

    @torch.no_grad()
    def logprobs(self) -> Tensor:
        # Llama4ForConditionalGeneration of transformers 5.24 fails without an image
        oracle = self.oracle.language_model if self.oracle.config.model_type == "llama4" else self.oracle
        return oracle(torch.tensor([PROMPT])).logits[0].log_softmax(-1)


@pytest.fixture(scope="module", params=CASES)
def wrapped(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Wrapped:
    import transformers
    from transformers import AutoConfig

    name, class_name, variant, vision = CASES[request.param]
    family, more = VARIANTS[variant]
    torch.manual_seed(1)
    text = SMALL | more | {"model_type": family, "tie_word_embeddings": False} | TEXT_SETTINGS.get(name, {})
    config = AutoConfig.for_model(name, text_config=text, vision_config=dict(vision), tie_word_embeddings=False)
    oracle = getattr(transformers, class_name)._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for key, value in (*oracle.named_parameters(), *oracle.named_buffers()):
            if "norm" in key:
                value.copy_(torch.rand_like(value) + 0.5)
            elif key.endswith("bias") or not value.any():
                value.normal_(std=0.15)
    folder = tmp_path_factory.mktemp("wrapped")
    oracle.save_pretrained(folder)
    return Wrapped(folder, oracle)


@pytest.mark.parametrize("layout", ["as published", "as held in memory"])
def test_the_text_model_says_what_transformers_says(
    wrapped: Wrapped, make_driver: Any, make_sequence: Any, tmp_path: Path, layout: str
) -> None:
    # transformers 5.24 writes the layers of Kimi's text under the name of those of its encoder
    saved = load_file(wrapped.folder / "model.safetensors")
    tensors = {
        name.replace("language_model.model.blocks.", "language_model.model.layers."): saved[name] for name in saved
    }
    if layout == "as held in memory":
        tensors = {name: tensor.clone() for name, tensor in wrapped.oracle.state_dict().items()}
    assert any("vision" in name or "visual" in name for name in tensors)
    (tmp_path / "config.json").write_text((wrapped.folder / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    logits = make_driver(tmp_path).prefill(make_sequence(PROMPT), 64)
    assert (logits.log_softmax(-1) - wrapped.logprobs()).abs().max() <= 1e-4
    assert ignored_keys(tmp_path) == []
    root = next(name.removesuffix("embed_tokens.weight") for name in tensors if name.endswith("embed_tokens.weight"))
    unknown = f"{root}layers.0.self_attn.unknown.weight"
    save_file(tensors | {"audio_tower.weight": torch.ones(2), unknown: torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=f"unexpected {re.escape(unknown)}"):
        make_driver(tmp_path)


def test_kimi_is_of_its_family_under_the_name_that_is_published(tmp_path: Path) -> None:
    text = {"model_type": "kimi_k2", **SMALL, **VARIANTS["kimi_k2"][1]}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "kimi_k25", "text_config": text}))
    spec = read_spec(tmp_path)
    assert spec.layers == spec_from_config(text).layers
    assert "mm_projector." in spec.ignored_prefixes


def test_settings_around_the_text_count_where_the_text_has_none() -> None:
    text = {"model_type": "mistral", **SMALL}
    around = {"model_type": "mistral3", "dtype": "bfloat16", "tie_word_embeddings": True}
    assert spec_from_config(around | {"text_config": text}).tie_word_embeddings
    own = spec_from_config(around | {"text_config": text | {"tie_word_embeddings": False, "dtype": "float32"}})
    assert (own.tie_word_embeddings, own.checkpoint_dtype) == (False, "float32")


def test_a_text_model_of_another_family_is_refused_by_its_name() -> None:
    with pytest.raises(UnsupportedModelError, match="model family 'ministral3' is not supported"):
        spec_from_config({"model_type": "mistral3", "text_config": {"model_type": "ministral3"}})
    with pytest.raises(ConfigError, match="mistral3 model has no text_config"):
        spec_from_config({"model_type": "mistral3"})
