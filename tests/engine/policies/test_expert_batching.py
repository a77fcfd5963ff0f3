"""Decodes are chosen by their experts only where the deadlines leave the order open, and nobody waits much longer."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moiety_engine.config import EngineConfig, PolicyName
from moiety_engine.errors import InvalidConfig
from moiety_engine.scheduling.policies.moiety.expert_batching import (
    MAX_BEHIND,
    MAX_PASSED_OVER,
    TenantTurns,
    choose_by_experts,
    union_of,
)
from moiety_engine.scheduling.policies.moiety.tuning import Tuning
from moiety_wire.classes import OverloadAction, ServiceClass
from moiety_wire.engine_choices import Batching

MakeReplica = Callable[..., Any]

STEP_S, TOKEN_S = 0.01, 0.001
PACE_S = 0.03
TIGHT = ServiceClass("tight", 0, ttft_s=1.0, tpot_s=PACE_S, on_overload=OverloadAction.QUEUE)
CHAT = ServiceClass("chat", 1, ttft_s=600.0, tpot_s=0.1, on_overload=OverloadAction.QUEUE)
ENDS = ServiceClass("ends", 2, completion_s=86400.0)
TUNING = Tuning()


@given(
    st.integers(0, 2**20),
    st.lists(st.integers(0, 2**20), max_size=40).flatmap(
        lambda some: st.tuples(st.just(some), st.integers(0, len(some)))
    ),
)
def test_so_many_are_chosen_each_once_and_unknown_ones_first(used: int, asked: tuple[list[int], int]) -> None:
    candidates, count = asked
    chosen = choose_by_experts(used, candidates, count)
    assert chosen == sorted(set(chosen))
    assert len(chosen) == count
    unknown = [place for place, one in enumerate(candidates) if not one]
    assert set(unknown[:count]) <= set(chosen)


def test_those_that_add_fewest_experts_are_chosen_and_each_choice_counts_for_the_next() -> None:
    assert choose_by_experts(0b0011, [0b1100, 0b0011, 0b0110, 0b0001], 3) == [1, 2, 3]
    # two requests with the same new experts cost less than two with different ones
    assert choose_by_experts(0, [0b000111, 0b111000, 0b000111, 0b110001], 2) == [0, 2]
    assert choose_by_experts(0b1, [0b10, 0b10, 0b10], 2) == [0, 1], "among equals the earliest deadline"
    assert choose_by_experts(0, [0b0011, 0b1100] * 10, 10) == list(range(0, 20, 2)), "one group, not a half of each"


def start(make_replica: MakeReplica, worse: ServiceClass, *, on: bool) -> tuple[Any, int, list[int]]:
    """Return a replica with a request of the best rank and 60 worse ones, half of them with each of two experts."""
    replica = make_replica("moiety", num_blocks=1 << 15, budget=128, max_running=64, batches_experts=on)
    keys = [replica.add(4, tenant=f"other-{n % 3}", service=worse, output=500) for n in range(60)]
    while len(replica.scheduler.queues.decoding) < 60:
        replica.step()
    best = replica.add(4, tenant="paying", service=TIGHT, output=350)
    while not replica.outputs[best]:
        replica.step()
    return replica, best, keys


def run_steps(replica: Any, keys: list[int], num_steps: int) -> list[int]:
    """Run steps; before each, requests get an expert by their number. Return the experts of each step's decodes."""
    counts = []
    for _ in range(num_steps):
        for key in keys:
            sequence = replica.scheduler.queues.by_key.get(key)
            if sequence is not None:
                sequence.experts.predicted = 0b111 << 3 * (key % 10)
        before = {key: len(replica.outputs[key]) for key in keys}
        replica.step()
        ran = [key for key in keys if len(replica.outputs[key]) > before[key]]
        counts.append(union_of(0b111 << 3 * (key % 10) for key in ran).bit_count())
    return counts


def gaps_s(replica: Any, key: int, since_ns: int) -> list[float]:
    came = [ns for ns in replica.came_ns[key] if ns >= since_ns]
    return [(b - a) / 1e9 for a, b in itertools.pairwise(came)]


@pytest.mark.parametrize("worse", [CHAT, ENDS], ids=lambda service: service.name)
def test_steps_use_fewer_experts_at_the_same_pace_of_everybody(make_replica: MakeReplica, worse: ServiceClass) -> None:
    means, totals = dict[bool, float](), dict[bool, int]()
    longest, best_gaps = dict[bool, float](), dict[bool, float]()
    for on in (False, True):
        replica, best, keys = start(make_replica, worse, on=on)
        begin_ns = replica.now_ns
        counts = run_steps(replica, keys, 200)
        means[on] = sum(counts) / len(counts)
        totals[on] = sum(len(replica.outputs[key]) for key in keys)
        longest[on] = max(max(gaps_s(replica, key, begin_ns)) for key in keys)
        best_gaps[on] = max(gaps_s(replica, best, begin_ns))
    assert means[True] < 0.9 * means[False]
    assert totals[True] == pytest.approx(totals[False], rel=0.01)
    assert best_gaps[True] <= max(best_gaps[False], PACE_S)
    # the tokens of both classes are wanted this long after the one before, since first tokens came long before theirs
    assert longest[True] <= TUNING.no_slo_token_s + 2 * PACE_S


