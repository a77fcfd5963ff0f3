"""Migration of experts' weights between ranks while the model serves: copies of slots, in any weight format.

B bytes of a slot over all of a layer's tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from moiety_engine.model.weight_offload import named_tensors
from moiety_engine.model.weights import MoeWeights

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from moiety_engine.distribution.layout import RankPosition
    from moiety_engine.model.weights import ModelWeights
    from moiety_placement.transition import Write


@dataclass(frozen=True, slots=True)
class SlotTransfer:
    """Part of one rank in a move. `rows_B`: spare buffers of the slots that it writes, by slot, uint8.

    `sends` and `receives` are tensors with the numbers of the other ranks. The tensors that are received are rows of
    `rows_B`; the other rows are complete.
    """

    rows_B: dict[int, Tensor]
    sends: list[tuple[int, Tensor]]
    receives: list[tuple[int, Tensor]]

    @property
    def num_bytes(self) -> int:
        """Bytes that this rank sends and receives."""
        return sum(row_B.nbytes for _, row_B in (*self.sends, *self.receives))


NO_TRANSFER = SlotTransfer({}, [], [])


class SlotWeights:
    """Weights of a layer's slots on this rank, with the adapters' factors of these experts."""

    def __init__(
        self, weights: MoeWeights, num_held: int, rank_position: RankPosition, adapters: Sequence[Tensor] = ()
    ) -> None:
        """Create the view. `adapters`: the experts' factors of adapters, with one expert per row."""
        held = weights.gate_up_E2FD, weights.down_EDF, weights.gate_up_bias_E2F, weights.down_bias_ED
        tensors = [tensor for _, tensor in named_tensors(tuple(one for one in held if one is not None))]
        self._tensors = sorted((*tensors, *adapters), key=lambda one: -one.itemsize)  # each part of a row is aligned
        self._num_held, self._rank_position = num_held, rank_position

    @torch.inference_mode()
    def prepare(self, writes: Sequence[Write]) -> SlotTransfer:
        """Copy the source slots of this rank, and allocate a buffer for each slot of this rank that is written.

        The slots themselves stay as they are, so steps may run at the same time. The sources must not be written until
        this returns. Raises RuntimeError where memory is missing.
        """
        own = self._rank_position.ep_rank
        transfer = SlotTransfer({}, [], [])
        for write in writes:
            (source, place), (target, _) = divmod(write.source, self._num_held), divmod(write.slot, self._num_held)
            if source == own:
                row_B = self._read(place)
                if target == own:
                    transfer.rows_B[write.slot] = row_B
                else:
                    transfer.sends.append((self._rank_position.peer(target), row_B))
            elif target == own:
                transfer.rows_B[write.slot] = self._empty()
                transfer.receives.append((self._rank_position.peer(source), transfer.rows_B[write.slot]))
        return transfer

    @torch.inference_mode()
    def fill(self, rows_B: Mapping[int, Tensor]) -> None:
        """Copy the buffers of a complete transfer into the slots. Call it between steps."""
        for slot, row_B in rows_B.items():
            if row_B.is_cuda:
                row_B.record_stream(torch.cuda.current_stream(row_B.device))
            place = slot % self._num_held
            parts = torch.split(row_B, [tensor[place].nbytes for tensor in self._tensors])
            for tensor, part in zip(self._tensors, parts, strict=True):
                tensor[place].copy_(part.view(tensor.dtype).view(tensor[place].shape))

    def _read(self, place: int) -> Tensor:
        parts = [tensor[place].contiguous().view(torch.uint8).flatten() for tensor in self._tensors]
        if parts[0].is_cuda:
            return torch.cat(parts)
        return torch.from_numpy(np.concatenate([part.numpy() for part in parts]))  # one core; torch would take all

    def _empty(self) -> Tensor:
        num_bytes = sum(tensor[0].nbytes for tensor in self._tensors)
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._tensors[0].device)


def with_experts(weights: ModelWeights, experts: ModelWeights | None) -> ModelWeights:
    """Return the weights with the experts of `experts`, an expert rank's part of the model; with None, without any."""
    layers = list(weights.layers)
    for index, layer in enumerate(layers):
        if isinstance(layer.ffn, MoeWeights):
            given = None if experts is None else experts.layers[index].ffn
            layers[index] = replace(layer, ffn=_with_experts(layer.ffn, given))
    return replace(weights, layers=tuple(layers))


def _with_experts(weights: MoeWeights, experts: object) -> MoeWeights:
    if experts is None:
        none = weights.router_ED.new_empty(0)
        return replace(weights, gate_up_E2FD=none, down_EDF=none, gate_up_bias_E2F=None, down_bias_ED=None)
    assert isinstance(experts, MoeWeights), "both are the same layer"
    return replace(
        weights,
        gate_up_E2FD=experts.gate_up_E2FD,
        down_EDF=experts.down_EDF,
        gate_up_bias_E2F=experts.gate_up_bias_E2F,
        down_bias_ED=experts.down_bias_ED,
    )
