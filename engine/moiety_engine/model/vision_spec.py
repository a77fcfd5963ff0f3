"""Specification of a vision encoder."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class VisionSpec:
    """Vision encoder: a transformer over an image's patches, whose groups of patches become tokens of the decoder.

    An image of `temporal_patch_size` equal frames is cut into patches of `patch_size` pixels; the outputs of
    `merge_size` × `merge_size` patches are merged into one embedding. `num_side_positions`: side of the square of
    learned positions, which are interpolated to the image's grid. `deepstack_layers`: encoder layers whose output is
    merged too, and added to the output of the first decoder layers (Meng et al. 2024). `image_token_id`: token that
    holds the place of an embedding in a prompt.
    """

    num_layers: int
    hidden_size: int
    ffn_width: int
    num_heads: int
    num_channels: int
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    num_side_positions: int
    rope_theta: float
    deepstack_layers: tuple[int, ...]
    image_token_id: int
    vision_start_token_id: int
    vision_end_token_id: int
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)  # of a channel, subtracted from pixels in 0 … 1
    deviation: tuple[float, ...] = (0.5, 0.5, 0.5)
    norm_eps: float = 1e-6

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden_size // self.num_heads

    @property
    def patch_width(self) -> int:
        """Number of values of one patch."""
        return self.num_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def merged_width(self) -> int:
        """Width of the patches that are merged into one token."""
        return self.hidden_size * self.merge_size**2
