"""Views of one layer's part of the paged KV cache.

N blocks, P slots per block, G key-value heads, d head width, L width of a latent row, I width of an index key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Views of one layer's part of the KV cache.

    A slot that no token was stored to may hold any value, including NaN. An int8 cache has a float32 scale for each key
    and each value.
    """

    k_NGPd: Tensor
    v_NGPd: Tensor
    k_scale_NGP: Tensor | None = None
    v_scale_NGP: Tensor | None = None

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """All tensors, the first dimension of each being the block."""
        every = self.k_NGPd, self.v_NGPd, self.k_scale_NGP, self.v_scale_NGP
        return tuple(part for part in every if part is not None)

    def without_heads(self) -> LayerCache:
        """Return views without key-value heads, to which nothing is written."""
        k_scale_NGP, v_scale_NGP = (None if one is None else one[:, :0] for one in (self.k_scale_NGP, self.v_scale_NGP))
        return LayerCache(self.k_NGPd[:, :0], self.v_NGPd[:, :0], k_scale_NGP, v_scale_NGP)

    def of_heads(self, first: int, end: int) -> LayerCache:
        """Return views of the key-value heads `first` to `end` - 1."""
        heads = slice(first, end)
        k_scale_NGP, v_scale_NGP = (
            None if one is None else one[:, heads] for one in (self.k_scale_NGP, self.v_scale_NGP)
        )
        return LayerCache(self.k_NGPd[:, heads], self.v_NGPd[:, heads], k_scale_NGP, v_scale_NGP)


@dataclass(frozen=True, slots=True)
class LatentCache:
    """Views of a latent attention layer's part of the KV cache: one row per position.

    The latent part, `latent_width` values, comes first in a row. An int8 cache has a scale for each of the two parts. A
    layer with an indexer has an index key beside each row, in 16 bits or more. Otherwise like LayerCache.
    """

    rows_NPL: Tensor
    latent_width: int
    latent_scale_NP: Tensor | None = None
    rotated_scale_NP: Tensor | None = None
    index_keys_NPI: Tensor | None = None

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """All tensors, the first dimension of each being the block; the index keys come after the rows."""
        every = self.rows_NPL, self.index_keys_NPI, self.latent_scale_NP, self.rotated_scale_NP
        return tuple(part for part in every if part is not None)
