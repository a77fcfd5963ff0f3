"""Token–expert pairs grouped by expert, as a grouped product reads them. Knows nothing of how it is computed.

T tokens, K experts a token, R = T · K pairs, E experts, N tiles at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Groups:
    """All int32, on the device of the routing, the host having waited for none of it.

    A tile is up to `tile_rows` consecutive rows of one expert: a row is a place in order_R, an expert's tiles begin at
    its first row, and its last tile ends with starts_E1[expert + 1]. Tiles are in the order of experts, then of rows.
    """

    order_R: Tensor  # the pairs t · K + k expert by expert, in token order within one; beyond those of experts anything
    starts_E1: Tensor  # expert e owns the rows starts[e] … starts[e + 1]; the last is R, less the pairs of none
    tiles_N2: Tensor  # (expert, first row); beyond the number of tiles (-1, -1)
    num_tiles_1: Tensor
    tile_rows: int


def most_tiles(num_pairs: int, num_experts: int, tile_rows: int) -> int:
    """N: no routing of so many pairs needs more tiles, and only at most `num_experts` more than an even one."""
    return num_pairs // tile_rows + min(num_experts, num_pairs)
