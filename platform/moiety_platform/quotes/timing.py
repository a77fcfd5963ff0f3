"""Times of an answer."""

from __future__ import annotations

import msgspec


class Timing(msgspec.Struct, frozen=True, array_like=True):
    """Times of an answer: seconds to the first token of each sequence, and between the tokens after it."""

    first_token_s: float
    token_s: float

    def finish_s(self, num_tokens: int) -> float:
        """Return the seconds to the last token of a sequence of `num_tokens` output tokens."""
        return self.first_token_s + max(0, num_tokens - 1) * self.token_s
