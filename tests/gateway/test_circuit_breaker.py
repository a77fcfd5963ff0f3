"""Laws of the circuit breaker of one replica, under any sequence of requests, ends and times."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moiety_platform.errors import (
    BadRequest,
    ContextTooLong,
    EngineDied,
    EngineFailed,
    EngineOverloaded,
    EngineRefused,
    NonFiniteOutput,
    NotFound,
    Overloaded,
    RateLimited,
    Unavailable,
    UpstreamError,
)
from moiety_platform.routing.circuit_breaker import POLICY, BreakerState, CircuitBreaker, Ticket
from moiety_platform.routing.outcomes import Outcome, OutcomeKind, outcome_of
from moiety_wire.trace_events import Reason

LONGEST_S = max(POLICY.max_s * (1 + POLICY.jitter), POLICY.max_retry_after_s) + 1e-6  # rounding of floats


def breaker_of(draw: float = 0.5) -> CircuitBreaker:
    return CircuitBreaker(draw=lambda: draw)


def fail(breaker: CircuitBreaker, now_s: float, retry_after_s: float | None = None) -> None:
    breaker.fail(breaker.begin(now_s), now_s, retry_after_s)


@dataclass
class World:
    """A breaker with a clock and the requests that run."""

    breaker: CircuitBreaker
    now_s: float = 0.0
    running: list[Ticket] = field(default_factory=list)

    def do(self, what: str, which: float) -> None:
        if (what == "begin" and self.breaker.allows_request(self.now_s)) or what == "force":
            self.running.append(self.breaker.begin(self.now_s))
        elif what == "wait":
            self.now_s += which * 40
        elif self.running and what in ("succeed", "fail", "fail_told", "release"):
            ticket = self.running.pop(int(which * len(self.running)))
            if what == "succeed":
                self.breaker.succeed(ticket, self.now_s)
            elif what == "release":
                self.breaker.release(ticket)
            else:
                self.breaker.fail(ticket, self.now_s, which * 1000 if what == "fail_told" else None)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "begin", "force", "wait", "succeed", "fail", "fail", "fail_told", "release"]),
        st.floats(0, 0.999),
    ),
    max_size=80,
)


@given(STEPS, st.floats(0, 0.999))
def test_there_is_never_more_than_one_trial(steps: Any, draw: Any) -> None:
    world = World(breaker_of(draw))
    for what, which in steps:
        world.do(what, which)
        num_openings = world.breaker.num_openings
        trials = [one for one in world.running if one.is_trial and one.num_openings == num_openings]
        if world.breaker.state(world.now_s) is BreakerState.HALF_OPEN:
            assert len(trials) <= 1
            assert world.breaker.allows_request(world.now_s) == (not trials)


@given(STEPS, st.floats(0, 0.999))
def test_every_opening_ends_within_its_bound_and_then_a_trial_may_begin(steps: Any, draw: Any) -> None:
    world = World(breaker_of(draw))
    for what, which in steps:
        world.do(what, which)
        assert world.breaker.open_for_s(world.now_s) <= LONGEST_S
        later_s = world.now_s + LONGEST_S
        assert world.breaker.state(later_s) is not BreakerState.OPEN
    for ticket in world.running:
        world.breaker.release(ticket)
    assert world.breaker.allows_request(world.now_s + LONGEST_S)


@given(STEPS)
def test_the_success_of_a_trial_closes_it(steps: Any) -> None:
    world = World(breaker_of())
    for what, which in steps:
        world.do(what, which)
    for ticket in world.running:
        world.breaker.release(ticket)
    later_s = world.now_s + LONGEST_S
    ticket = world.breaker.begin(later_s)
    world.breaker.succeed(ticket, later_s)
    assert world.breaker.state(later_s) is BreakerState.CLOSED
    assert world.breaker.allows_request(later_s)


@given(STEPS)
def test_circuit_breaker_never_opens_without_a_failure(steps: Any) -> None:
    world = World(breaker_of())
    for what, which in steps:
        if not what.startswith("fail"):
            world.do(what, which)
    assert world.breaker.state(world.now_s) is BreakerState.CLOSED
    assert world.breaker.num_openings == 0


@given(st.integers(1, 12), st.floats(0, 0.999))
def test_each_trial_that_fails_doubles_the_backoff_up_to_its_bound(num_trials: Any, draw: Any) -> None:
    breaker, now_s = breaker_of(draw), 0.0
    for number in range(num_trials):
        fail(breaker, now_s)
        expected_s = min(POLICY.first_s * 2**number, POLICY.max_s) * (1 + POLICY.jitter * (2 * draw - 1))
        assert breaker.open_for_s(now_s) == pytest.approx(expected_s)
        now_s += breaker.open_for_s(now_s)


@given(st.floats(0.1, 5000))
def test_a_replica_is_left_alone_for_as_long_as_it_asks_up_to_a_bound(retry_after_s: Any) -> None:
    breaker = breaker_of()
    fail(breaker, 100.0, retry_after_s)
    assert breaker.open_for_s(100.0) == pytest.approx(min(retry_after_s, POLICY.max_retry_after_s))
    assert breaker.has_retry_after(100.0)
    assert not breaker.has_retry_after(100.0 + retry_after_s)


def test_many_streams_that_break_at_once_are_one_failure() -> None:
    breaker = breaker_of()
    tickets = [breaker.begin(0.0) for _ in range(500)]
    for ticket in tickets:
        breaker.fail(ticket, 1.0)
    assert breaker.num_openings == 1
    assert breaker.open_for_s(1.0) == POLICY.first_s


def test_one_failure_among_many_successes_does_not_open_it_and_three_in_a_row_do() -> None:
    breaker = breaker_of()
    for _ in range(20):
        breaker.succeed(breaker.begin(0.0), 0.0)
    for _ in range(POLICY.num_in_a_row - 1):
        fail(breaker, 0.0)
        assert breaker.state(0.0) is BreakerState.CLOSED
    fail(breaker, 0.0)
    assert breaker.state(0.0) is BreakerState.OPEN


def test_the_end_of_a_stream_that_began_before_it_opened_does_not_close_it() -> None:
    breaker = breaker_of()
    old = breaker.begin(0.0)
    fail(breaker, 0.0)
    breaker.succeed(old, 0.5)
    assert breaker.state(0.5) is BreakerState.OPEN
    forced = breaker.begin(0.5)
    assert not forced.is_trial
    breaker.succeed(forced, 0.6)
    assert breaker.state(0.6) is BreakerState.CLOSED


def test_a_trial_whose_client_leaves_makes_room_for_another() -> None:
    breaker = breaker_of()
    fail(breaker, 0.0)
    trial = breaker.begin(2.0)
    assert trial.is_trial
    assert not breaker.allows_request(2.0)
    breaker.release(trial)
    assert breaker.allows_request(2.0)
    assert breaker.state(2.0) is BreakerState.HALF_OPEN


def told_by(error: Any, status: int) -> Any:
    error.upstream = UpstreamError(status, "theirs")
    return error


@pytest.mark.parametrize(
    ("error", "kind", "retry_after_s"),
    [
        (EngineRefused("401", upstream_status=401), OutcomeKind.REFUSED, None),
        (EngineRefused("402", upstream_status=402), OutcomeKind.REFUSED, None),
        (EngineRefused("403", upstream_status=403), OutcomeKind.REFUSED, None),
        (EngineRefused("404", upstream_status=404), OutcomeKind.REFUSED, None),
        (EngineOverloaded("full", retry_after_s=7.5, asks_to_wait=True), OutcomeKind.OVERLOADED, 7.5),
        (
            EngineOverloaded("full, no time", retry_after_s=1.0, asks_to_wait=False),
            OutcomeKind.OVERLOADED,
            None,
        ),
        (Unavailable("loading", code="overloaded"), OutcomeKind.OVERLOADED, None),
        (told_by(EngineFailed("500"), 500), OutcomeKind.FAILED, None),
        (EngineFailed("cut"), OutcomeKind.BROKEN, None),
        (EngineFailed("rubbish", code="engine_protocol_violation"), OutcomeKind.BROKEN, None),
        (EngineDied("dead", in_first_step=False), OutcomeKind.BROKEN, None),
        (Unavailable("refused"), OutcomeKind.UNREACHABLE, None),
    ],
    ids=lambda value: repr(value) if isinstance(value, Exception) else None,
)
def test_every_end_of_a_request_maps_to_one_outcome(error: Any, kind: Any, retry_after_s: float | None) -> None:
    assert outcome_of(error) == Outcome(kind, retry_after_s)


@pytest.mark.parametrize(
    "error",
    [
        EngineRefused("400", upstream_status=400),
        EngineRefused("422", upstream_status=422),
        BadRequest("wrong"),
        ContextTooLong("long"),
        NotFound("model"),
        RateLimited("cap"),
        Overloaded("late", Reason.PREDICTED_LATE, retry_after_s=1),
        NonFiniteOutput("NaN"),
        Unavailable("draining", code="engine_draining"),
        Unavailable("adapter", code="adapter_missing"),
        Unavailable("the store is away", code="store_unavailable"),
    ],
    ids=repr,
)
def test_client_errors_and_scheduler_rejections_are_no_outcomes(error: Any) -> None:
    assert outcome_of(error) is None
