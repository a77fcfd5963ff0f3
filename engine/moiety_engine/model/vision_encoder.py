"""Vision encoder of Qwen3-VL: from an image's pixels to embeddings of the decoder.

One image is computed at a time, so its result does not depend on other images.

P patches of an image, I tokens of an image (P / merge_size²), C values of a patch, D encoder width, H heads,
d head width, F outputs: the embedding, and one for each deepstack layer.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from moiety_kernels.linear import linear

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_engine.model.arithmetic import Arithmetic
    from moiety_engine.model.norm_weights import NormWeights
    from moiety_engine.model.vision_spec import VisionSpec
    from moiety_engine.model.vision_weights import (
        LinearWeights,
        PatchMergerWeights,
        VisionLayerWeights,
        VisionWeights,
    )


class VisionEncoder:
    """Vision encoder with its weights."""

    def __init__(self, spec: VisionSpec, weights: VisionWeights, arithmetic: Arithmetic, dtype: torch.dtype) -> None:
        """Create the encoder. `dtype`: type of its activations and of its results."""
        self.spec, self._weights, self._dtype = spec, weights, dtype
        self._linear = partial(linear, invariant=arithmetic.invariant)

    def workspace_bytes(self, num_pixels: int) -> int:
        """Return the memory that encoding an image of `num_pixels` takes at its peak, about, in bytes."""
        spec, num_patches = self.spec, -(-num_pixels // self.spec.patch_size**2)
        values = spec.patch_width + 8 * spec.hidden_size + 2 * spec.ffn_width
        return num_patches * values * torch.float32.itemsize

    @torch.inference_mode()
    def encode(self, patches_PC: Tensor, grid: tuple[int, int]) -> Tensor:
        """Return features_FID of an image: the embedding of each of its tokens, then its deepstack features.

        `patches_PC`: normalized pixels, float32, on the encoder's device, in the order of `patches_of`. `grid`: rows
        and columns of patches.
        """
        spec, weights = self.spec, self._weights
        row_P, column_P = _coordinates(grid, spec.merge_size, patches_PC.device)
        x_PD = self._project(patches_PC.to(self._dtype), weights.patch)
        x_PD = x_PD + self._positions(row_P, column_P, grid)
        tables = self._rotary(row_P, column_P)
        outputs: dict[int, Tensor] = {}
        for index, layer in enumerate(weights.layers):
            x_PD = self._layer(x_PD, layer, tables)
            if index in spec.deepstack_layers:
                number = spec.deepstack_layers.index(index)
                outputs[number] = self._merge(x_PD, weights.deepstack[number], norm_after=True)
        embedding_ID = self._merge(x_PD, weights.merger, norm_after=False)
        return torch.stack([embedding_ID, *(outputs[number] for number in range(len(spec.deepstack_layers)))])

    def _project(self, x_PI: Tensor, weights: LinearWeights) -> Tensor:
        return self._linear(x_PI, weights.weight_OI, weights.bias_O)

    def _norm(self, x_PD: Tensor, weights: NormWeights) -> Tensor:
        normed = functional.layer_norm(
            x_PD.float(), (x_PD.shape[-1],), weights.weight_D, weights.bias_D, self.spec.norm_eps
        )
        return normed.to(x_PD.dtype)

    def _positions(self, row_P: Tensor, column_P: Tensor, grid: tuple[int, int]) -> Tensor:
        """Return the learned positions [P, D], interpolated between their square's corners and the image's corners."""
        side = self.spec.num_side_positions
        taps: list[tuple[Tensor, Tensor, Tensor]] = []
        for index_P, count in zip((row_P, column_P), grid, strict=True):
            at_P = index_P.float() * ((side - 1) / max(count - 1, 1))
            low_P = at_P.floor().long().clamp(0, side - 1)
            taps.append((low_P, (low_P + 1).clamp(max=side - 1), at_P - low_P))
        (top_P, bottom_P, down_P), (left_P, right_P, across_P) = taps
        total_PD = torch.zeros(len(row_P), self.spec.hidden_size, device=row_P.device)
        for rows_P, row_weight_P in ((top_P, 1 - down_P), (bottom_P, down_P)):
            for columns_P, column_weight_P in ((left_P, 1 - across_P), (right_P, across_P)):
                learned_PD = self._weights.positions_QD[rows_P * side + columns_P].float()
                total_PD += learned_PD * (row_weight_P * column_weight_P)[:, None]
        return total_PD.to(self._dtype)

    def _rotary(self, row_P: Tensor, column_P: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [P, 1, d]: a quarter of each head turns by the row, the next one by the column."""
        half = self.spec.head_dim // 2
        exponents = torch.arange(0, half, 2, dtype=torch.float32, device=row_P.device) / half
        frequencies = 1.0 / (self.spec.rope_theta**exponents)
        angles = torch.cat((row_P[:, None].float() * frequencies, column_P[:, None].float() * frequencies), dim=1)
        angles_P1d = torch.cat((angles, angles), dim=1).unsqueeze(1)
        return angles_P1d.cos(), angles_P1d.sin()

    def _layer(self, x_PD: Tensor, weights: VisionLayerWeights, tables: tuple[Tensor, Tensor]) -> Tensor:
        x_PD = x_PD + self._attend(self._norm(x_PD, weights.attention_norm), weights, tables)
        up = functional.gelu(self._project(self._norm(x_PD, weights.ffn_norm), weights.up), approximate="tanh")
        return x_PD + self._project(up, weights.down)

    def _attend(self, x_PD: Tensor, weights: VisionLayerWeights, tables: tuple[Tensor, Tensor]) -> Tensor:
        """Return the attention of all patches to all patches of the image."""
        qkv = self._project(x_PD, weights.qkv).view(len(x_PD), 3, self.spec.num_heads, self.spec.head_dim)
        q_PHd, k_PHd, v_PHd = qkv.unbind(1)
        turned = [_rotate(part_PHd, *tables).transpose(0, 1)[None] for part_PHd in (q_PHd, k_PHd)]
        out = functional.scaled_dot_product_attention(turned[0], turned[1], v_PHd.transpose(0, 1)[None])
        return self._project(out[0].transpose(0, 1).reshape(x_PD.shape), weights.output)

    def _merge(self, x_PD: Tensor, weights: PatchMergerWeights, *, norm_after: bool) -> Tensor:
        """Return the embeddings of groups of patches, which are consecutive; the norm may be that of the group."""
        width = self.spec.merged_width
        if norm_after:
            merged = self._norm(x_PD.reshape(-1, width), weights.norm)
        else:
            merged = self._norm(x_PD, weights.norm).reshape(-1, width)
        return self._project(functional.gelu(self._project(merged, weights.up)), weights.down)


