"""State of one answer in its grammar. Uses tokens and bits, no tensors.

The lexer of the grammar library creates a state for each place of a counted repetition that an answer or a mask
reaches, and its number of states is limited. Masks reach many more places than the answer itself. When the limit is
reached, the answer continues in a larger lexer that has read only the answer's own tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from llguidance import LLMatcher

ASTRAY = "the output violated its grammar; send the request again"
_NOT_ALLOWED = "doesn't satisfy the grammar"  # the library's message for a refused token; else it reached a limit
LEXER_LIMIT = "lexer error: "  # beginning of the message for a limit of the lexer
TOO_COSTLY = "the requested grammar is too complex; simplify it"
TOKENS_AT_ONCE = 256  # of an answer that is read again: as many count as one operation, and share the lexer's fuel
MIN_TOKENS_BETWEEN = 64  # of an answer, between two times that it is read again for the same size


Enlarge = Callable[[int], LLMatcher | None]


def _none_larger(_: int) -> None:
    return None


def _begin_nothing() -> None:
    return None


class GrammarState:
    """Grammar state of one request.

    After preemption or a move to another engine, a new state takes the answer's tokens again. One thread at a time.
    """

    __slots__ = (
        "_begin_operation",
        "_enlarge",
        "_matcher",
        "_num_read",
        "_path",
        "_size",
        "_token_ids",
        "num_taken",
        "problem",
        "reread_s",
    )

    def __init__(
        self,
        matcher: LLMatcher,
        enlarge: Enlarge = _none_larger,
        begin_operation: Callable[[], None] = _begin_nothing,
    ) -> None:
        """Create the state. It owns `matcher`, which has taken no token.

        `enlarge` returns an unused matcher with the limits of a size (1, 2, …); None where there is none.
        `begin_operation` is called before each part of an answer that is read again.
        """
        self._matcher, self._enlarge, self._begin_operation = matcher, enlarge, begin_operation
        self._token_ids: list[int] = []  # that a matcher has taken
        self._size = 0
        self._path: LLMatcher | None = None  # a matcher that has computed few masks
        self._num_read = 0  # tokens that it has taken
        self.reread_s = 0.0  # processor time of reading the answer again
        self.num_taken = 0  # tokens of the answer
        self.problem = ""  # why it cannot continue, for the client

    def take(self, token_ids: Sequence[int]) -> None:
        """Take the next tokens of the answer."""
        self.num_taken += len(token_ids)
        for begin in range(0, len(token_ids), TOKENS_AT_ONCE):
            if begin:
                self._begin_operation()
                if not self.problem and not self._matcher.is_stopped():
                    self._matcher.compute_bitmask()  # renews the fuel of the lexer; an error shows below
            self._take_part(list(token_ids[begin : begin + TOKENS_AT_ONCE]))

    def _take_part(self, token_ids: list[int]) -> None:
        if self.problem or (self._matcher.is_stopped() and not self._matcher.is_error()):
            return  # the answer ends or has ended; tokens sampled after that are dropped
        while not self._matcher.consume_tokens(token_ids):
            if _NOT_ALLOWED in self._matcher.get_error():
                self.problem = ASTRAY
                return
            if not self._continue_in_larger():
                return
        self._token_ids += token_ids

    def write(self, address: int, num_bytes: int) -> None:
        """Write the mask of the next token, one bit per token, into memory at `address`."""
        while not self.problem:
            self._matcher.unsafe_compute_mask_ptr(address, num_bytes)
            if not self._matcher.is_error():
                return
            self._continue_in_larger()

    def _continue_in_larger(self) -> bool:
        """Continue with a matcher that has only read the answer, after a limit. Otherwise set the problem."""
        begin_s = time.thread_time()
        found = self._matcher.get_error().startswith(LEXER_LIMIT) and self._read_again()
        self.reread_s += time.thread_time() - begin_s
        if not found:
            self.problem = TOO_COSTLY
        return found

    def _read_again(self) -> bool:
        """Return whether the answer continues in a larger lexer, or in one of the same size without other states."""
        while (larger := self._enlarge(self._size + 1)) is not None:
            self._size += 1
            self._path, self._num_read = larger, 0
            if self._read_on(larger):
                return True
        is_worth_it = len(self._token_ids) >= self._num_read + MIN_TOKENS_BETWEEN
        return is_worth_it and self._path is not None and self._read_on(self._path)

    def _read_on(self, path: LLMatcher) -> bool:
        """Let `path` read the rest of the answer, and continue with a copy. Returns False where it reached a limit."""
        while self._num_read < len(self._token_ids):
            self._begin_operation()
            part = self._token_ids[self._num_read : self._num_read + TOKENS_AT_ONCE]
            if not path.consume_tokens(part):
                return False
            self._num_read += len(part)
            path.compute_bitmask()  # renews the fuel of the lexer
        if path.is_error():
            return False
        self._matcher = path.deep_copy()
        return True
