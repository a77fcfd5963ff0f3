"""Places of a prompt's images among its tokens, and the rotary positions that follow from them (M-RoPE).

An image of `rows` × `columns` tokens stands at consecutive places of the prompt, in the order of reading. Its tokens
have the temporal position of the first one, and vertical and horizontal positions that count from it. The token after
the image continues at the position after the largest of them, so positions after an image are smaller than places.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True, slots=True)
class PromptImage:
    """One image of a prompt. `key` names its content and its tenant; `pixels` are its RGB values, row by row."""

    key: bytes
    start: int  # place of its first token
    rows: int  # of tokens
    columns: int
    height: int  # in pixels, of `pixels`
    width: int
    pixels: bytes

    @property
    def num_tokens(self) -> int:
        return self.rows * self.columns

    @property
    def end(self) -> int:
        """Place after its last token."""
        return self.start + self.num_tokens


class ImagePart(NamedTuple):
    """Consecutive tokens of one image that a step computes: `count` tokens from its token `first` on."""

    image: PromptImage
    first: int
    count: int


class PromptImages:
    """All images of a prompt, in the order of their places."""

    __slots__ = ("_shifts", "_starts", "images")

    def __init__(self, images: tuple[PromptImage, ...]) -> None:
        """Create the record. `images` are ordered by place and do not overlap."""
        self.images = images
        self._starts = [image.start for image in images]
        self._shifts = [0]  # position minus place of the tokens before the first image, between two, and after the last
        for image in images:
            self._shifts.append(self._shifts[-1] + max(image.rows, image.columns) - image.num_tokens)

    def position(self, place: int) -> int:
        """Return the rotary position of the token at a place, which is not an image's token."""
        return place + self._shifts[bisect_right(self._starts, place)]

    def parts(self, first: int, end: int) -> list[ImagePart]:
        """Return what the places from `first` to `end` - 1 have of each image."""
        found = []
        for image in self.images[max(0, bisect_right(self._starts, first) - 1) : bisect_right(self._starts, end - 1)]:
            begin, stop = max(first, image.start), min(end, image.end)
            if begin < stop:
                found.append(ImagePart(image, begin - image.start, stop - begin))
        return found

    def positions(self, first: int, end: int) -> np.ndarray:
        """Return the temporal, vertical and horizontal positions of the places `first` … `end` - 1: [3, end - first].

        All three are equal for a token that is not an image's.
        """
        places = np.arange(first, end, dtype=np.int64)
        numbers = np.searchsorted(self._starts, places, side="right")
        positions_3T = np.repeat((places + np.array(self._shifts, dtype=np.int64)[numbers])[None], 3, axis=0)
        for image, begin, count in self.parts(first, end):
            at = image.start + begin - first
            base = image.start + self._shifts[bisect_right(self._starts, image.start) - 1]
            row, column = np.divmod(np.arange(begin, begin + count), image.columns)
            positions_3T[:, at : at + count] = base + np.stack((np.zeros_like(row), row, column))
        return positions_3T
