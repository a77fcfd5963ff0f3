"""Multimodal checkpoints whose text model alone is served; `text_config` in their config.json names its family.

Images are not taken, and the tensors of their encoders stay on disk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moiety_engine.model.errors import ConfigError

if TYPE_CHECKING:
    from moiety_engine.model.families.config import Config

WRAPPED_BY = "wrapped_by"  # key of a text model's configuration that names the multimodal model around it
_OF_THE_WHOLE = ("dtype", "torch_dtype", "tie_word_embeddings", "quantization_config", "compression_config")
_GEMMA_PARTS = ("vision_tower", "embed_vision", "audio_tower", "embed_audio")
_PROJECTOR = ("multi_modal_projector.", "model.multi_modal_projector.")
_VISION = ("vision_tower.", "model.vision_tower.")


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A multimodal model: released examples, its usual text family, and the prefixes of tensors beside the text."""

    examples: str
    text_family: str
    ignored_prefixes: tuple[str, ...]


WRAPPERS: dict[str, Wrapper] = {
    "aria": Wrapper("Aria", "aria_text", (*_VISION, *_PROJECTOR)),
    "gemma4": Wrapper(
        "Gemma 4 E2B, E4B, 26B-A4B, 31B",
        "gemma4_text",
        tuple(f"{root}{part}." for root in ("", "model.") for part in _GEMMA_PARTS),
    ),
    "glm4v_moe": Wrapper("GLM-4.5V, 4.6V", "glm4v_moe_text", ("model.visual.", "visual.")),
    "kimi_k25": Wrapper("Kimi K2.5, K2.6", "kimi_k2", (*_VISION, "mm_projector.", "model.mm_projector.")),
    "llama4": Wrapper(
        "Llama 4 Scout, Maverick",
        "llama4_text",
        ("vision_model.", "model.vision_model.", *_PROJECTOR),
    ),
    "mistral3": Wrapper(
        "Mistral Small 3.1, 3.2 and 4",
        "mistral",
        (*_VISION, *_PROJECTOR),
    ),
}


def wrapped_text_config(config: Config) -> Config:
    """Return the text model's configuration, with the keys that the file states for the whole model.

    Raises ConfigError.
    """
    name = config["model_type"]
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise ConfigError(f"config.json of a {name} model has no text_config; download the checkpoint again")
    around = {key: config[key] for key in _OF_THE_WHOLE if key in config}
    return {"model_type": WRAPPERS[name].text_family, **around, **text, WRAPPED_BY: name}


def around_text(config: Config) -> tuple[str, ...]:
    """Return the prefixes of the tensors that belong to the multimodal model around the text model, if there is one."""
    name = config.get(WRAPPED_BY)
    return () if name is None else WRAPPERS[name].ignored_prefixes
