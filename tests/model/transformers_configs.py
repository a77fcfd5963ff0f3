"""Configurations as transformers reads them, to compare ours with."""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING

from moiety_engine.model.errors import ModelError
from moiety_engine.model.families import spec_from_config

from .variants import CLASS_OF

Config = dict[str, Any]
# families whose text model has a part of the configuration only
NESTED = {"qwen3_5", "qwen3_5_moe", "qwen3_vl_moe"}
TEXT_CLASSES = {"gemma3": "gemma3_text", "qwen3_vl_moe": "qwen3_vl_moe_text"}
TEXT_CLASSES |= {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"} | CLASS_OF


def text_class(family: str) -> Any:
    return CONFIG_MAPPING[TEXT_CLASSES.get(family, family)]


def theirs(family: str, config: Config) -> Config:
    """The configuration with every key as transformers understands it. Raises what its class raises."""
    said = {key: value for key, value in config.items() if key != "model_type"}
    return {**text_class(family)(**said).to_dict(), "model_type": family}


def outcome(config: Config) -> Any:
    """The spec, or "refused"; anything but a ModelError fails the test."""
    try:
        return spec_from_config(config)
    except ModelError as exc:
        assert "'NoneType'" not in str(exc), exc
        return "refused"
