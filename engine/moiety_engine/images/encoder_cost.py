"""Work of the vision encoder in the scheduler's unit, a prompt's token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from moiety_engine.images.prompt_images import PromptImages


@dataclass(frozen=True, slots=True)
class EncoderCost:
    """Prompt tokens that take the decoder as long as encoding an image of n tokens: n · linear + n² · quadratic."""

    linear: float = 0.0
    quadratic: float = 0.0

    def tokens(self, num_image_tokens: int) -> int:
        """Return the cost of one image."""
        return math.ceil(num_image_tokens * self.linear + num_image_tokens**2 * self.quadratic)


class ImageEncoding(NamedTuple):
    """Encoding of one image that a chunk of a prompt needs."""

    key: bytes
    num_before: int  # tokens of the chunk before its first token of the image
    num_through: int  # tokens of the chunk up to the image's last token, which may come after the chunk
    cost: int


class EncoderWork:
    """Work that prompts with images leave to the encoder: images whose features are kept need none.

    `is_encoded` returns whether the features with a key are on the device; the owner of the device's state sets it.
    """

    def __init__(self, cost: EncoderCost) -> None:
        self._cost = cost
        self.is_encoded: Callable[[bytes], bool] = lambda key: False

    def cost_from(self, images: PromptImages | None, place: int) -> int:
        """Return the cost of a prompt's images that have tokens at `place` or later, each content once."""
        if images is None:
            return 0
        return sum(one.cost for one in self.of_chunk(images, place, images.end - place, ()))

    def of_chunk(
        self, images: PromptImages | None, first: int, num_tokens: int, encoded: Container[bytes]
    ) -> list[ImageEncoding]:
        """Return the images to encode for `num_tokens` tokens of a prompt from `first` on, in order of place.

        `encoded` are keys of images that the same step encodes already.
        """
        if images is None or num_tokens <= 0:
            return []
        found: dict[bytes, ImageEncoding] = {}
        for image, begin, _, key in images.parts(first, first + num_tokens):
            if key not in found and key not in encoded and not self.is_encoded(key):
                num_before, cost = image.start + begin - first, self._cost.tokens(image.num_tokens)
                found[key] = ImageEncoding(key, num_before, image.end - first, cost)
        return list(found.values())


NO_ENCODER = EncoderCost()