def test_a_request_that_shares_no_experts_is_passed_over_a_few_times_at_most(make_replica: MakeReplica) -> None:
    replica, _, keys = start(make_replica, ENDS, on=True)
    alone, rng = keys[0], random.Random(0)
    begin_ns, longest = replica.now_ns, 0
    for _ in range(300):
        for key in keys[1:]:
            replica.scheduler.queues.by_key[key].experts.predicted = 0b1111
        replica.scheduler.queues.by_key[alone].experts.predicted = rng.getrandbits(60) << 8 | 1 << 8
        replica.step()
        longest = max(longest, *(one.experts.num_passed_over for one in replica.scheduler.queues.by_key.values()))
    assert 0 < longest <= MAX_PASSED_OVER
    assert max(gaps_s(replica, alone, begin_ns)) <= TUNING.no_slo_token_s + 2 * PACE_S


def turns_of_tenants(make_replica: MakeReplica, experts: dict[str, Callable[[], int]], *, on: bool) -> dict[str, int]:
    """Return the tokens of two tenants with 30 requests each in 300 steps, and the experts that these steps used."""
    replica = make_replica("moiety", num_blocks=1 << 15, budget=128, max_running=64, batches_experts=on)
    tenants = list(experts)
    keys = {replica.add(4, tenant=tenants[n % 2], service=ENDS, output=500): tenants[n % 2] for n in range(60)}
    while len(replica.scheduler.queues.decoding) < 60:
        replica.step()
    best, found = replica.add(4, tenant="paying", service=TIGHT, output=450), dict.fromkeys((*tenants, "experts"), 0)
    while not replica.outputs[best]:
        replica.step()
    for _ in range(300):
        predicted = {key: experts[tenant]() for key, tenant in keys.items()}
        for key, one in predicted.items():
            replica.scheduler.queues.by_key[key].experts.predicted = one
        before = {key: len(replica.outputs[key]) for key in keys}
        replica.step()
        ran = [key for key in keys if len(replica.outputs[key]) > before[key]]
        found["experts"] += union_of(predicted[key] for key in ran).bit_count()
        for key in ran:
            found[keys[key]] += 1
    return found


def test_a_tenant_whose_requests_use_other_experts_keeps_its_share_of_the_turns(make_replica: MakeReplica) -> None:
    rng = random.Random(0)
    experts = {"crowd": lambda: 0b1111, "odd": lambda: rng.getrandbits(60) << 8 | 1 << 8}
    found = turns_of_tenants(make_replica, experts, on=True)
    assert found["odd"] >= found["crowd"] - 3 * MAX_BEHIND, "less than half of it without a bound"


def test_tenants_with_experts_of_their_own_take_turns_step_by_step(make_replica: MakeReplica) -> None:
    experts = {"one": lambda: 0b1111, "other": lambda: 0b1111 << 8}
    off, on = (turns_of_tenants(make_replica, experts, on=on) for on in (False, True))
    assert on["experts"] < 0.8 * off["experts"]
    assert abs(on["one"] - on["other"]) <= 3 * MAX_BEHIND


@given(st.lists(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), min_size=1, max_size=12), max_size=60))
def test_a_tenant_is_behind_once_it_has_lost_turns_and_no_longer_once_it_got_them(
    steps: list[list[tuple[str, bool]]],
) -> None:
    turns, lost = TenantTurns(), 0.0
    for step in steps:
        tenants, taken = [tenant for tenant, _ in step], [tenant for tenant, has_turn in step if has_turn]
        turns.count_step(tenants, taken)
        share = len(taken) / len(step) * tenants.count("a")
        lost = max(0.0, lost + share - taken.count("a")) if "a" in tenants else 0.0
        assert not turns.is_behind("a") or lost >= MAX_BEHIND - 1e-6
    for _ in range(int(3 * MAX_BEHIND)):
        turns.count_step("ab", "a")
    assert turns.is_behind("b") and not turns.is_behind("a")
    for _ in range(int(3 * MAX_BEHIND)):
        turns.count_step("ab", "b")
    assert not turns.is_behind("b")


@pytest.mark.parametrize("wrong", [{"policy": PolicyName.FCFS}, {"batching": Batching.PADDED}])
def test_it_is_refused_where_nothing_chooses_the_decodes_of_a_step(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig, match="--expert-batching needs"):
        EngineConfig(model="m", name="m", expert_batching=True, **wrong)
