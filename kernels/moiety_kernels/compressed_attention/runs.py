"""Arguments of compressed attention: the tokens of a step by sequence, and the entries of their queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from moiety_kernels.checks import require, require_shape

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenRuns:
    """Tokens of a step in runs of consecutive tokens of one sequence, with the slot of the sequence's history."""

    run_T: Tensor  # int32, run of each token
    position_T: Tensor  # int64
    run_start_R1: Tensor  # int32; run r has the tokens run_start[r] … run_start[r + 1] - 1
    slot_R: Tensor  # int64

    def check(self, tokens: int) -> None:
        """Raise KernelInputError unless the tensors fit together and have this number of tokens."""
        require_shape("run", self.run_T, (tokens,))
        require_shape("position", self.position_T, (tokens,))
        require_shape("run_start", self.run_start_R1, (self.slot_R.shape[0] + 1,))
        require(self.run_T.dtype is self.run_start_R1.dtype is torch.int32, "runs must be int32")
        require(self.position_T.dtype is self.slot_R.dtype is torch.int64, "positions and slots must be int64")


@dataclass(frozen=True, slots=True)
class Entries:
    """Compressed entries of each query: the first `count` of its slots in the pool. A slot is block · E + offset."""

    pool_NEd: Tensor
    slot_TK: Tensor  # int32
    count_T: Tensor  # int32

    def check(self, tokens: int, width: int) -> None:
        """Raise KernelInputError unless the tensors fit together, for this number of tokens and this width."""
        require_shape("pool", self.pool_NEd, (-1, -1, width))
        require_shape("slot", self.slot_TK, (tokens, -1))
        require_shape("count", self.count_T, (tokens,))
        require(self.slot_TK.dtype is self.count_T.dtype is torch.int32, "slots and counts must be int32")
