"""Return patterns of conversations: whether and when the next turn arrives, learned online for each pattern key.

Conversations that behave alike share a key. The time since the end of a turn is divided into spans of doubling length.
For each span, the estimator counts the conversations that had not returned when it began, and those that returned
within it (Kaplan–Meier estimator, with decay of old counts); conversations that may still return are counted correctly
too. The probability that a conversation returns after a given silence follows from the remaining spans. Pure.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Generic, TypeVar

ENDS_S = tuple(2.0**index for index in range(11))  # ends of the spans: 1 s, 2 s, …
HORIZON_S = ENDS_S[-1]  # later returns are not expected
MAX_PATTERNS = 4096
MAX_WATCHED = 16_384

_FORGET = 0.98  # decay of a span's counts with each conversation that enters it
_PRIOR = 2.0  # weight of the prior, in conversations, half of which return eventually
_PRIOR_RETURNED = _PRIOR * (1 - 0.5 ** (1 / len(ENDS_S)))

Prefill = TypeVar("Prefill")


class _ReturnPattern:
    __slots__ = ("num_entered", "num_returned")

    def __init__(self) -> None:
        self.num_entered = [0.0] * len(ENDS_S)
        self.num_returned = [0.0] * len(ENDS_S)


class ReturnPatterns:
    """Return patterns by key; at most MAX_PATTERNS, the least recently used are dropped."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, _ReturnPattern] = OrderedDict()

    def record_span(self, name: str, span: int) -> None:
        """Record that a conversation has not returned before this span."""
        pattern = self._of(name)
        pattern.num_entered[span] = pattern.num_entered[span] * _FORGET + 1
        pattern.num_returned[span] *= _FORGET

    def record_return(self, name: str, span: int) -> None:
        """Record that a conversation returned within this span."""
        self._of(name).num_returned[span] += 1

    def likelihood(self, name: str, after_s: float) -> float:
        """Return the probability that a conversation that has been silent for `after_s` seconds returns."""
        pattern = self._of(name)
        first = span_of(after_s)
        none_returns = 1.0
        for span in range(first, len(ENDS_S)):
            hazard = (pattern.num_returned[span] + _PRIOR_RETURNED) / (pattern.num_entered[span] + _PRIOR)
            none_returns *= max(0.0, 1 - hazard) ** (_remaining_fraction(span, after_s) if span == first else 1.0)
        return 1 - none_returns

    def _of(self, name: str) -> _ReturnPattern:
        pattern = self._known.get(name)
        if pattern is None:
            pattern = self._known[name] = _ReturnPattern()
            if len(self._known) > MAX_PATTERNS:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(name)
        return pattern


@dataclass(slots=True, eq=False)
class WatchedConversation(Generic[Prefill]):
    """Conversation that may continue.

    `tip` is the block hash that its next turn contains, `pattern` the key of its return pattern, `since_s` the end of
    its last turn and `wanted` its speculative prefill, if any.
    """

    tip: bytes
    pattern: str
    since_s: float
    span: int = 0
    wanted: Prefill | None = None


class ConversationWatch(Generic[Prefill]):
    """Conversations whose next turn is expected; trains the return patterns."""

    def __init__(self, patterns: ReturnPatterns) -> None:
        self._patterns = patterns
        self._of_tip: dict[bytes, WatchedConversation[Prefill]] = {}
        self._in_span: list[deque[WatchedConversation[Prefill]]] = [
            deque() for _ in ENDS_S
        ]  # the longest first; some are void

    def __len__(self) -> int:
        return len(self._of_tip)

    def open(self, tip: bytes, pattern: str, now_s: float) -> WatchedConversation[Prefill]:
        """Watch a conversation whose turn has ended; its next turn is recognized by `tip`.

        Above MAX_WATCHED conversations the oldest is dropped without an outcome.
        """
        watched: WatchedConversation[Prefill] = WatchedConversation(tip, pattern, now_s)
        self._of_tip.pop(tip, None)
        self._of_tip[tip] = watched
        self._in_span[0].append(watched)
        self._patterns.record_span(pattern, 0)
        if len(self._of_tip) > MAX_WATCHED:
            del self._of_tip[next(iter(self._of_tip))]
        return watched

    def found(self, tip: bytes, now_s: float) -> WatchedConversation[Prefill] | None:
        """Return the conversation that a prompt with this hash continues, and stop watching it; None if none does."""
        watched = self._of_tip.pop(tip, None)
        if watched is not None:
            self._patterns.record_return(watched.pattern, min(watched.span, span_of(now_s - watched.since_s)))
        return watched

    def advance(self, now_s: float) -> None:
        """Move conversations that have not returned to their next span, or drop them after the last."""
        for span, (waiting, end_s) in enumerate(zip(self._in_span, ENDS_S, strict=True)):
            while waiting and now_s - waiting[0].since_s > end_s:
                watched = waiting.popleft()
                if self._of_tip.get(watched.tip) is not watched:
                    continue
                if span + 1 == len(ENDS_S):
                    del self._of_tip[watched.tip]
                else:
                    watched.span = span + 1
                    self._patterns.record_span(watched.pattern, span + 1)
                    self._in_span[span + 1].append(watched)


def span_of(after_s: float) -> int:
    """Return the span of this time; the last span for all later times."""
    return next((span for span, end_s in enumerate(ENDS_S) if after_s <= end_s), len(ENDS_S) - 1)


def _remaining_fraction(span: int, after_s: float) -> float:
    """Return the remaining fraction of a span."""
    begin_s = ENDS_S[span - 1] if span else 0.0
    return max(0.0, min(1.0, (ENDS_S[span] - after_s) / (ENDS_S[span] - begin_s)))