def patches_of(pixels_HWC: Tensor, spec: VisionSpec) -> tuple[Tensor, tuple[int, int]]:
    """Return patches_PC of an image's pixels, uint8 RGB, and the grid of patches; the sides are multiples of a group.

    Groups of patches that are merged are consecutive. The values of a patch are ordered by channel, frame, row, column,
    and all frames are equal.
    """
    height, width, channels = pixels_HWC.shape
    size, merge = spec.patch_size, spec.merge_size
    device = pixels_HWC.device
    scaled_HWC = pixels_HWC.float() * (1 / 255)
    mean_C, deviation_C = (torch.tensor(one, device=device) for one in (spec.mean, spec.deviation))
    normal_HWC = (scaled_HWC - mean_C) / deviation_C
    rows, columns = height // size, width // size
    parts = normal_HWC.view(rows // merge, merge, size, columns // merge, merge, size, channels)
    ordered = parts.permute(0, 3, 1, 4, 6, 2, 5).unsqueeze(5)
    framed = ordered.expand(-1, -1, -1, -1, -1, spec.temporal_patch_size, -1, -1)
    return framed.reshape(rows * columns, spec.patch_width), (rows, columns)


def _coordinates(grid: tuple[int, int], merge: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the row and the column of each patch, group by group of merged patches."""
    rows, columns = grid
    index_RC = torch.arange(rows * columns, device=device).view(rows // merge, merge, columns // merge, merge)
    index_P = index_RC.transpose(1, 2).reshape(-1)
    return index_P // columns, index_P % columns


def _rotate(x_PHd: Tensor, cos_P1d: Tensor, sin_P1d: Tensor) -> Tensor:
    wide = x_PHd.float()
    first, second = wide.chunk(2, dim=-1)
    return (wide * cos_P1d + torch.cat((-second, first), dim=-1) * sin_P1d).to(x_PHd.dtype)
