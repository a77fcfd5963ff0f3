"""Plans of expert placements, in the caller's thread and in a process beside it."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
from collections.abc import Iterator
from typing import Any, NoReturn

import numpy as np
import psutil
import pytest
from tests.conftest import wait_for

from moiety_engine.moe.balancer import Balancer
from moiety_engine.moe.move_planner import InlinePlanner, PlacementPlanner, PlanFailed, PlannedMove, PlanRequest
from moiety_engine.moe.planner_process import PlannerProcess
from moiety_placement.placement_table import Ints, Placement

EXPERTS, RANKS, LAYERS, EVERY_S = 8, 2, 6, 60.0


def in_order() -> Placement:
    row = [0, 1, 2, 3, 4, 4, 5, 6, 7, 0]
    return Placement.of([row] * LAYERS, num_experts=EXPERTS, num_ranks=RANKS)


def skewed() -> Ints:
    rng, popularity_E = np.random.default_rng(0), (1000 * np.arange(1, EXPERTS + 1) ** -1.5).astype(np.int64)
    return np.stack([rng.permutation(popularity_E) for _ in range(LAYERS)])


def request() -> PlanRequest:
    return PlanRequest.of(in_order(), skewed(), move_cost=0.01, most_writes=2)


def planned(planner: PlacementPlanner) -> list[PlannedMove]:
    planner.begin(request())
    moves: list[list[PlannedMove]] = []

    def has_come() -> bool:
        found = planner.take()
        moves.extend([] if found is None else [found])
        return found is not None

    wait_for(has_come, "a plan")
    return moves[0]


@pytest.fixture
def process() -> Iterator[PlannerProcess]:
    with contextlib.closing(PlannerProcess()) as planner:
        yield planner


def child() -> psutil.Process:
    (found,) = (one for one in psutil.Process().children() if "moiety_engine.moe.planner_process" in one.cmdline())
    return found


def test_a_process_plans_what_the_thread_plans_one_request_after_the_other(process: PlannerProcess) -> None:
    expected = planned(InlinePlanner())
    assert expected
    assert planned(process) == expected
    first = child().pid
    assert planned(process) == expected
    assert child().pid == first
    process.close()
    assert not psutil.pid_exists(first)


def test_a_process_that_was_killed_fails_its_plan_and_is_started_again_for_the_next(process: PlannerProcess) -> None:
    expected = planned(process)
    os.kill(child().pid, signal.SIGSTOP)  # so that it answers nothing more
    process.begin(request())
    assert process.take() is None
    os.kill(child().pid, signal.SIGKILL)
    with pytest.raises(PlanFailed, match="plans the placement of experts failed"):
        wait_for(lambda: process.take() is not None, "a plan")
    assert planned(process) == expected


class Failing:
    """Planner that fails."""

    def begin(self, _: PlanRequest) -> None: ...

    def take(self) -> list[PlannedMove] | None:
        raise PlanFailed("no luck")

    def close(self) -> None: ...


@pytest.mark.parametrize("in_process", [False, True])
def test_a_balancer_moves_to_the_same_placement_with_each_planner(process: PlannerProcess, in_process: bool) -> None:
    placements = []
    for planner in (None, process if in_process else InlinePlanner()):
        balancer = Balancer(in_order(), every_s=EVERY_S, most_writes=2, now_s=0.0, planner=planner)
        balancer.count(skewed())
        assert balancer.evaluate(EVERY_S, 0.01)

        def carry_out(balancer: Balancer = balancer) -> bool:
            if balancer.next_move() is not None:
                balancer.complete_move()
            return not balancer.is_moving

        wait_for(carry_out, "the last move")
        assert balancer.rebalances_total == 1
        placements.append(balancer.placement.physical_to_logical_LR.tolist())
    assert placements[0] == placements[1] != in_order().physical_to_logical_LR.tolist()


def test_experts_stay_where_they_are_if_a_plan_fails() -> None:
    balancer = Balancer(in_order(), every_s=EVERY_S, most_writes=2, now_s=0.0, planner=Failing())
    balancer.count(skewed())
    assert balancer.evaluate(EVERY_S, 0.01)
    assert balancer.next_move() is None
    assert not balancer.is_moving
    assert balancer.rebalances_total == 0
    assert np.array_equal(balancer.placement.physical_to_logical_LR, in_order().physical_to_logical_LR)


def test_a_cancelled_move_leaves_the_placement_of_the_completed_ones() -> None:
    balancer = Balancer(in_order(), every_s=EVERY_S, most_writes=1, now_s=0.0)
    balancer.count(skewed())
    assert balancer.evaluate(EVERY_S, 0.01)
    assert balancer.next_move() is not None
    balancer.complete_move()
    before = balancer.placement.physical_to_logical_LR.copy()
    assert balancer.next_move() is not None and balancer.is_moving
    balancer.cancel_moves()
    assert not balancer.is_moving
    assert np.array_equal(balancer.placement.physical_to_logical_LR, before)
    assert not np.array_equal(before, in_order().physical_to_logical_LR)
    balancer.count(skewed())
    assert balancer.evaluate(2 * EVERY_S, 0.01), "it goes on with the next load"


def test_experts_stay_where_they_are_if_no_process_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> NoReturn:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(socket, "socketpair", fail)
    planner = PlannerProcess()
    planner.begin(request())
    with pytest.raises(PlanFailed, match="Too many open files"):
        planner.take()
    assert planner.take() is None
