"""Whether it pays to fetch experts before they are asked for. Numbers only."""

from __future__ import annotations

PAYS = 1 / 4  # a fetch takes the store's time from others, and a slot from an expert that may be asked for as well
KEPT_A_PASS = 0.98
ENOUGH = 8.0  # experts that have been foretold before it is believed


class PrefetchAccuracy:
    """How often experts that were missing and foretold were then asked for, of late. It learns of those that were not
    fetched as well, so that it can come to pay again."""

    def __init__(self) -> None:
        self._right = self._said = 0.0

    @property
    def pays(self) -> bool:
        return self._said >= ENOUGH and self._right >= PAYS * self._said

    def judged(self, right: int, said: int) -> None:
        """Of so many, so many were asked for."""
        self._right = self._right * KEPT_A_PASS + right
        self._said = self._said * KEPT_A_PASS + said
