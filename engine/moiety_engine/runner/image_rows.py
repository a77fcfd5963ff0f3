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


def computes_image(sequence: Sequence) -> bool:
    """Return whether the next token to compute stands for a part of an image."""
    images, place = sequence.request.images, sequence.kv.num_computed
    return images is not None and bool(images.parts(place, place + 1))


def rotary_position(sequence: Sequence, place: int) -> int:
    """Return the rotary position of the token at a place, which does not stand for a part of an image."""
    images = sequence.request.images
    return place if images is None else images.position(place)


def image_rows(
    sequences: list[Sequence], firsts: list[int], starts: np.ndarray, places: np.ndarray
) -> tuple[np.ndarray, HostImages | None]:
    """Return the rotary position of each row of a step, and the rows of images.

    A step has runs of consecutive tokens, each of one of the sequences, from its token `first` on, in the rows from
    `start` to the next start. `places` are the rows' places in their sequences.
    """
    if all(sequence.request.images is None for sequence in sequences):
        return places, None
    rotary_3T = np.repeat(places[None], 3, axis=0)
    rows: list[np.ndarray] = []
    features: list[FeaturePart] = []
    for sequence, first, start, stop in zip(sequences, firsts, starts[:-1], starts[1:], strict=True):
        images = sequence.request.images
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
