"""A circuit breaker for one replica: how its requests ended decides whether it is preferred for new ones.

Pure but for the random numbers that keep gateways apart: the time is an argument. It knows no engine and no error; see
`outcomes`. The pattern is Nygard's (Release It!, 2007): closed, open for a backoff, then half-open with one trial.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class BreakerState(StrEnum):
    """CLOSED: takes requests. OPEN: takes none while there is another replica. HALF_OPEN: takes one, as a trial."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class BreakerPolicy:
    """When a breaker opens, and for how long."""

    first_s: float = 1.0  # of the first opening; doubled with each trial that fails
    max_s: float = 30.0
    jitter: float = 0.2  # of the backoff, up or down
    max_retry_after_s: float = 60.0  # what a server itself asks for is kept to, up to this
    memory_s: float = 10.0  # outcomes count half after so long
    failed_share: float = 0.5  # of the recent outcomes opens it …
    num_in_a_row: int = 3  # … and so do so many failures without a success between them


POLICY = BreakerPolicy()


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request that was given to the replica. `num_openings` are those of the breaker by then."""

    num_openings: int
    is_trial: bool


class CircuitBreaker:
    """Owned by `ReplicaBreakers`. Every `begin` is followed by one of `succeed`, `fail` and `release`."""

    def __init__(self, policy: BreakerPolicy = POLICY, draw: Callable[[], float] = random.random) -> None:
        """`draw` gives numbers in [0, 1)."""
        self._policy = policy
        self._draw = draw
        self._num_openings = 0
        self._num_failed_trials = 0  # since it was last closed
        self._until_s: float | None = None  # it is open; None: closed
        self._was_told = False  # by the replica's Retry-After for how long
        self._trial: Ticket | None = None
        self._num_in_a_row = 0
        self._succeeded = self._failed = 0.0  # recent outcomes, weighted by their age
        self._weighed_at_s = 0.0

    def state(self, now_s: float) -> BreakerState:
        """Return the state at that moment."""
        if self._until_s is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now_s < self._until_s else BreakerState.HALF_OPEN

    @property
    def num_openings(self) -> int:
        """How often it has opened."""
        return self._num_openings

    def is_willing(self, now_s: float) -> bool:
        """Whether a new request may go there: it is closed, or half-open without a trial under way."""
        state = self.state(now_s)
        return state is BreakerState.CLOSED or (state is BreakerState.HALF_OPEN and self._trial is None)

    def open_for_s(self, now_s: float) -> float:
        """Return how long it stays open; 0 where it is not open."""
        return 0.0 if self._until_s is None else max(0.0, self._until_s - now_s)

    def was_told_to_wait(self, now_s: float) -> bool:
        """Whether it is open because the replica itself said for how long (Retry-After)."""
        return self._was_told and self.state(now_s) is BreakerState.OPEN

    def begin(self, now_s: float) -> Ticket:
        """Note that a request goes there, even against `is_willing`: then it is no trial."""
        is_trial = self.state(now_s) is BreakerState.HALF_OPEN and self._trial is None
        ticket = Ticket(self._num_openings, is_trial)
        if is_trial:
            self._trial = ticket
        return ticket

    def succeed(self, ticket: Ticket, now_s: float) -> None:
        """Note that a request ended well. One that began before the breaker opened proves nothing of what came then."""
        self.release(ticket)
        self._weigh(now_s)
        self._succeeded += 1
        self._num_in_a_row = 0
        if self._until_s is not None and ticket.num_openings == self._num_openings:
            self._until_s, self._was_told = None, False
            self._num_failed_trials, self._failed = 0, 0.0

    def fail(self, ticket: Ticket, now_s: float, retry_after_s: float | None = None) -> None:
        """Note that a request failed; `retry_after_s` is for how long the replica asks to be left alone. Once it is
        open, failures of requests that began before are not counted again."""
        state = self.state(now_s)
        self.release(ticket)
        self._weigh(now_s)
        self._failed += 1
        self._num_in_a_row += 1
        if retry_after_s is not None:
            self._fail_trial(ticket, state)
            self._open(now_s, min(retry_after_s, self._policy.max_retry_after_s), was_told=True)
        elif state is BreakerState.HALF_OPEN and ticket.num_openings == self._num_openings:
            self._fail_trial(ticket, state)
            self._open(now_s, self._backoff_s())
        elif state is BreakerState.CLOSED and self._has_failed_too_often():
            self._open(now_s, self._backoff_s())

    def release(self, ticket: Ticket) -> None:
        """Note that a request ended in a way that says nothing of the replica: its client left or was at fault."""
        if self._trial is ticket:
            self._trial = None

    def _fail_trial(self, ticket: Ticket, state: BreakerState) -> None:
        if state is BreakerState.HALF_OPEN and ticket.num_openings == self._num_openings:
            self._num_failed_trials += 1

    def _open(self, now_s: float, seconds: float, *, was_told: bool = False) -> None:
        """Open it, or keep it open for longer."""
        if self.state(now_s) is not BreakerState.OPEN:
            self._num_openings += 1
            self._was_told = was_told
            self._until_s = now_s + seconds
            self._trial = None
        elif self._until_s is None or now_s + seconds >= self._until_s:
            self._was_told, self._until_s = was_told, now_s + seconds

    def _backoff_s(self) -> float:
        policy = self._policy
        doubled = policy.first_s * 2.0 ** min(self._num_failed_trials, 32)
        return min(doubled, policy.max_s) * (1 + policy.jitter * (2 * self._draw() - 1))

    def _has_failed_too_often(self) -> bool:
        policy = self._policy
        share = self._failed / (self._failed + self._succeeded)
        return self._num_in_a_row >= policy.num_in_a_row or share >= policy.failed_share

    def _weigh(self, now_s: float) -> None:
        """Let what was noted until now fade."""
        faded = 0.5 ** ((now_s - self._weighed_at_s) / self._policy.memory_s)
        self._succeeded, self._failed, self._weighed_at_s = self._succeeded * faded, self._failed * faded, now_s
