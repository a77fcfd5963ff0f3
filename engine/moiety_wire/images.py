"""Images of a prompt on the wire: their form, the rules in a model card, and the number of tokens of an image.

A gateway writes `num_tokens` placeholders (`ImageRules.image_token_id`) for each image into the prompt, between the
tokens that the chat template puts around them, and sends the encoded files. The number of tokens depends on the size of
the image only, so the count of a prompt's tokens is exact before it is submitted.
"""

from __future__ import annotations

import math
from hashlib import blake2b

import msgspec

MAX_ASPECT_RATIO = 200
DIGEST_BYTES = 32
_PNG, _JPEG, _GIF = b"\x89PNG\r\n\x1a\n", b"\xff\xd8", (b"GIF87a", b"GIF89a")
_JPEG_SIZES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # markers of frames, which have the size
_JPEG_BARE = frozenset({0x01, *range(0xD0, 0xD9)})  # markers without a segment
_MAX_JPEG_SEGMENTS = 4096


def image_digest(data: bytes) -> bytes:
    """Return the hash by which a gateway refers to an image file that it has sent before."""
    return blake2b(data, digest_size=DIGEST_BYTES, person=b"moiety-file").digest()


def is_image_file(head: bytes) -> bool:
    """Return whether a file begins as a PNG, JPEG, WebP or GIF file."""
    return head.startswith((_PNG, _JPEG, *_GIF)) or (head[:4] == b"RIFF" and head[8:12] == b"WEBP")


class ImageInput(msgspec.Struct, frozen=True, omit_defaults=True):
    """An image of a prompt: an encoded file, or a reference to one that the engine was sent before.

    The file is a PNG, JPEG, WebP or GIF file; of an animation, the first frame is the image.

    `start` is the index in the prompt of the first of its placeholders, which are consecutive. A reference has no
    data, but the file's digest and its size in pixels. It names an image of the request's tenant and cache salt only.
    """

    start: int
    data: bytes = b""
    digest: bytes = b""  # `image_digest` of the file; engines trust it in references only
    width: int = 0  # in pixels, as the head of the file says
    height: int = 0

    def size(self) -> tuple[int, int]:
        """Return (width, height) in pixels. Raises ValueError as `image_size` does."""
        return image_size(self.data) if self.data else (self.width, self.height)

    def reference(self) -> ImageInput:
        """Return the reference to this image. Raises ValueError as `image_size` does."""
        return ImageInput(self.start, b"", self.digest or image_digest(self.data), *image_size(self.data))


class ImageRules(msgspec.Struct, frozen=True, kw_only=True):
    """Image rules of a model card: the sizes that give the number of tokens, and the limits.

    An image is resized so that its sides are multiples of `patch_size` × `merge_size` pixels, and its number of pixels
    is between `min_pixels` and `max_pixels`; each square of that side is a token.
    """

    image_token_id: int
    start_token_id: int
    end_token_id: int
    patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    max_images: int  # in one prompt
    max_bytes: int  # of one file
    max_total_bytes: int  # of all files of a prompt
    max_source_pixels: int  # of one file, before it is resized

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """Return (width, height) of an image after it is resized, as transformers' `smart_resize` computes it.

        Raises ValueError for an image that is too narrow.
        """
        if min(width, height) < 1 or max(width, height) > MAX_ASPECT_RATIO * min(width, height):
            raise ValueError(
                f"an image of {width} × {height} pixels is too narrow: one side may be at most {MAX_ASPECT_RATIO} "
                "times the other; crop it"
            )
        side = self.patch_size * self.merge_size
        rounded = [round(length / side) * side for length in (width, height)]
        if rounded[0] * rounded[1] > self.max_pixels:
            shrink = math.sqrt(width * height / self.max_pixels)
            rounded = [max(side, math.floor(length / shrink / side) * side) for length in (width, height)]
        elif rounded[0] * rounded[1] < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (width * height))
            rounded = [math.ceil(length * grow / side) * side for length in (width, height)]
        return rounded[0], rounded[1]

    def num_tokens(self, width: int, height: int) -> int:
        """Return the number of tokens of an image of this size. Raises ValueError for one that is too narrow."""
        new_width, new_height = self.resized(width, height)
        return new_width * new_height // (self.patch_size * self.merge_size) ** 2


class ImageAllowance(msgspec.Struct, frozen=True, kw_only=True):
    """Image limits of a model card for an engine that counts their tokens itself.

    `image_tokens` are reserved for each image, until the engine has counted. The limits are those of `ImageRules`.
    """

    image_tokens: int
    max_images: int = 16
    max_bytes: int = 20 * 1024 * 1024
    max_total_bytes: int = 48 * 1024 * 1024
    max_source_pixels: int = 36_000_000


def image_size(data: bytes) -> tuple[int, int]:
    """Return (width, height) in pixels from the head of a PNG, JPEG, WebP or GIF file, without decoding it.

    Raises ValueError with what to do for another format or a head that is cut off.
    """
    try:
        if data.startswith(_PNG):
            size = _png_size(data)
        elif data.startswith(_JPEG):
            size = _jpeg_size(data)
        elif data[:4] == b"RIFF" and data[8:12] == b"WEBP":
            size = _webp_size(data)
        elif data.startswith(_GIF):
            size = _number(data, 6, 2, "little"), _number(data, 8, 2, "little")
        else:
            raise ValueError("the image is not a PNG, JPEG, WebP or GIF file; convert it to one of these formats")
    except IndexError:
        raise ValueError("the image file is cut off; send the whole file") from None
    if min(size) < 1:
        raise ValueError(f"the image file declares a size of {size[0]} × {size[1]} pixels; send a valid file")
    return size


def _number(data: bytes, at: int, num_bytes: int, order: str = "big") -> int:
    part = data[at : at + num_bytes]
    if len(part) < num_bytes:
        raise IndexError
    return int.from_bytes(part, "big" if order == "big" else "little")


def _png_size(data: bytes) -> tuple[int, int]:
    if data[12:16] != b"IHDR":
        raise ValueError("the PNG file does not begin with its size; send a valid file")
    return _number(data, 16, 4), _number(data, 20, 4)


def _jpeg_size(data: bytes) -> tuple[int, int]:
    at = 2
    for _ in range(_MAX_JPEG_SEGMENTS):
        if _number(data, at, 1) != 0xFF:
            raise ValueError("the JPEG file is damaged; send a valid file")
        marker = _number(data, at + 1, 1)
        if marker == 0xFF or marker in _JPEG_BARE:
            at += 1 if marker == 0xFF else 2
            continue
        if marker in _JPEG_SIZES:
            return _number(data, at + 7, 2), _number(data, at + 5, 2)
        if marker in (0xD9, 0xDA):
            break
        at += 2 + max(2, _number(data, at + 2, 2))
    raise ValueError("the JPEG file does not contain its size; send a valid file")


def _webp_size(data: bytes) -> tuple[int, int]:
    kind = data[12:16]
    if kind == b"VP8X":
        return _number(data, 24, 3, "little") + 1, _number(data, 27, 3, "little") + 1
    if kind == b"VP8L":
        bits = _number(data, 21, 4, "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"VP8 ":
        return _number(data, 26, 2, "little") & 0x3FFF, _number(data, 28, 2, "little") & 0x3FFF
    raise ValueError("the WebP file is damaged; send a valid file")
