"""Settings of a checkpoint's image processor, and the rules for images that follow from them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from moiety_engine.model.errors import ConfigError
from moiety_wire.images import ImageRules
from moiety_wire.shared_fields import copy_fields

if TYPE_CHECKING:
    from pathlib import Path

    from moiety_engine.config import ImageOptions
    from moiety_engine.model.spec import ModelSpec
    from moiety_engine.model.vision_spec import VisionSpec

MIN_PIXELS, MAX_PIXELS = 256 * 256, 4096 * 4096  # as Qwen3-VL's processor has them
MAX_TOTAL_BYTES = 48 << 20  # of a prompt's files: the wire's messages have at most 64 MiB


def with_image_settings(spec: ModelSpec, folder: Path) -> ModelSpec:
    """Return the spec with the mean and the deviation that the checkpoint's image processor subtracts and divides by.

    Raises ConfigError if its patches have another size than the encoder's.
    """
    vision = spec.vision
    if vision is None:
        return spec
    settings = _read(folder)
    for key, size in (("patch_size", vision.patch_size), ("merge_size", vision.merge_size)):
        if settings.get(key, size) != size:
            raise ConfigError(
                f"preprocessor_config.json has {key} {settings[key]}, but config.json has {size}; the files belong to "
                "different models"
            )
    mean, deviation = (
        tuple(map(float, settings.get(key) or default))
        for key, default in (("image_mean", vision.mean), ("image_std", vision.deviation))
    )
    if len(mean) != vision.num_channels or len(deviation) != vision.num_channels or not all(deviation):
        raise ConfigError(f"image_mean and image_std of preprocessor_config.json need {vision.num_channels} numbers")
    return replace(spec, vision=replace(vision, mean=mean, deviation=deviation))


def image_rules(vision: VisionSpec, folder: Path, options: ImageOptions) -> ImageRules:
    """Return the rules for the model card. Raises ConfigError."""
    settings = _read(folder)
    size = settings.get("size") or {}
    most = settings.get("max_pixels") or size.get("longest_edge") or MAX_PIXELS
    least = settings.get("min_pixels") or size.get("shortest_edge") or MIN_PIXELS
    square = (vision.patch_size * vision.merge_size) ** 2
    max_pixels = max(square, min(int(most), options.max_pixels))
    return copy_fields(
        vision,
        ImageRules,
        start_token_id=vision.vision_start_token_id,
        end_token_id=vision.vision_end_token_id,
        min_pixels=min(int(least), max_pixels),
        max_pixels=max_pixels,
        max_images=options.max_images,
        max_bytes=min(options.max_bytes, MAX_TOTAL_BYTES),
        max_total_bytes=MAX_TOTAL_BYTES,
        max_source_pixels=options.max_source_pixels,
    )


def _read(folder: Path) -> dict[str, Any]:
    """Return the image processor's settings; empty if the checkpoint has none."""
    path = folder / "preprocessor_config.json"
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{path} cannot be read as JSON: {exc}") from exc
    if not isinstance(settings, dict):
        raise ConfigError(f"{path} must hold one JSON object")
    return settings
