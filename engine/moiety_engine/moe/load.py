"""Counters of the experts that the tokens of a step were routed to, by tenant, and of the bytes that its parts read.

T tokens of a step, K experts a token, L layers with experts, E experts, S slots of tenants (`moe.tenants`), P parts of
a step (its chunks), W words of 64 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moiety_engine.moe.shape import ExpertShape
from moiety_kernels.expert_count import ExpertSums, count_picks

if TYPE_CHECKING:
    import numpy as np

NUM_PARTS = 1024  # until `reserve` says how many parts a step can have


@dataclass(frozen=True, slots=True)
class Counts:
    """Counted picks, and the number of experts of a layer that a step picked at all, summed over the steps."""

    picks_SLE: Tensor  # int64; the counts of slot NO_TENANT have no meaning
    active_L: Tensor  # int64
    weighted_LE: Tensor  # int64; picks times the weights of their tokens' classes


@dataclass(frozen=True, slots=True)
class StepExperts:
    """Experts of one step by part, in host memory once a mark after the step has passed.

    `bytes_P`: bytes of experts that each part read. `bits_PLW`: the experts of its last token as bits; None if they
    are not kept. `moved_P`: bytes of offloaded experts that this rank loaded for each part; None if it loaded none.
    """

    bytes_P: np.ndarray
    bits_PLW: np.ndarray | None
    moved_P: np.ndarray | None = None


class ExpertCounter:
    """Owner of the counts since the last `take`, and of the bytes and bits of the newest step.

    The addresses of its tensors never change after `reserve`, so that replayed CUDA graphs add to them too.
    """

    def __init__(self, shape: ExpertShape, num_slots: int, device: torch.device) -> None:
        self._shape, self._device = shape, device
        num_layers = len(shape.layers)

        def zeros(*sizes: int) -> Tensor:
            return torch.zeros(sizes, dtype=torch.int64, device=device)

        self._sums = ExpertSums(
            picks_SLE=zeros(num_slots, num_layers, shape.num_experts),
            active_L=zeros(num_layers),
            weighted_LE=zeros(num_layers, shape.num_experts),
            bytes_P=zeros(NUM_PARTS),
        )
        self._note_host_arrays()

    def reserve(self, num_parts: int, *, keeps_bits: bool) -> bool:
        """Make room for steps of `num_parts` parts. Return whether tensors were replaced.

        `keeps_bits`: keep the experts of each part's last token. What was recorded or captured before holds the
        addresses of replaced tensors and must be discarded.
        """
        if len(self._sums.bytes_P) >= num_parts and (self._sums.bits_PLW is not None or not keeps_bits):
            return False
        num_layers, num_words = len(self._shape.layers), -(-self._shape.num_experts // 64)
        bytes_P = torch.zeros(num_parts, dtype=torch.int64, device=self._device)
        bits_PLW = bytes_P.new_zeros(num_parts, num_layers, num_words) if keeps_bits else None
        self._sums = self._sums._replace(bytes_P=bytes_P, bits_PLW=bits_PLW)
        self._note_host_arrays()
        return True

    def count(self, chosen: Sequence[Tensor], owner_T: Tensor) -> None:
        """Count one forward pass: expert_TK of each layer, int32, and the owner of each token, int64."""
        shape = self._shape
        count_picks(chosen, owner_T, self._sums, expert_bytes=shape.expert_bytes, num_with_weights=shape.num_placed)

    def take(self, download: Callable[[Tensor], Tensor]) -> Counts:
        """Return the counts so far, copied from the device by `download`, and reset them to zero."""
        taken = (self._sums.picks_SLE, self._sums.active_L, self._sums.weighted_LE)
        counts = Counts(*(one.clone() if one.is_cpu else download(one) for one in taken))
        for one in taken:
            one.zero_()
        return counts

    def take_step(self, num_parts: int, download: Callable[[Tensor], Tensor]) -> StepExperts:
        """Return the bytes and bits of the newest step's first `num_parts` parts, and reset the bytes to zero."""
        if self._host_P is not None:  # without torch, whose calls take long between two steps
            taken_P = self._host_P[:num_parts].copy()
            self._host_P[:num_parts] = 0
            return StepExperts(taken_P, None if self._host_PLW is None else self._host_PLW[:num_parts].copy())
        bytes_P, bits_PLW = self._sums.bytes_P, self._sums.bits_PLW
        host_P = download(bytes_P[:num_parts]).numpy()
        host_PLW = None if bits_PLW is None else download(bits_PLW[:num_parts]).numpy()
        bytes_P.zero_()
        return StepExperts(host_P, host_PLW)

    def _note_host_arrays(self) -> None:
        """Keep the arrays over the memory of a step's bytes and bits; None where a device has them."""
        bytes_P, bits_PLW = self._sums.bytes_P, self._sums.bits_PLW
        self._host_P = bytes_P.numpy() if bytes_P.is_cpu else None
        self._host_PLW = bits_PLW.numpy() if bits_PLW is not None and bits_PLW.is_cpu else None
