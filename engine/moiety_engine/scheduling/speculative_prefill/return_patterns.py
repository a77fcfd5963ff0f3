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
MAX_HABITS = 4096
MAX_WATCHED = 16_384

_FORGET = 0.98  # decay of a span's counts with each conversation that enters it
_PRIOR = 2.0  # weight of the prior, in conversations, half of which return eventually
_PRIOR_BACK = _PRIOR * (1 - 0.5 ** (1 / len(ENDS_S)))

Prefill = TypeVar("Prefill")


class _ReturnPattern:
    __slots__ = ("back", "entered")

    def __init__(self) -> None:
        self.entered = [0.0] * len(ENDS_S)
        self.back = [0.0] * len(ENDS_S)


class ReturnPatterns:
    """Return patterns by key; at most MAX_HABITS, the least recently used are dropped."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, _ReturnPattern] = OrderedDict()

    def entered(self, name: str, span: int) -> None:
        """Record that a conversation has not returned before this span."""
        habit = self._of(name)
        habit.entered[span] = habit.entered[span] * _FORGET + 1
        habit.back[span] *= _FORGET

    def came_back(self, name: str, span: int) -> None:
        """Record that a conversation returned within this span."""
        self._of(name).back[span] += 1

    def likelihood(self, name: str, after_s: float) -> float:
        """Return the probability that a conversation that has been silent for `after_s` seconds returns."""
        habit = self._of(name)
        first = span_of(after_s)
        stays_away = 1.0
        for span in range(first, len(ENDS_S)):
            hazard = (habit.back[span] + _PRIOR_BACK) / (habit.entered[span] + _PRIOR)
            stays_away *= max(0.0, 1 - hazard) ** (_left_of(span, after_s) if span == first else 1.0)
        return 1 - stays_away

    def _of(self, name: str) -> _ReturnPattern:
        habit = self._known.get(name)
        if habit is None:
            habit = self._known[name] = _ReturnPattern()
            if len(self._known) > MAX_HABITS:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(name)
        return habit


@dataclass(slots=True, eq=False)
class WatchedConversation(Generic[Prefill]):
    """Conversation that may continue.

    `tip` is the block hash that its next turn contains, `habit` its pattern key, `since_s` the end of its last turn and
    `wanted` its speculative prefill, if any.
    """

    tip: bytes
    habit: str
    since_s: float
    span: int = 0
    wanted: Prefill | None = None


class ConversationWatch(Generic[Prefill]):
    """Conversations whose next turn is expected; trains the return patterns."""

    def __init__(self, habits: ReturnPatterns) -> None:
        self._habits = habits
        self._of_tip: dict[bytes, WatchedConversation[Prefill]] = {}
        self._in_span: list[deque[WatchedConversation[Prefill]]] = [
            deque() for _ in ENDS_S
        ]  # the longest first; some are void

    def __len__(self) -> int:
        return len(self._of_tip)

    def open(self, tip: bytes, habit: str, now_s: float) -> WatchedConversation[Prefill]:
        """Watch a conversation whose turn has ended; its next turn is recognized by `tip`.

        Above MAX_WATCHED conversations the oldest is dropped without an outcome.
        """
        watched: WatchedConversation[Prefill] = WatchedConversation(tip, habit, now_s)
        self._of_tip.pop(tip, None)
        self._of_tip[tip] = watched
        self._in_span[0].append(watched)
        self._habits.entered(habit, 0)
        if len(self._of_tip) > MAX_WATCHED:
            del self._of_tip[next(iter(self._of_tip))]
        return watched

    def found(self, tip: bytes, now_s: float) -> WatchedConversation[Prefill] | None:
        """Return the conversation that a prompt with this hash continues, and stop watching it; None if none does."""
        watched = self._of_tip.pop(tip, None)
        if watched is not None:
            self._habits.came_back(watched.habit, min(watched.span, span_of(now_s - watched.since_s)))
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
                    self._habits.entered(watched.habit, span + 1)
                    self._in_span[span + 1].append(watched)


def span_of(after_s: float) -> int:
    """Return the span of this time; the last span for all later times."""
    return next((span for span, end_s in enumerate(ENDS_S) if after_s <= end_s), len(ENDS_S) - 1)


def _left_of(span: int, after_s: float) -> float:
    """Return the remaining fraction of a span."""
    begin_s = ENDS_S[span - 1] if span else 0.0
    return max(0.0, min(1.0, (ENDS_S[span] - after_s) / (ENDS_S[span] - begin_s)))
