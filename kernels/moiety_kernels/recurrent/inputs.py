"""Inputs of the operations of recurrent layers: the sequences of a batch, and the heads of linear attention.

T tokens, H key heads of width K, M value heads of width V, N slots, S sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from moiety_kernels.checks import require, require_shape

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


@dataclass(frozen=True, slots=True)
class RecurrentSequences:
    """Sequences of consecutive tokens, each with a state in a slot; together they have all tokens of the batch.

    Sequence s has the tokens query_start[s] ≤ t < query_start[s + 1]. An operation reads its state from row slot[s] of
    the states and replaces it there by the state after its last token. Where `has_state` is 0 the state begins as
    zeros, whatever the row contains. No two sequences have one slot. Creating the record checks it, once for all layers
    of a step: it raises KernelInputError unless the shapes and the type of the slots are as described.
    """

    slot_S: Tensor  # int64
    has_state_S: Tensor  # int32
    query_start_S1: Tensor  # int32
    max_query: int  # no sequence has more tokens
    num_decode: int = 0  # sequences 0 … num_decode - 1 have exactly one token

    def __post_init__(self) -> None:
        num_sequences = self.slot_S.shape[0]
        require_shape("query_start", self.query_start_S1, (num_sequences + 1,))
        require_shape("has_state", self.has_state_S, (num_sequences,))
        require(self.slot_S.dtype is torch.int64, "slot must be int64")

    def spans(self) -> Iterator[tuple[int, int, int, bool]]:
        """Yield (first token, end, slot, whether it has a state) of each sequence with tokens; reads device memory."""
        spans = pairwise(self.query_start_S1.tolist())
        for (begin, end), slot, has_state in zip(spans, self.slot_S.tolist(), self.has_state_S.tolist(), strict=True):
            if begin < end:
                yield begin, end, slot, bool(has_state)


@dataclass(frozen=True, slots=True)
class RecurrentHeads:
    """Queries, keys and values of linear attention. Value heads m of one group read key head m · H / M."""

    q_THK: Tensor
    k_THK: Tensor
    v_TMV: Tensor

    def check(self, state_NMKV: Tensor) -> None:
        """Raise KernelInputError unless the shapes go together, and with those of the states."""
        tokens, heads, width = self.k_THK.shape
        value_heads, value_width = self.v_TMV.shape[1:]
        require_shape("q", self.q_THK, (tokens, heads, width))
        require_shape("v", self.v_TMV, (tokens, -1, -1))
        require(value_heads % heads == 0, "the value heads must be a multiple of the key heads")
        require_shape("state", state_NMKV, (-1, value_heads, width, value_width))

    @property
    def sharing(self) -> int:
        """Value heads that read one key head, M / H."""
        return self.v_TMV.shape[1] // self.k_THK.shape[1]

    @property
    def has_contiguous_tokens(self) -> bool:
        """True if each token's heads are contiguous; tokens can be apart, as in a row of queries, keys and values."""
        return all(one.stride()[1:] == (one.shape[2], 1) for one in (self.q_THK, self.k_THK, self.v_TMV))
