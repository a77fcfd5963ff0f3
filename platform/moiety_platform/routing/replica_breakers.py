"""Circuit breakers of all replicas, by address.

An open breaker makes its replica the last choice and never, by itself, an outage: where all are open, the one whose
trial is due first gets the request, unless each has sent a Retry-After.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

import structlog

from moiety_platform.clock import Clock
from moiety_platform.engine_client.base import EngineState
from moiety_platform.errors import EngineOverloaded, PlatformError
from moiety_platform.routing.circuit_breaker import POLICY, BreakerPolicy, BreakerState, CircuitBreaker, Ticket
from moiety_platform.routing.outcomes import SUCCESS, Outcome, OutcomeKind, outcome_of

PROVEN_S = 5.0  # a trial with output for this long counts as a success before its end

log = structlog.get_logger(__name__)


class ReplicaBreakers:
    """Breakers of all replicas, owned by `Replicas`. A replica without a breaker has had no request yet."""

    def __init__(self, clock: Clock, policy: BreakerPolicy = POLICY) -> None:
        self._clock = clock
        self._policy = policy
        self._breakers: dict[str, CircuitBreaker] = {}
        self._counts: Counter[tuple[str, OutcomeKind]] = Counter()

    def begin(self, address: str) -> RequestOutcome:
        """Record that a request goes to that replica; return the recorder of its outcome."""
        breaker = self._breakers.get(address)
        if breaker is None:
            breaker = self._breakers[address] = CircuitBreaker(self._policy)
        return RequestOutcome(self._clock, self._counts, address, breaker)

    def forget(self, address: str) -> None:
        """Drop the state of a replica that left or was replaced."""
        self._breakers.pop(address, None)
        for kind in OutcomeKind:
            self._counts.pop((address, kind), None)

    def willing(self, states: Sequence[EngineState]) -> Sequence[EngineState]:
        """Return the replicas that may get a new request."""
        if not any(breaker.num_openings for breaker in self._breakers.values()):  # true nearly always
            return states
        now_s = self._clock.monotonic()
        return [one for one in states if self._is_willing(one.address, now_s)]

    def least_bad(self, able: Sequence[EngineState], model: str) -> list[EngineState]:
        """Return the replicas to try where none is willing.

        Raises EngineOverloaded where each has sent a Retry-After, with the shortest remaining time.
        """
        now_s = self._clock.monotonic()
        breakers = {state.address: self._breakers.get(state.address) for state in able}
        open_for_s = {at: 0.0 if one is None else one.open_for_s(now_s) for at, one in breakers.items()}
        told = {at for at, one in breakers.items() if one is not None and one.was_told_to_wait(now_s)}
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
        return BreakerState.CLOSED if breaker is None else breaker.state(self._clock.monotonic())

    def states(self) -> Iterator[tuple[str, BreakerState, int]]:
        """Yield the address, the state and the number of openings of each breaker."""
        now_s = self._clock.monotonic()
        for address, breaker in list(self._breakers.items()):
            yield address, breaker.state(now_s), breaker.num_openings

    def counts(self) -> list[tuple[str, OutcomeKind, int]]:
        """Return the number of requests by address and outcome."""
        return [(address, kind, count) for (address, kind), count in self._counts.items()]

    def _is_willing(self, address: str, now_s: float) -> bool:
        breaker = self._breakers.get(address)
        return breaker is None or breaker.is_willing(now_s)


class RequestOutcome:
    """One request at one replica. The first reported outcome counts; later ones are ignored."""

    __slots__ = ("_address", "_breaker", "_clock", "_counts", "_first_output_at_s", "_ticket", "is_trial")

    def __init__(
        self, clock: Clock, counts: Counter[tuple[str, OutcomeKind]], address: str, breaker: CircuitBreaker
    ) -> None:
        self._clock, self._counts, self._address, self._breaker = clock, counts, address, breaker
        ticket = breaker.begin(clock.monotonic())
        self._ticket: Ticket | None = ticket  # until the outcome was reported
        self.is_trial = ticket.is_trial
        self._first_output_at_s: float | None = None

    def delivered(self) -> None:
        """Record that a trial produced output."""
        now_s = self._clock.monotonic()
        if self._first_output_at_s is None:
            self._first_output_at_s = now_s
        elif now_s - self._first_output_at_s >= PROVEN_S:
            self._learn(SUCCESS)
            self.is_trial, self._ticket = False, self._breaker.begin(now_s)

    def succeeded(self) -> None:
        """Record that the request completed."""
        self._learn(SUCCESS)

    def failed(self, error: PlatformError) -> None:
        """Record that the replica ended it with that error."""
        outcome = outcome_of(error)
        if outcome is None:
            self.release()
        else:
            self._learn(outcome)

    def release(self) -> None:
        """Record an end that says nothing about the replica."""
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            self._breaker.release(ticket)

    def _learn(self, outcome: Outcome) -> None:
        ticket, self._ticket = self._ticket, None
        if ticket is None:
            return
        breaker, now_s = self._breaker, self._clock.monotonic()
        self._counts[self._address, outcome.kind] += 1
        before, num_openings = breaker.state(now_s), breaker.num_openings
        if outcome.kind is OutcomeKind.SUCCEEDED:
            breaker.succeed(ticket, now_s)
        else:
            breaker.fail(ticket, now_s, outcome.retry_after_s)
        if breaker.num_openings != num_openings:
            log.warning(
                "engine_circuit_opened",
                engine=self._address,
                outcome=outcome.kind.value,
                for_s=round(breaker.open_for_s(now_s), 3),
                retry_after_s=outcome.retry_after_s,
            )
        elif before is not BreakerState.CLOSED and breaker.state(now_s) is BreakerState.CLOSED:
            log.info("engine_circuit_closed", engine=self._address)
