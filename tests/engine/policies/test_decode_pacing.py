"""Requests of worse ranks take turns if a step with all of them would violate the best rank's SLO."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moiety_engine.scheduling.policies.moiety.tuning import Tuning
from moiety_wire.classes import PRIORITY, OverloadAction, ServiceClass

MakeReplica = Callable[..., Any]

STEP_S, TOKEN_S = 0.01, 0.001  # the replica's step time: a constant, and a time per row
TIGHT = ServiceClass("tight", 0, ttft_s=1.0, tpot_s=0.03, on_overload=OverloadAction.QUEUE)
SOON = ServiceClass("soon", 0, ttft_s=0.1, tpot_s=0.03, on_overload=OverloadAction.QUEUE)
CHAT = ServiceClass("chat", 1, ttft_s=600.0, tpot_s=0.1, on_overload=OverloadAction.QUEUE)
ENDS = ServiceClass("ends", 2, completion_s=86400.0)
TUNING = Tuning()


def full_of(make_replica: MakeReplica, service: ServiceClass, *, count: int = 60, output: int = 400) -> tuple[Any, Any]:
    """Return a replica that decodes this many requests of one class."""
    replica = make_replica("moiety", num_blocks=1 << 15, budget=128, max_running=64)
    keys = [replica.add(4, tenant=f"other-{n % 3}", service=service, output=output) for n in range(count)]
    while len(replica.scheduler.queues.decoding) < count:
        replica.step()
    return replica, keys


def gaps_s(replica: Any, key: int, since_ns: int = 0) -> list[float]:
    """Return the times between a request's tokens after `since_ns`, in seconds."""
    came = [ns for ns in replica.came_ns[key] if ns >= since_ns]
    return [(b - a) / 1e9 for a, b in itertools.pairwise(came)]


@pytest.mark.parametrize("worse", [CHAT, ENDS], ids=lambda service: service.name)
def test_the_best_rank_keeps_its_pace_beside_a_full_batch_of_a_worse_rank(
    make_replica: MakeReplica, worse: ServiceClass
) -> None:
    replica, _ = full_of(make_replica, worse)
    assert 2 * TIGHT.tpot_s < STEP_S + 60 * TOKEN_S, "all of them together are too slow"
    best = replica.add(4, tenant="paying", service=TIGHT, output=100)
    while best not in replica.finishes:
        replica.step()
    assert max(gaps_s(replica, best)) <= TIGHT.tpot_s


def test_every_request_of_a_worse_rank_gets_a_token_within_a_bounded_time(
    make_replica: MakeReplica,
) -> None:
    """This holds also if decodes of the best rank alone take longer than its pace."""
    replica, worse = full_of(make_replica, ENDS, count=40)
    for _ in range(24):
        replica.add(4, tenant="paying", service=TIGHT, output=300)
    for _ in range(5):
        replica.step()
    most_steps = round(1 / TUNING.least_decode_part) + 1
    longest_step_s = STEP_S + (24 + 40 * TUNING.least_decode_part + TUNING.floor_tokens) * TOKEN_S
    begin_ns = replica.now_ns
    for _ in range(100):
        replica.step()
    for key in worse:
        gaps = gaps_s(replica, key, begin_ns)
        assert len(gaps) > 5
        assert max(gaps) <= TUNING.no_slo_token_s + most_steps * longest_step_s


def test_requests_of_worse_ranks_leave_the_steps_of_the_best_until_their_tokens_are_due(
    make_replica: MakeReplica,
) -> None:
    """They get tokens although the best rank's pace cannot be attained with them."""
    replica, worse = full_of(make_replica, ENDS, count=40)
    hasty = ServiceClass("hasty", 0, ttft_s=1.0, tpot_s=0.001, on_overload=OverloadAction.QUEUE)
    best = replica.add(4, tenant="paying", service=hasty, output=200)
    while not replica.outputs[best]:
        replica.step()
    before, begin_ns = sum(len(replica.outputs[key]) for key in worse), replica.now_ns
    while replica.now_ns - begin_ns < (TUNING.no_slo_token_s - 0.1) * 1e9:
        replica.step()
    assert sum(len(replica.outputs[key]) for key in worse) == before, "each had a token less than 0.1 s before"
    while replica.now_ns - begin_ns < 2 * TUNING.no_slo_token_s * 1e9:
        replica.step()
    assert sum(len(replica.outputs[key]) for key in worse) > before


def test_a_prompt_of_a_worse_rank_goes_on_slowly_beside_a_pace_that_cannot_be_kept(make_replica: MakeReplica) -> None:
    """A prompt of the best rank continues as usual."""
    replica, _ = full_of(make_replica, ENDS, count=40)
    hasty = ServiceClass("hasty", 0, ttft_s=1.0, tpot_s=0.001, on_overload=OverloadAction.QUEUE)
    replica.add(4000, tenant="other", service=ENDS, output=2)
    replica.step()
    best = replica.add(4, tenant="paying", service=hasty, output=60)
    while not replica.outputs[best]:
        replica.step()
    begin = len(replica.prefill_rows)
    for _ in range(3 * TUNING.steps_of_floor):
        replica.step()
    assert sorted(replica.prefill_rows[begin:])[-4:] == [0, *[TUNING.floor_tokens] * 3]
    second = replica.add(100, tenant="paying", service=hasty, output=2)
    replica.step()
    assert replica.outputs[second], "the whole prompt was computed in one step"
    assert replica.prefill_rows[-1] <= 100 + TUNING.floor_tokens


