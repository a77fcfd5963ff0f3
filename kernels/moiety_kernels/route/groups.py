"""Token–expert pairs grouped by expert for a grouped product, as data without an implementation.

T tokens, K experts per token, R = T · K pairs, E experts, N tiles at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Groups:
    """Grouped pairs: int32 tensors on the device of the routing, computed without a host synchronisation.

    A tile is up to `tile_rows` consecutive rows of one expert: a row is an index into order_R, an expert's tiles begin
    at its first row, and its last tile ends with starts_E1[expert + 1]. Tiles are in the order of experts, then of
    rows.
    """

    order_R: Tensor  # the pairs t · K + k sorted by expert, then token; undefined after the experts' pairs
    starts_E1: Tensor  # expert e has rows starts[e] … starts[e + 1]; the last is R less the pairs without an expert
    tiles_N2: Tensor  # (expert, first row); (-1, -1) beyond the number of tiles
    num_tiles_1: Tensor
    tile_rows: int


def most_tiles(num_pairs: int, num_experts: int, tile_rows: int) -> int:
    """Return N: the most tiles of any routing of that many pairs, at most `num_experts` more than an even one needs."""
    return num_pairs // tile_rows + min(num_experts, num_pairs)
