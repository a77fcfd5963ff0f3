"""Circuit breaker of one replica: the outcomes of its requests decide whether it is preferred for new ones.

Pure except for the random numbers that separate the retries of gateways: the time is an argument. Independent of
engines and errors; see `outcomes`. The pattern is Nygard's (Release It!, 2007): closed, open for a backoff, then
half-open with one trial.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class BreakerState(StrEnum):
    """State of a breaker.

    CLOSED: takes requests. OPEN: takes none while there is another replica. HALF_OPEN: takes one, as a trial.
    """

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class BreakerPolicy:
    """Conditions for opening a breaker, and its durations."""

    first_s: float = 1.0  # duration of the first opening; doubled with each trial that fails
    max_s: float = 30.0
    jitter: float = 0.2  # of the backoff, up or down
    max_retry_after_s: float = 60.0  # bound on the Retry-After of a server
    memory_s: float = 10.0  # half-life of outcomes
    failed_share: float = 0.5  # this share of the recent outcomes opens it …
    num_in_a_row: int = 3  # … and so does this number of failures in a row


POLICY = BreakerPolicy()


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request sent to the replica. `num_openings` is the breaker's count at that time."""

    num_openings: int
    is_trial: bool


class CircuitBreaker:
    """Breaker of one replica, owned by `ReplicaBreakers`.

    Every `begin` is followed by one of `succeed`, `fail` and `release`.
    """

    def __init__(self, policy: BreakerPolicy = POLICY, draw: Callable[[], float] = random.random) -> None:
        """`draw` returns random numbers in [0, 1)."""
        self._policy = policy
        self._draw = draw
        self._num_openings = 0
        self._num_failed_trials = 0  # since it last closed
        self._until_s: float | None = None  # end of the open state; None: closed
        self._was_told = False  # the duration comes from the replica's Retry-After
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
        """Number of times that it has opened."""
        return self._num_openings

    def is_willing(self, now_s: float) -> bool:
        """Return whether a new request may go there: it is closed, or half-open without a running trial."""
        state = self.state(now_s)
        return state is BreakerState.CLOSED or (state is BreakerState.HALF_OPEN and self._trial is None)

    def open_for_s(self, now_s: float) -> float:
        """Return the seconds for which it stays open; 0 where it is not open."""
        return 0.0 if self._until_s is None else max(0.0, self._until_s - now_s)

    def was_told_to_wait(self, now_s: float) -> bool:
        """Return whether it is open because of the replica's own Retry-After."""
        return self._was_told and self.state(now_s) is BreakerState.OPEN

    def begin(self, now_s: float) -> Ticket:
        """Record that a request goes there, even against `is_willing`: then it is no trial."""
        is_trial = self.state(now_s) is BreakerState.HALF_OPEN and self._trial is None
        ticket = Ticket(self._num_openings, is_trial)
        if is_trial:
            self._trial = ticket
        return ticket

    def succeed(self, ticket: Ticket, now_s: float) -> None:
        """Record a success. A request that began before the breaker opened proves nothing about the time after that."""
        self.release(ticket)
        self._weigh(now_s)
        self._succeeded += 1
        self._num_in_a_row = 0
        if self._until_s is not None and ticket.num_openings == self._num_openings:
            self._until_s, self._was_told = None, False
            self._num_failed_trials, self._failed = 0, 0.0

    def fail(self, ticket: Ticket, now_s: float, retry_after_s: float | None = None) -> None:
        """Record a failure; `retry_after_s` is the replica's own Retry-After.

        Once it is open, failures of requests that began before are not counted again.
        """
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
        """Record an end that says nothing about the replica: its client disconnected or was at fault."""
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
        """Let earlier outcomes decay."""
        faded = 0.5 ** ((now_s - self._weighed_at_s) / self._policy.memory_s)
        self._succeeded, self._failed, self._weighed_at_s = self._succeeded * faded, self._failed * faded, now_s