def test_requests_that_arrive_during_a_step_wait_for_a_short_step_only(make_replica: MakeReplica) -> None:
    """A class with a short TTFT limits all steps for as long as the policy remembers it."""
    replica, _ = full_of(make_replica, ENDS)
    replica.add(4, tenant="paying", service=SOON, output=2)
    for _ in range(10):
        replica.step()
    before_ns = replica.now_ns
    replica.step()
    step_s = (replica.now_ns - before_ns) / 1e9
    assert step_s <= max(TUNING.tight_ttft_part * SOON.ttft_s, STEP_S + 60 * TUNING.least_decode_part * TOKEN_S) + 1e-9
    late = replica.add(4, tenant="paying", service=SOON, output=2)
    came_ns = replica.now_ns
    while not replica.came_ns[late]:
        replica.step()
    assert (replica.came_ns[late][0] - came_ns) / 1e9 <= SOON.ttft_s


@pytest.mark.parametrize("worse", [CHAT, ENDS, PRIORITY], ids=lambda service: service.name)
def test_all_decode_in_every_step_where_no_better_rank_was_seen(make_replica: MakeReplica, worse: ServiceClass) -> None:
    replica, keys = full_of(make_replica, worse, output=30)
    before = {key: len(replica.outputs[key]) for key in keys}
    for _ in range(10):
        replica.step()
    assert all(len(replica.outputs[key]) == before[key] + 10 for key in keys)


def test_the_best_rank_is_forgotten_and_all_decode_again(make_replica: MakeReplica) -> None:
    replica, keys = full_of(make_replica, ENDS)
    best = replica.add(4, tenant="paying", service=SOON, output=4)
    while best not in replica.finishes:
        replica.step()
    replica.wait(TUNING.remembered_s + 1)
    for _ in range(200):  # a mean of steps is kept, and refreshed once a second
        replica.step()
    before = {key: len(replica.outputs[key]) for key in keys}
    for _ in range(10):
        replica.step()
    assert all(len(replica.outputs[key]) == before[key] + 10 for key in keys)


@given(data=st.data())
def test_turns_take_all_of_the_best_rank_a_least_part_of_the_others_and_no_more_than_fits(
    make_replica: MakeReplica, data: st.DataObject
) -> None:
    num_worse = data.draw(st.integers(1, 63), label="worse")
    num_best = data.draw(st.integers(0, 64 - num_worse), label="best")
    waited_s = data.draw(st.sampled_from([0.0, 0.1, 0.3, 2.0]), label="waited_s")
    tpot_s = data.draw(st.floats(0.001, 0.2), label="tpot_s")
    service = ServiceClass("best", 0, ttft_s=data.draw(st.floats(0.01, 2.0), label="ttft_s"), tpot_s=tpot_s)
    replica, worse = full_of(make_replica, ENDS, count=num_worse, output=4000)
    for _ in range(num_best):
        replica.add(1, tenant="paying", service=service, output=4000)
    while len(replica.scheduler.queues.decoding) < num_worse + num_best and not replica.refused:
        replica.step()
    scheduler = replica.scheduler
    decoding = list(scheduler.queues.decoding.values())
    now_s = replica.now_ns / 1e9 + waited_s
    num_context = sum(chunk.sequence.kv.num_computed for chunk in decoding)
    taken = scheduler.policy.decodes_of_step(decoding, num_context, now_s)
    assert [chunk for chunk in decoding if chunk in taken] == taken, "a part of them, in their order"
    ranks = [chunk.sequence.service.rank for chunk in taken]
    assert ranks.count(0) == sum(chunk.sequence.service.rank == 0 for chunk in decoding)
    num_due = sum(now_s - replica.came_ns[key][-1] / 1e9 > TUNING.no_slo_token_s + 1e-6 for key in worse)
    least = num_worse * TUNING.least_decode_part
    assert ranks.count(2) >= (min(num_due, least) if num_best else least)
    if num_best and len(taken) < len(decoding):
        limit_s = min(TUNING.decode_part * tpot_s, TUNING.tight_ttft_part * (service.ttft_s or 0))
        took_s = STEP_S + len(taken) * TOKEN_S
        assert took_s <= limit_s + 2e-3 or ranks.count(2) <= num_worse * TUNING.least_decode_part + 1


def test_answers_are_the_same_whoever_takes_turns(make_replica: MakeReplica) -> None:
    replica, keys = full_of(make_replica, ENDS, output=60)
    best = [replica.add(4, tenant="paying", service=TIGHT, output=60) for _ in range(4)]
    replica.run()
    for key in (*keys, *best):
        assert replica.outputs[key] == [*range(100, 159), 7]
