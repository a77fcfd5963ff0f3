"""State of one answer in its grammar. Uses tokens and bits, no tensors."""

from __future__ import annotations

from collections.abc import Sequence

from llguidance import LLMatcher

ASTRAY = "the output violated its grammar; send the request again"
_NOT_ALLOWED = "doesn't satisfy the grammar"  # the library's message for a refused token; else it reached a limit
TOO_COSTLY = "the requested grammar is too complex; simplify it"


class GrammarState:
    """Grammar state of one request.

    After preemption or a move to another engine, a new state takes the answer's tokens again. One thread at a time.
    """

    __slots__ = ("_matcher", "num_taken", "problem")

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self.num_taken = 0  # tokens of the answer
        self.problem = ""  # why it cannot continue, for the client

    def take(self, token_ids: Sequence[int]) -> None:
        """Take the next tokens of the answer."""
        self.num_taken += len(token_ids)
        if self.problem or self._matcher.is_stopped():
            return  # the answer ends or has ended; tokens sampled after that are dropped
        if token_ids and not self._matcher.consume_tokens(list(token_ids)):
            self.problem = ASTRAY if _NOT_ALLOWED in self._matcher.get_error() else TOO_COSTLY

    def write(self, address: int, num_bytes: int) -> None:
        """Write the mask of the next token, one bit per token, into memory at `address`."""
        if self.problem:
            return
        self._matcher.unsafe_compute_mask_ptr(address, num_bytes)
        if self._matcher.is_error():
            self.problem = TOO_COSTLY
