"""Places of a prompt's images among its tokens, and the rotary positions that follow from them (M-RoPE).

An image of `rows` × `columns` tokens stands at consecutive places of the prompt, in the order of reading. Its tokens
have the temporal position of the first one, and vertical and horizontal positions that count from it. The token after
the image continues at the position after the largest of them, so positions after an image are smaller than places.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

import msgspec


class PromptImage(msgspec.Struct, frozen=True, array_like=True):
    """One image of a prompt, resized to whole tokens.

    `digest` is the hash of its size and its pixels. `pixels` are RGB values of a byte each, row by row.
    """

    start: int  # place of its first token
    rows: int  # of tokens
    columns: int
    height: int  # in pixels
    width: int
    digest: bytes
    pixels: bytes

    @property
    def num_tokens(self) -> int:
        return self.rows * self.columns

    @property
    def end(self) -> int:
        """Place after its last token."""
        return self.start + self.num_tokens


class ImagePart(NamedTuple):
    """Consecutive tokens of one image that a step computes: `num_tokens` tokens from its token `first` on.

    `key` names the image's content for its tenant: see `PromptImages`.
    """

    image: PromptImage
    first: int
    num_tokens: int
    key: bytes


class PromptImages:
    """All images of a prompt, in the order of their places."""

    __slots__ = ("_keys", "images", "shifts", "starts")

    def __init__(self, images: tuple[PromptImage, ...], keys: list[bytes]) -> None:
        """Create the record. `images` are ordered by place and do not overlap. `keys` name each for its tenant."""
        self.images = images
        self._keys = keys
        self.starts = [image.start for image in images]
        self.shifts = [0]  # position minus place of the tokens before the first image, between two, and after the last
        for image in images:
            self.shifts.append(self.shifts[-1] + max(image.rows, image.columns) - image.num_tokens)

    @property
    def end(self) -> int:
        """Place after the last image's last token."""
        return self.images[-1].end

    def position(self, place: int) -> int:
        """Return the rotary position of the token at a place, which is not an image's token."""
        return place + self.shifts[bisect_right(self.starts, place)]

    def parts(self, first: int, end: int) -> list[ImagePart]:
        """Return what the places from `first` to `end` - 1 have of each image."""
        found = []
        for number in range(max(0, bisect_right(self.starts, first) - 1), bisect_right(self.starts, end - 1)):
            image = self.images[number]
            begin, stop = max(first, image.start), min(end, image.end)
            if begin < stop:
                found.append(ImagePart(image, begin - image.start, stop - begin, self._keys[number]))
        return found
