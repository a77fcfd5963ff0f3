"""The figures of fairness, against cases made up by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from moiety_engine.simulator.devices import SimulatedDevice
from moiety_engine.simulator.driver import Driver
from moiety_engine.simulator.fairness import (
    accumulated_gap,
    evenness,
    largest_gap,
    measure_fairness,
    window_differences,
)
from moiety_wire.classes import STANDARD
from moiety_workload.generators import generate


def gap(first: list[int], second: list[int], *backlogged: list[int]) -> float:
    service = np.array([first, second], dtype=float).T
    return largest_gap(service, np.array(backlogged, dtype=bool).T)


def test_the_gap_grows_only_while_both_are_backlogged() -> None:
    first, second = [0, 10, 20, 30, 40], [0, 10, 10, 10, 10]
    assert gap(first, second, [1] * 5, [1] * 5) == 30
    assert gap(first, second, [1] * 5, [1, 1, 1, 0, 0]) == 10
    assert gap(first, second, [1] * 5, [0] * 5) == 0


def test_the_gap_is_taken_between_any_two_moments_of_one_stretch() -> None:
    ahead_then_behind = [0, 8, 8, 8, 8], [0, 0, 5, 10, 14]  # +8, then down to -6
    assert gap(*ahead_then_behind, [1] * 5, [1] * 5) == 14
    assert gap(*ahead_then_behind, [1, 1, 0, 1, 1], [1] * 5) == 9  # the stretches: 0 … +8, and +3 … -6


def test_a_tenants_share_is_held_against_what_others_got_in_the_same_moments() -> None:
    together = np.array([[10, 10], [20, 20], [20, 60], [20, 100]], dtype=float)  # then the second alone, and faster
    backlogged = np.array([[1, 1], [1, 1], [0, 1], [0, 1]], dtype=bool)
    weights = np.ones(2)
    assert evenness(together, backlogged, weights, 1) == pytest.approx(1.0)
    lopsided = np.array([[30, 10], [60, 20], [60, 60], [60, 100]], dtype=float)
    assert evenness(lopsided, backlogged, weights, 1) == pytest.approx(2.0**2 / (2 * (1.5**2 + 0.5**2)))
    assert evenness(lopsided, backlogged, weights, 3) is None


def request(tenant: str, arrival_s: float, first_s: float, last_s: float, cost: int) -> SimpleNamespace:
    return SimpleNamespace(
        request=SimpleNamespace(tenant=tenant, input_tokens=cost, output_tokens=0, arrival_s=arrival_s),
        arrival_ns=round(arrival_s * 1e9),
        first_ns=round(first_s * 1e9),
        last_ns=round(last_s * 1e9),
        completed=True,
    )


def test_the_window_difference_is_the_lesser_of_what_others_got_and_what_was_left_undone() -> None:
    # From 28.5 s on, a gets 100 tokens a second; b gets 40 of the 100 that it asks for, c all of its 10.
    steady = [request("a", at, at, at + 1, 100) for at in range(600)]
    steady += [request("b", at, at, at + 1, 100 if at % 5 < 2 else 0) for at in range(600)]
    unserved = [request("b", at, 3000 + at, 3001 + at, 0 if at % 5 < 2 else 100) for at in range(600)]
    little = [request("c", at, at, at + 1, 10) for at in range(600)]
    differences = window_differences([*steady, *unserved, *little], 600.0)
    assert len(differences) == 19
    assert differences[0] == pytest.approx(60, rel=0.06)


def test_a_request_that_was_turned_away_got_no_service() -> None:
    rejected = request("a", 100.0, 0.0, 0.0, 600)
    rejected.completed = False
    assert max(window_differences([rejected], 600.0)) == 0


def test_the_accumulated_gap_is_between_the_most_and_the_least_served_since_the_start() -> None:
    steady = [request("a", at, at, at + 1, 100) for at in range(600)]
    late = [request("b", at, at, at + 1, 50) for at in range(300, 600)]
    assert accumulated_gap([*steady, *late], 600.0) == pytest.approx(583 * 100 - 283 * 50, rel=0.01)


def test_weighted_service_of_unequal_tenants_is_compared_by_weight(small: SimulatedDevice) -> None:
    stream = "constant:rate=60,input=64,output=8,tenant="
    workload = generate(f"{stream}a;{stream}b", 40, 0)
    run = Driver(workload, small, "fcfs", {"standard": STANDARD}, drain=False).run()
    even = measure_fairness(run, small.kv_tokens)
    assert even["jain"] == pytest.approx(1.0, abs=0.01)
    assert even["bound"] == 2 * 2 * small.kv_tokens
    run.tenants[0].weight = 4.0
    uneven = measure_fairness(run, small.kv_tokens)
    assert uneven["jain"] < 0.8
    assert uneven["max_gap"] > 4 * even["max_gap"]
