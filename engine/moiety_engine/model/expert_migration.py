"""Migration of experts' weights between ranks while the model serves: copies of slots, in any weight format.

B bytes of a slot over all of a layer's tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moiety_engine.distribution.collectives import exchange_tensors
from moiety_engine.model.weight_offload import named_tensors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from moiety_engine.distribution.layout import RankPosition
    from moiety_engine.model.weights import MoeWeights
    from moiety_placement.transition import Write


class SlotWeights:
    """Weights of a layer's slots on this rank. Used between steps only."""

    def __init__(self, weights: MoeWeights, num_held: int, adapters: Sequence[Tensor] = ()) -> None:
        """Create the view. `adapters`: the experts' factors of adapters, with one expert per row."""
        held = weights.gate_up_E2FD, weights.down_EDF, weights.gate_up_bias_E2F, weights.down_bias_ED
        tensors = [tensor for _, tensor in named_tensors(tuple(one for one in held if one is not None))]
        self._tensors = sorted((*tensors, *adapters), key=lambda one: -one.itemsize)  # each part of a row is aligned
        self._num_held = num_held

    def write(self, writes: Sequence[Write], rank_position: RankPosition) -> int:
        """Copy all source slots, on any rank, to the target slots on this rank.

        All ranks of the stage call it together. Returns the bytes that this rank has sent and received.
        """
        own = rank_position.ep_rank
        sends, receives, rows_B = [], [], {}
        for write in writes:
            (source, place), (target, _) = divmod(write.source, self._num_held), divmod(write.slot, self._num_held)
            if source == own:
                row_B = self._read(place)
                if target == own:
                    rows_B[write.slot] = row_B
                else:
                    sends.append((rank_position.peer(target), row_B))
            elif target == own:
                rows_B[write.slot] = self._empty()
                receives.append((rank_position.peer(source), rows_B[write.slot]))
        exchange_tensors(sends, receives)
        for slot, row_B in rows_B.items():
            self._fill(slot % self._num_held, row_B)
        return sum(row_B.nbytes for _, row_B in (*sends, *receives))

    def _read(self, place: int) -> Tensor:
        return torch.cat([tensor[place].contiguous().view(torch.uint8).flatten() for tensor in self._tensors])

    def _empty(self) -> Tensor:
        num_bytes = sum(tensor[0].nbytes for tensor in self._tensors)
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._tensors[0].device)

    def _fill(self, place: int, row_B: Tensor) -> None:
        parts = torch.split(row_B, [tensor[place].nbytes for tensor in self._tensors])
        for tensor, part in zip(self._tensors, parts, strict=True):
            tensor[place].copy_(part.view(tensor.dtype).view(tensor[place].shape))
