"""Circuit breakers of replicas: the outcomes of a replica's requests decide whether it is preferred for new ones.

The pattern is Nygard's (Release It!, 2007): closed, open for a backoff, then half-open with one trial. `CircuitBreaker`
is pure except for the random numbers that separate the retries of gateways: the time is an argument. `outcomes`
classifies errors.

An open breaker makes its replica the last choice and never, by itself, an outage: where all are open, the one whose
trial is due first gets the request, unless each has sent a Retry-After.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import structlog

from moiety_platform.clock import Clock
from moiety_platform.engine_client.base import EngineState
from moiety_platform.errors import EngineOverloaded, PlatformError
from moiety_platform.routing.outcomes import SUCCESS, Outcome, OutcomeKind, outcome_of

PROVEN_S = 5.0  # a trial with output for this long counts as a success before its end

log = structlog.get_logger(__name__)


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
        self.num_openings = 0  # times that it has opened
        self._num_failed_trials = 0  # since it last closed
        self._until_s: float | None = None  # end of the open state; None: closed
        self._is_server_hint = False  # the duration comes from the replica's Retry-After
        self._trial: Ticket | None = None
        self._num_in_a_row = 0
        self._succeeded = self._failed = 0.0  # recent outcomes, weighted by their age
        self._weighed_at_s = 0.0

    def state(self, now_s: float) -> BreakerState:
        """Return the state at that moment."""
        if self._until_s is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now_s < self._until_s else BreakerState.HALF_OPEN

    def allows_request(self, now_s: float) -> bool:
        """Return whether a new request may go there: it is closed, or half-open without a running trial."""
        state = self.state(now_s)
        return state is BreakerState.CLOSED or (state is BreakerState.HALF_OPEN and self._trial is None)

    def open_for_s(self, now_s: float) -> float:
        """Return the seconds for which it stays open; 0 where it is not open."""
        return 0.0 if self._until_s is None else max(0.0, self._until_s - now_s)

    def has_retry_after(self, now_s: float) -> bool:
        """Return whether it is open because of the replica's own Retry-After."""
        return self._is_server_hint and self.state(now_s) is BreakerState.OPEN

    def begin(self, now_s: float) -> Ticket:
        """Record that a request goes there, even against `allows_request`: then it is not a trial."""
        is_half_open = self._until_s is not None and now_s >= self._until_s
        is_trial = is_half_open and self._trial is None
        ticket = Ticket(self.num_openings, is_trial)
        if is_trial:
            self._trial = ticket
        return ticket

    def succeed(self, ticket: Ticket, now_s: float) -> None:
        """Record a success. A request that began before the breaker opened proves nothing about the time after that."""
        if self._trial is ticket:
            self._trial = None
        self._weigh(now_s)
        self._succeeded += 1
        self._num_in_a_row = 0
        if self._until_s is not None and ticket.num_openings == self.num_openings:
            self._until_s, self._is_server_hint = None, False
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
            self._open(now_s, min(retry_after_s, self._policy.max_retry_after_s), is_server_hint=True)
        elif state is BreakerState.HALF_OPEN and ticket.num_openings == self.num_openings:
            self._fail_trial(ticket, state)
            self._open(now_s, self._backoff_s())
        elif state is BreakerState.CLOSED and self._has_failed_too_often():
            self._open(now_s, self._backoff_s())

    def release(self, ticket: Ticket) -> None:
        """Record an end that says nothing about the replica: its client disconnected or was at fault."""
        if self._trial is ticket:
            self._trial = None

    def _fail_trial(self, ticket: Ticket, state: BreakerState) -> None:
        if state is BreakerState.HALF_OPEN and ticket.num_openings == self.num_openings:
            self._num_failed_trials += 1

    def _open(self, now_s: float, seconds: float, *, is_server_hint: bool = False) -> None:
        """Open it, or keep it open for longer."""
        if self.state(now_s) is not BreakerState.OPEN:
            self.num_openings += 1
            self._is_server_hint = is_server_hint
            self._until_s = now_s + seconds
            self._trial = None
        elif self._until_s is None or now_s + seconds >= self._until_s:
            self._is_server_hint, self._until_s = is_server_hint, now_s + seconds

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


