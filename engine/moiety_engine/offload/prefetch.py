"""Accuracy of expert prefetching, and the decision whether it pays. Handles numbers only."""

from __future__ import annotations

PAYS = 1 / 4  # smallest useful accuracy: a prefetch delays other loads and evicts an expert that may be needed too
KEPT_A_PASS = 0.98  # decay of the counts per pass
ENOUGH = 8.0  # predicted experts needed before the accuracy counts


class PrefetchAccuracy:
    """Recent share of predicted, missing experts that the next pass requested.

    It also counts predictions that were not prefetched, so that prefetching can be enabled again.
    """

    def __init__(self) -> None:
        self._right = self._said = 0.0

    @property
    def is_worthwhile(self) -> bool:
        return self._said >= ENOUGH and self._right >= PAYS * self._said

    def record_predictions(self, right: int, said: int) -> None:
        """Add a pass: of `said` predicted experts, `right` were requested."""
        self._right = self._right * KEPT_A_PASS + right
        self._said = self._said * KEPT_A_PASS + said
