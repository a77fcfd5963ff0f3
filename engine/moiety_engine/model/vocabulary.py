"""Token embedding and output head, which may be sharded over ranks (vocabulary parallel).

T tokens, D model width, L rows whose logits are wanted, V vocabulary, C vocabulary rows on each rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from moiety_kernels.embedding import embedding
from moiety_kernels.linear import linear

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_engine.distribution.collectives import RankCollectives
    from moiety_engine.model.arithmetic import Arithmetic
    from moiety_engine.model.weights import ModelWeights


class Vocabulary:
    """Embedding and output head of a model. All ranks have the same number of rows; the last rows may be padding."""

    def __init__(self, size: int, weights: ModelWeights, group: RankCollectives, arithmetic: Arithmetic) -> None:
        self._size, self._group, self._invariant = size, group, arithmetic.invariant
        # not `weights`: a rank frees its experts when they move to other ranks
        self._embedding_VD = weights.embedding_VD
        self._head_VD, self._head_bias_V = weights.head_VD, weights.head_bias_V

    def embed(self, token_ids_T: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the embedding of each token, [T, D]."""
        rows_CD = self._embedding_VD
        if self._group.size == 1:
            return embedding(token_ids_T, rows_CD, dtype)
        local_T = token_ids_T - self._group.rank * rows_CD.shape[0]
        here_T = (local_T >= 0) & (local_T < rows_CD.shape[0])
        x_TD = functional.embedding(torch.where(here_T, local_T, 0), rows_CD).to(dtype)
        return self._group.sum(torch.where(here_T.unsqueeze(1), x_TD, 0))

    def look_up(self, token_ids_T: Tensor, dtype: torch.dtype, factor: float) -> Tensor:
        """Return the embeddings times `factor`, for a single rank."""
        return embedding(token_ids_T, self._embedding_VD, dtype, factor)

    def logits(self, hidden_LD: Tensor) -> Tensor:
        """Return the logits, [L, V], float32, on the first rank; on other ranks their own columns."""
        own_LC = linear(hidden_LD, self._head_VD, self._head_bias_V, invariant=self._invariant)
        if own_LC.dtype is not torch.float32:
            own_LC = own_LC.float()
        whole_LC = self._group.gather_columns(own_LC)
        return whole_LC if whole_LC.shape[1] == self._size else whole_LC[:, : self._size].contiguous()
