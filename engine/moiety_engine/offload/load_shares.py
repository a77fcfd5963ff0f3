"""Shares of a step's tokens in the bytes of offloaded experts that it loads.

T tokens of a step, K experts of a token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


class LoadShares:
    """Owner of the bytes loaded in a step, by token. Used by the step's thread only.

    The bytes of a load are divided among the tokens that chose the expert, or for a prefetch were predicted to, in
    whole bytes; the first of them gets the rest.
    """

    def __init__(self) -> None:
        self._bytes_T: NDArray[np.int64] | None = None  # None: nothing was loaded in this step

    def add(self, chosen_TK: NDArray[np.int32], expert: int, num_bytes: int) -> None:
        """Divide the bytes of a load; negative bytes take back the shares of a load that was cancelled.

        All layers of a step have the same tokens: with another number of tokens, a new step begins.
        """
        tokens = np.flatnonzero((chosen_TK == expert).reshape(len(chosen_TK), -1).any(axis=1))
        if not len(tokens):
            return
        if self._bytes_T is None or len(self._bytes_T) != len(chosen_TK):
            self._bytes_T = np.zeros(len(chosen_TK), dtype=np.int64)
        share = abs(num_bytes) // len(tokens)
        sign = 1 if num_bytes > 0 else -1
        self._bytes_T[tokens] += sign * share
        self._bytes_T[tokens[0]] += sign * (abs(num_bytes) - share * len(tokens))

    def take(self) -> NDArray[np.int64] | None:
        """Return the bytes by token since the last call, [T]; None if nothing was loaded."""
        taken, self._bytes_T = self._bytes_T, None
        return taken
