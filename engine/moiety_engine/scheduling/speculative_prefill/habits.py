"""Which conversations come back, and when: learned online of each habit, which is whatever ends up doing alike (a key).

Time since a conversation's turn ended is cut into spans of doubling length. Of each span it is counted how many
conversations had not come back when it began, and how many of them did within it (Kaplan and Meier's estimator, old
counts forgotten gradually); those that may yet come back count rightly, too. How likely it is that one comes back which
has not for so long follows from the spans that are left. Pure.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Generic, TypeVar

ENDS_S = tuple(2.0**index for index in range(11))  # of the spans: 1 s, 2 s, …
HORIZON_S = ENDS_S[-1]  # what has not come back by then does not
MAX_HABITS = 4096
MAX_WATCHED = 16_384

_FORGET = 0.98  # of a span, with each that enters it
_PRIOR = 2.0  # conversations of which nothing is known count as so many, half of which come back at some time
_PRIOR_BACK = _PRIOR * (1 - 0.5 ** (1 / len(ENDS_S)))

Wanted = TypeVar("Wanted")


class _ReturnPattern:
    __slots__ = ("back", "entered")

    def __init__(self) -> None:
        self.entered = [0.0] * len(ENDS_S)
        self.back = [0.0] * len(ENDS_S)


class ReturnPatterns:
    """What is known of each; of very many, those that were heard of last."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, _ReturnPattern] = OrderedDict()

    def entered(self, name: str, span: int) -> None:
        """A conversation has not come back before that span."""
        habit = self._of(name)
        habit.entered[span] = habit.entered[span] * _FORGET + 1
        habit.back[span] *= _FORGET

    def came_back(self, name: str, span: int) -> None:
        """It came back within it."""
        self._of(name).back[span] += 1

    def likelihood(self, name: str, after_s: float) -> float:
        """That a conversation comes back which has not for so long."""
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
class WatchedConversation(Generic[Wanted]):
    """A conversation that may come back: what its next turn begins with, whose habit it follows, since when, and what
    is wanted of it if anything is."""

    tip: bytes
    habit: str
    since_s: float
    span: int = 0
    wanted: Wanted | None = None


class ConversationWatch(Generic[Wanted]):
    """Conversations whose next turn is waited for, and what the habits learn of them."""

    def __init__(self, habits: ReturnPatterns) -> None:
        self._habits = habits
        self._of_tip: dict[bytes, WatchedConversation[Wanted]] = {}
        self._in_span: list[deque[WatchedConversation[Wanted]]] = [
            deque() for _ in ENDS_S
        ]  # the longest first; some are gone

    def __len__(self) -> int:
        return len(self._of_tip)

    def open(self, tip: bytes, habit: str, now_s: float) -> WatchedConversation[Wanted]:
        """A turn has ended; the next is recognised by `tip`. Of very many, the oldest is forgotten, as one of which it
        is not known whether it came back."""
        watched: WatchedConversation[Wanted] = WatchedConversation(tip, habit, now_s)
        self._of_tip.pop(tip, None)
        self._of_tip[tip] = watched
        self._in_span[0].append(watched)
        self._habits.entered(habit, 0)
        if len(self._of_tip) > MAX_WATCHED:
            del self._of_tip[next(iter(self._of_tip))]
        return watched

    def found(self, tip: bytes, now_s: float) -> WatchedConversation[Wanted] | None:
        """A prompt has come that has this in it; whose next turn it is, told once."""
        watched = self._of_tip.pop(tip, None)
        if watched is not None:
            self._habits.came_back(watched.habit, min(watched.span, span_of(now_s - watched.since_s)))
        return watched

    def advance(self, now_s: float) -> None:
        """What has not come back by now enters its next span, or is given up."""
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
    """In which span that is; whatever is later, in the last."""
    return next((span for span, end_s in enumerate(ENDS_S) if after_s <= end_s), len(ENDS_S) - 1)


def _left_of(span: int, after_s: float) -> float:
    """The share of a span that is still to come."""
    begin_s = ENDS_S[span - 1] if span else 0.0
    return max(0.0, min(1.0, (ENDS_S[span] - after_s) / (ENDS_S[span] - begin_s)))
