"""Cost of the vision encoder in the scheduler's unit, a prompt's token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moiety_engine.images.prompt_images import PromptImages


@dataclass(frozen=True, slots=True)
class EncoderCost:
    """Prompt tokens that take the decoder as long as encoding an image of n tokens: n · linear + n² · quadratic."""

    linear: float = 0.0
    quadratic: float = 0.0

    def tokens(self, num_image_tokens: int) -> int:
        """Return the cost of one image."""
        return math.ceil(num_image_tokens * self.linear + num_image_tokens**2 * self.quadratic)

    def tokens_from(self, images: PromptImages | None, place: int) -> int:
        """Return the cost of a prompt's images that have tokens at `place` or later."""
        if images is None:
            return 0
        return sum(self.tokens(image.num_tokens) for image in images.images if image.end > place)


NO_ENCODER = EncoderCost()
