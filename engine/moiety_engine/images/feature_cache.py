"""Cache of what the vision encoder returned, on the device, by image and tenant, with a budget of bytes.

A step uses what it needs even beyond the budget; the least recently used images are dropped after it. An image that was
dropped before its last token is computed is encoded again, with the same result.

I tokens of an image that a step computes, F outputs of the encoder, D model width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from moiety_engine.images.encoder_timer import EncoderTimer
from moiety_engine.model.vision_encoder import patches_of
from moiety_wire.block_hashes import MARK_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from moiety_engine.images.prompt_images import PromptImage
    from moiety_engine.model.transformer import Transformer
    from moiety_engine.model.vision_encoder import VisionEncoder


class FeaturePart(NamedTuple):
    """Consecutive tokens of the image with this key: `num_tokens` tokens from its token `first` on."""

    key: bytes
    first: int
    num_tokens: int


class FeatureCache:
    """Features of images, on one rank. All ranks call its methods in the same order, and so hold the same images."""

    def __init__(self, encoder: VisionEncoder, device: torch.device, budget_bytes: int) -> None:
        self._encoder, self._device, self._budget_bytes = encoder, device, budget_bytes
        self._features: dict[bytes, Tensor] = {}  # features_FID, the least recently used first
        self._forgotten: frozenset[bytes] = frozenset()  # marks of tenants whose images are not kept after a step
        self._timer = EncoderTimer(device)
        self.num_bytes = 0
        self.encoded_total = self.encoded_tokens_total = self.hits_total = self.evictions_total = 0

    def metrics(self) -> dict[str, float]:
        """Return fields of `LoadMetrics`."""
        return {
            "image_cache_bytes_total": self._budget_bytes,
            "image_cache_bytes_used": self.num_bytes,
            "image_cache_hits_total": self.hits_total,
            "image_cache_misses_total": self.encoded_total,
            "image_cache_evictions_total": self.evictions_total,
            "encoded_image_tokens_total": self.encoded_tokens_total,
            "image_encode_seconds_total": self._timer.seconds_total(),
        }

    def lacks(self, key: bytes) -> bool:
        return key not in self._features

    def encode(self, key: bytes, image: PromptImage) -> None:
        """Encode an image and keep the result."""
        pixels = torch.frombuffer(bytearray(image.pixels), dtype=torch.uint8).view(image.height, image.width, -1)
        with self._timer.measure():
            patches_PC, grid = patches_of(pixels.to(self._device), self._encoder.spec)
            self._features[key] = features_FID = self._encoder.encode(patches_PC, grid)
        self.num_bytes += features_FID.nbytes
        self.encoded_total += 1
        self.encoded_tokens_total += image.num_tokens

    def rows(self, parts: Iterable[FeaturePart]) -> Tensor:
        """Return features_FID of the parts, one after the other. Their images must be encoded."""
        return torch.cat([self._features[key][:, first : first + count] for key, first, count in parts], dim=1)

    def end_step(self, parts: Iterable[FeaturePart]) -> None:
        """Mark the images of a step, of all its groups, as just used, and drop others beyond the budget."""
        for key in dict.fromkeys(part.key for part in parts):
            self._features[key] = self._features.pop(key)
        if self._forgotten:  # a request that was open when its tenant was deleted may go on
            self._drop_of(self._forgotten)
        while self.num_bytes > self._budget_bytes and self._features:
            self._drop(next(iter(self._features)))
            self.evictions_total += 1

    def forget(self, marks: frozenset[bytes]) -> int:
        """Drop the images of the tenants with these marks, now and after each step; return how many there are now."""
        self._forgotten |= marks
        return self._drop_of(marks)

    def _drop_of(self, marks: frozenset[bytes]) -> int:
        dropped = [key for key in self._features if key[:MARK_BYTES] in marks]
        for key in dropped:
            self._drop(key)
        return len(dropped)

    def _drop(self, key: bytes) -> None:
        self.num_bytes -= self._features.pop(key).nbytes


def features_of(model: Transformer, budget_bytes: int) -> FeatureCache | None:
    """Return a new cache for the model's encoder; None if it has none."""
    return None if model.vision is None else FeatureCache(model.vision, model.device, budget_bytes)
