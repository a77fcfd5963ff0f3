"""Rows of a step that stand for parts of images, and the rotary positions of rows in prompts with images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from moiety_engine.images.feature_cache import FeaturePart

if TYPE_CHECKING:
    from moiety_engine.images.prompt_images import PromptImages
    from moiety_engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class HostImages:
    """Tokens of a step that stand for parts of images: I rows, part by part."""

    rows_I: np.ndarray  # int64
    positions_3I: np.ndarray  # int64
    parts: tuple[FeaturePart, ...]

    def among(self, first: int, end: int) -> HostImages | None:
        """Return those among the rows `first` … `end` - 1, numbered from `first` on; None if there are none."""
        is_among_I = (self.rows_I >= first) & (self.rows_I < end)
        if not is_among_I.any():
            return None
        parts, start = list[FeaturePart](), 0
        for part in self.parts:
            among = np.flatnonzero(is_among_I[start : start + part.num_tokens])  # consecutive, like the part's rows
            if len(among):
                parts.append(FeaturePart(part.key, part.first + int(among[0]), len(among)))
            start += part.num_tokens
        return HostImages(self.rows_I[is_among_I] - first, self.positions_3I[:, is_among_I], tuple(parts))


def decode_positions(sequences: list[Sequence], places: list[int]) -> list[int]:
    """Return the rotary position of each sequence's output token at its place, which is not part of an image."""
    images_of = [sequence.request.images for sequence in sequences]
    if not any(images_of):
        return places
    return [
        place if images is None else images.position(place) for images, place in zip(images_of, places, strict=True)
    ]


def image_rows(
    sequences: list[Sequence], firsts: list[int], starts: np.ndarray, places: np.ndarray
) -> tuple[np.ndarray, HostImages | None]:
    """Return the rotary position of each row of a step, and the rows of images.

    A step has runs of consecutive tokens, each of one of the sequences, from its token `first` on, in the rows from
    `start` to the next start. `places` are the rows' places in their sequences.
    """
    images_of = [sequence.request.images for sequence in sequences]
    if not any(images_of):
        return places, None
    rotary_3T = np.repeat(places[None], 3, axis=0)
    rows: list[np.ndarray] = []
    features: list[FeaturePart] = []
    for images, first, start, stop in zip(images_of, firsts, starts[:-1], starts[1:], strict=True):
        if images is None:
            continue
        end = first + int(stop - start)
        rotary_3T[:, start:stop] = rotary_positions(images, first, end)
        for image, begin, count, key in images.parts(first, end):
            row = start + image.start + begin - first
            rows.append(np.arange(row, row + count, dtype=np.int64))
            features.append(FeaturePart(key, begin, count))
    rotary_T = np.ascontiguousarray(rotary_3T[0])
    if not rows:
        return rotary_T, None
    rows_of_images = np.concatenate(rows)
    return rotary_T, HostImages(rows_of_images, np.ascontiguousarray(rotary_3T[:, rows_of_images]), tuple(features))


def rotary_positions(images: PromptImages, first: int, end: int) -> np.ndarray:
    """Return the temporal, vertical and horizontal positions of the places `first` … `end` - 1: [3, end - first].

    All three are equal for a token that does not stand for a part of an image.
    """
    places = np.arange(first, end, dtype=np.int64)
    shifts = np.array(images.shifts, dtype=np.int64)
    positions_3T = np.repeat((places + shifts[np.searchsorted(images.starts, places, side="right")])[None], 3, axis=0)
    for image, begin, num_tokens, _ in images.parts(first, end):
        at = image.start + begin - first
        base = image.start + shifts[images.starts.index(image.start)]
        row, column = np.divmod(np.arange(begin, begin + num_tokens), image.columns)
        positions_3T[:, at : at + num_tokens] = base + np.stack((np.zeros_like(row), row, column))
    return positions_3T
