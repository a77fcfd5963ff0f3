"""Reading a Hugging Face config.json into a ModelSpec, one module a kin of families. Knows no tensor.

Takes the keys of the original releases (`rope_theta`, `rope_scaling`, `num_experts`, `torch_dtype`) and those that
transformers 5 writes (`rope_parameters`, `num_local_experts`, `dtype`).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from moiety_engine.model.errors import ConfigError, UnsupportedModelError
from moiety_engine.model.families.config import Config, Features, first
from moiety_engine.model.families.ernie import ernie4_5_moe, ernie_features
from moiety_engine.model.families.glm import glm4_moe, glm_features
from moiety_engine.model.families.granite import granite_features, granitemoe
from moiety_engine.model.families.llama import llama
from moiety_engine.model.families.mixtral import mixtral
from moiety_engine.model.families.olmoe import olmoe
from moiety_engine.model.families.phimoe import phimoe, phimoe_features
from moiety_engine.model.families.qwen import qwen2_moe, qwen3, qwen3_moe
from moiety_engine.model.spec import LayerSpec, ModelSpec, NormSpec

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FAMILIES: dict[str, Callable[[Config, int], LayerSpec]] = {
    "ernie4_5_moe": ernie4_5_moe,
    "glm4_moe": glm4_moe,
    "granitemoe": granitemoe,
    "llama": llama,
    "mixtral": mixtral,
    "olmoe": olmoe,
    "phimoe": phimoe,
    "qwen2_moe": qwen2_moe,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
}
# What is unusual in the rest of the model, outside its layers.
WHOLE: dict[str, Callable[[Config], Features]] = {
    "ernie4_5_moe": ernie_features,
    "glm4_moe": glm_features,
    "granitemoe": granite_features,
    "phimoe": phimoe_features,
}


def read_spec(folder: Path) -> ModelSpec:
    """The spec of the checkpoint in `folder`; raises ConfigError or UnsupportedModelError."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; give the folder of a Hugging Face checkpoint") from None
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{path} cannot be read as JSON: {exc}") from exc
    if not isinstance(config, dict):
        raise ConfigError(f"{path} must hold one JSON object")
    return spec_from_config(config)


def spec_from_config(config: Config) -> ModelSpec:
    """The spec that a parsed config.json describes; raises ConfigError or UnsupportedModelError."""
    family = config.get("model_type")
    if family not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise UnsupportedModelError(f"model family {family!r} is not supported; the known families are: {known}")
    if config.get("quantization_config"):
        raise UnsupportedModelError("quantized checkpoints are not supported; use the unquantized one")
    read_layer = FAMILIES[family]
    try:
        usual: Features = {
            "norm": NormSpec(config.get("rms_norm_eps", 1e-6)),
            "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
        }
        return ModelSpec(
            family=family,
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            max_context_tokens=config["max_position_embeddings"],
            checkpoint_dtype=str(first(config, "dtype", "torch_dtype", default="float32")).removeprefix("torch."),
            layers=tuple(read_layer(config, index) for index in range(config["num_hidden_layers"])),
            **(usual | WHOLE[family](config) if family in WHOLE else usual),
        )
    except KeyError as exc:
        raise ConfigError(f"config.json of a {family} model lacks the key {exc.args[0]!r}") from exc
