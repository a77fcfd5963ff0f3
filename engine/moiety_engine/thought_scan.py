"""Incremental scan of an output for its stretches of reasoning, which thought budgets limit.

Where the reasoning can begin again, messages have headers: an opener such as `<|channel|>analysis<|message|>` is the
token of a channel, the name of the channel, and the token that ends a header. A header is of reasoning wherever it has
the name directly after the channel's token, whatever else stands before the one and after the other.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence as Tokens
from enum import IntEnum

from moiety_wire.thought_budget import MIN_THOUGHT_BUDGET, ThoughtBudget

MAX_SPACE_TOKENS = 16  # of white space before the reasoning, as many characters as a grammar permits there
_FEW_LEFT = 32  # tokens of a budget, not fewer than a draft usually has


class _Phase(IntEnum):
    OPENING = 0  # the output may begin with white space and the opener
    HEADER = 1  # between the tokens that begin and end a message's header
    THINKING = 2
    OTHER = 3


class ThoughtScan:
    """The last stretch of reasoning in the first `num_scanned` tokens of an output, and what may begin another one."""

    def __init__(self, budget: ThoughtBudget) -> None:
        self.budget = budget
        self._reset()

    def _reset(self) -> None:
        budget = self.budget
        self.num_scanned = 0
        self.start: int | None = None  # position of the stretch's first token, after the opener
        self.end: int | None = None  # position of the token that closes it; None while it is open
        self.num_before = 0  # tokens that the stretches before it count
        self._phase = _Phase.HEADER if budget.reopener_ids else _Phase.OPENING
        self._num_matched = 0  # of the opener, or of the channel's token and name in a header
        self._is_reasoning = False  # the header has the channel's token and name
        self._channel_at: int | None = None  # position of the first channel's token in the header
        if not budget.opener_ids:
            self._phase, self.start = _Phase.THINKING, 0

    def advance(self, tokens: Tokens[int], begin: int, end: int) -> None:
        """Scan further: the output's tokens are those of `tokens` from `begin` to `end`."""
        if end - begin < self.num_scanned:
            self._reset()
        while (at := begin + self.num_scanned) < end:
            if self._phase is _Phase.THINKING:
                found = _first_of(self.budget.closer_ids, tokens, at, end)
                if found is not None:
                    self.end, self._phase = found - begin, _Phase.OTHER
                self.num_scanned = end - begin if found is None else found - begin + 1
            elif self._phase is _Phase.OTHER:
                reopener = self.budget.reopener_ids
                starts = (reopener[0], self.budget.opener_ids[0]) if reopener and self.budget.opener_ids else ()
                found = _first_of(starts, tokens, at, end)
                if found is not None:
                    self._begin_header()
                self.num_scanned = end - begin if found is None else found - begin  # the header scans this token
            elif self._phase is _Phase.HEADER:
                self._scan_header(tokens[at])
                self.num_scanned += 1
            else:
                self._scan_opening(tokens[at])
                self.num_scanned += 1

    def after(self, tokens: Tokens[int]) -> ThoughtScan:
        """Return a scan that has scanned these tokens too."""
        scan = copy.copy(self)
        scan.advance(tokens, -scan.num_scanned, len(tokens))
        return scan

    @property
    def is_used(self) -> bool:
        """Return whether the stretches that have ended leave no budget for another one."""
        return self.end is not None and self._num_left < MIN_THOUGHT_BUDGET

    @property
    def depends_on_pending(self) -> bool:
        """Return whether an unknown token may decide how the budget restricts the tokens after a draft."""
        return bool(self.budget.reopener_ids) and self._num_left < _FEW_LEFT

    @property
    def _num_left(self) -> int:
        """Tokens of the budget that are left if an open stretch ends here."""
        last = 0 if self.start is None else self._count(self.start, self.num_scanned if self.end is None else self.end)
        return self.budget.max_tokens - self.num_before - last

    def banned(self) -> tuple[int, ...]:
        """Return tokens that may not come after the next one, so that no further stretch begins."""
        if self._phase is not _Phase.HEADER or not self.is_used:
            return ()
        channel, *name = self.budget.opener_ids[:-1]
        if len(name) == 1:  # after one channel's token a second one is banned
            may_complete = self._channel_at is None or self._channel_at > self.num_scanned - 2
        else:
            may_complete = self._num_matched == len(name) - 1
        return (*([] if self._channel_at is None else [channel]), *(name[-1:] if may_complete else []))

    def _count(self, start: int, end: int) -> int:
        """Return what a stretch counts: at least its opener's length, so that no number of empty ones is free."""
        return max(end - start, len(self.budget.opener_ids))

    def _begin_header(self) -> None:
        self._phase, self._num_matched = _Phase.HEADER, 0
        self._is_reasoning, self._channel_at = False, None

    def _scan_header(self, token: int) -> None:
        *mark, message = self.budget.opener_ids
        if token == self.budget.reopener_ids[0]:
            self._begin_header()
        elif token == message:
            self._phase = _Phase.THINKING if self._is_reasoning else _Phase.OTHER
            if self._is_reasoning:
                self._begin_stretch(self.num_scanned + 1)
        else:
            if token == mark[0] and self._channel_at is None:
                self._channel_at = self.num_scanned
            if token == mark[self._num_matched]:
                self._num_matched += 1
            else:
                self._num_matched = int(token == mark[0])
            if self._num_matched == len(mark):
                self._is_reasoning, self._num_matched = True, 0

    def _scan_opening(self, token: int) -> None:
        opener = self.budget.opener_ids
        if self._num_matched == 0 and self.num_scanned < MAX_SPACE_TOKENS and token in self.budget.space_ids:
            return
        if token != opener[self._num_matched]:
            self._phase = _Phase.OTHER
            return
        self._num_matched += 1
        if self._num_matched == len(opener):
            self._phase = _Phase.THINKING
            self._begin_stretch(self.num_scanned + 1)

    def _begin_stretch(self, start: int) -> None:
        if self.start is not None and self.end is not None:
            self.num_before += self._count(self.start, self.end)
        self.start, self.end = start, None


def _first_of(token_ids: Tokens[int], tokens: Tokens[int], begin: int, end: int) -> int | None:
    """Return the first index from `begin` on and before `end` that has one of the tokens."""
    first = end
    for token_id in token_ids:
        with contextlib.suppress(ValueError):
            first = tokens.index(token_id, begin, first)
    return first if first < end else None