class ReplicaBreakers:
    """Breakers of all replicas, owned by `Replicas`. A replica without a breaker has had no request yet."""

    def __init__(self, clock: Clock, policy: BreakerPolicy = POLICY) -> None:
        self.clock = clock
        self._policy = policy
        self._breakers: dict[str, CircuitBreaker] = {}
        self._counts: Counter[tuple[str, OutcomeKind]] = Counter()
        self.have_opened = False  # whether any of them has opened since the start

    def begin(self, address: str) -> RequestOutcome:
        """Record that a request goes to that replica; return the recorder of its outcome."""
        breaker = self._breakers.get(address)
        if breaker is None:
            breaker = self._breakers[address] = CircuitBreaker(self._policy)
        return RequestOutcome(self, address, breaker)

    def note_outcome(self, address: str, breaker: CircuitBreaker, ticket: Ticket, outcome: Outcome) -> None:
        """Count the outcome of a request, and report it to the replica's breaker."""
        now_s, kind = self.clock.monotonic(), outcome.kind
        self._counts[address, kind] += 1
        before, num_openings = breaker.state(now_s), breaker.num_openings
        if kind is OutcomeKind.SUCCEEDED:
            breaker.succeed(ticket, now_s)
        else:
            breaker.fail(ticket, now_s, outcome.retry_after_s)
        if breaker.num_openings != num_openings:
            self.have_opened = True
            log.warning(
                "engine_circuit_opened",
                engine=address,
                outcome=kind.value,
                for_s=round(breaker.open_for_s(now_s), 3),
                retry_after_s=outcome.retry_after_s,
                advice="check the log of this engine; it gets a trial request when the time is over",
            )
        elif before is not BreakerState.CLOSED and breaker.state(now_s) is BreakerState.CLOSED:
            log.info("engine_circuit_closed", engine=address)

    def forget(self, address: str) -> None:
        """Drop the state of a replica that left or was replaced."""
        self._breakers.pop(address, None)
        for kind in OutcomeKind:
            self._counts.pop((address, kind), None)

    def allowed_states(self, states: Sequence[EngineState]) -> Sequence[EngineState]:
        """Return the replicas that may get a new request."""
        if not self.have_opened:  # the common case
            return states
        now_s = self.clock.monotonic()
        return [state for state in states if self._allows_request(state.address, now_s)]

    def fallback_states(self, able: Sequence[EngineState], model: str) -> list[EngineState]:
        """Return the replicas to try where no breaker allows a request.

        Raises EngineOverloaded where each has sent a Retry-After, with the shortest remaining time.
        """
        now_s = self.clock.monotonic()
        breakers = {state.address: self._breakers.get(state.address) for state in able}
        open_for_s = {at: 0.0 if breaker is None else breaker.open_for_s(now_s) for at, breaker in breakers.items()}
        told = {at for at, breaker in breakers.items() if breaker is not None and breaker.has_retry_after(now_s)}
        left = [state for state in able if state.address not in told]
        if not left:
            wait_s = math.ceil(min(open_for_s.values()))
            raise EngineOverloaded(
                f"every engine for {model!r} is overloaded and takes no requests for {wait_s} s; try again after that",
                retry_after_s=wait_s,
                asks_to_wait=True,
            )
        soonest_s = min(open_for_s[state.address] for state in left)
        return [state for state in left if open_for_s[state.address] <= soonest_s]

    def state(self, address: str) -> BreakerState:
        """Return the state of that replica's breaker."""
        breaker = self._breakers.get(address)
        return BreakerState.CLOSED if breaker is None else breaker.state(self.clock.monotonic())

    def states(self) -> Iterator[tuple[str, BreakerState, int]]:
        """Yield the address, the state and the number of openings of each breaker."""
        now_s = self.clock.monotonic()
        for address, breaker in list(self._breakers.items()):
            yield address, breaker.state(now_s), breaker.num_openings

    def counts(self) -> list[tuple[str, OutcomeKind, int]]:
        """Return the number of requests by address and outcome."""
        return [(address, kind, count) for (address, kind), count in self._counts.items()]

    def _allows_request(self, address: str, now_s: float) -> bool:
        breaker = self._breakers.get(address)
        return breaker is None or breaker.allows_request(now_s)


class RequestOutcome:
    """One request at one replica. The first reported outcome counts; later ones are ignored."""

    __slots__ = ("_address", "_breaker", "_breakers", "_first_output_at_s", "_ticket", "is_trial")

    def __init__(self, breakers: ReplicaBreakers, address: str, breaker: CircuitBreaker) -> None:
        self._breakers, self._address, self._breaker = breakers, address, breaker
        ticket = breaker.begin(breakers.clock.monotonic())
        self._ticket: Ticket | None = ticket  # until the outcome was reported
        self.is_trial = ticket.is_trial
        self._first_output_at_s: float | None = None

    def delivered(self) -> None:
        """Record that a trial produced output."""
        now_s = self._breakers.clock.monotonic()
        if self._first_output_at_s is None:
            self._first_output_at_s = now_s
        elif now_s - self._first_output_at_s >= PROVEN_S:
            self.succeeded()
            self.is_trial, self._ticket = False, self._breaker.begin(now_s)

    def succeeded(self) -> None:
        """Record that the request completed."""
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            self._breakers.note_outcome(self._address, self._breaker, ticket, SUCCESS)

    def failed(self, error: PlatformError) -> None:
        """Record that the replica ended it with that error."""
        outcome = outcome_of(error)
        ticket, self._ticket = self._ticket, None
        if ticket is None:
            return
        if outcome is None:
            self._breaker.release(ticket)
        else:
            self._breakers.note_outcome(self._address, self._breaker, ticket, outcome)

    def release(self) -> None:
        """Record an end that says nothing about the replica."""
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            self._breaker.release(ticket)
