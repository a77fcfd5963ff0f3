"""Requests of spot classes get what no other class needs, give way at once, and lose no token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.policies.conftest import TOKEN_S

from moiety_wire.classes import BATCH, FLEX, PRIORITY, STANDARD, OverloadAction, ServiceClass
from moiety_wire.trace_events import EventKind

MakeReplica = Callable[..., Any]

SPOT = ServiceClass("spot", 9, completion_s=86_400.0, max_queue_s=1.0, on_overload=OverloadAction.QUEUE, spot=True)
PATIENT = ServiceClass("patient", 2, completion_s=86_400.0, on_overload=OverloadAction.QUEUE)
OTHERS = {service.name: service for service in (PRIORITY, STANDARD, FLEX, BATCH)}


def spot_batch(make_replica: MakeReplica, count: int, *, output: int = 400, **more: Any) -> tuple[Any, list[int]]:
    """Return a replica that decodes this many spot requests."""
    replica = make_replica("moiety", **more)
    keys = [replica.add(4, tenant=f"spot-{n % 2}", service=SPOT, output=output) for n in range(count)]
    while len(replica.scheduler.queues.decoding) < count:
        replica.step()
    return replica, keys


def tokens_of(count: int) -> list[int]:
    return [100 + position for position in range(count)]


def check_answers(replica: Any) -> None:
    """Run to the end, and check that no answer has lost or repeated a token."""
    replica.run(20_000)
    for key, wanted in replica.wanted.items():
        if key not in replica.refused:
            assert replica.outputs[key][:-1] == tokens_of(wanted - 1), key


def test_spot_requests_use_an_idle_engine(make_replica: MakeReplica) -> None:
    replica, _ = spot_batch(make_replica, 8, output=20)
    check_answers(replica)


@pytest.mark.parametrize("other", [PRIORITY, PATIENT], ids=lambda service: service.name)
def test_no_spot_request_is_in_a_step_while_another_class_waits(make_replica: MakeReplica, other: ServiceClass) -> None:
    replica, spots = spot_batch(make_replica, 4, budget=16)
    key = replica.add(200, tenant="paying", service=other, output=2)
    before = {spot: len(replica.outputs[spot]) for spot in spots}
    more = replica.add(64, tenant="spot-0", service=SPOT, output=4)
    while not replica.outputs[key]:
        replica.step()
        assert more not in replica.started, "a spot prompt went before"
    assert {spot: len(replica.outputs[spot]) for spot in spots} == before
    check_answers(replica)


def test_a_full_batch_of_spot_requests_makes_room_in_the_next_step(make_replica: MakeReplica) -> None:
    replica, spots = spot_batch(make_replica, 8, max_running=8)
    key = replica.add(4, tenant="paying", service=PATIENT, output=3)
    replica.step()
    assert replica.prefills[-1] == [key], "it waited for a spot request"
    running = [s.key for s in replica.scheduler.queues.running]
    assert sum(spot in running for spot in spots) == 7
    check_answers(replica)


def test_spot_requests_give_up_their_memory_as_often_as_others_need_it(make_replica: MakeReplica) -> None:
    replica, spots = spot_batch(make_replica, 2, output=70, num_blocks=24, max_running=16)
    for _ in range(14):
        key = replica.add(60, tenant="paying", service=PATIENT, output=2)
        replica.step()
        assert key in replica.prefills[-1], "it waited for the memory of a spot request"
        while key not in replica.finishes:
            replica.step()
        for _ in range(3):
            replica.step()
    check_answers(replica)
    preempted = [replica.events(spot).count(EventKind.PREEMPTED) for spot in spots]
    assert max(preempted) > 2


def test_a_spot_request_is_never_boosted(make_replica: MakeReplica) -> None:
    replica = make_replica("moiety", budget=8)
    spot = replica.add(8, tenant="spot", service=SPOT, output=2)
    for _ in range(40):
        replica.add(64, tenant="paying", service=BATCH, output=1)
    replica.wait(60.0)  # longer than `max_queue_s` and than any tenant goes without service
    check_answers(replica)
    assert EventKind.BOOSTED not in replica.events(spot)
    assert replica.started[-1] == spot


def test_spot_rows_leave_the_pace_of_others_within_their_slo(make_replica: MakeReplica) -> None:
    """A row takes 1 ms here, so that a step with all spot requests would take more than twice the TPOT of the class."""
    strict = ServiceClass("strict", 0, ttft_s=1.0, tpot_s=0.03, on_overload=OverloadAction.QUEUE)
    replica, spots = spot_batch(make_replica, 60, num_blocks=1 << 15, budget=128, max_running=64, output=200)
    key = replica.add(4, tenant="paying", service=strict, output=100)
    while not replica.outputs[key]:
        replica.step()
    counts = {spot: len(replica.outputs[spot]) for spot in spots}
    begun_ns = replica.now_ns
    while key not in replica.finishes:
        replica.step()
    mean_s = (replica.now_ns - begun_ns) / 1e9 / 99
    assert mean_s <= 0.03
    gained = [len(replica.outputs[spot]) - counts[spot] for spot in spots if spot not in replica.finishes]
    assert max(gained) - min(gained) <= 2, "spot requests take turns"
    check_answers(replica)


@pytest.mark.parametrize("num_paying", [1, 20])
def test_spot_rows_and_prompts_together_make_a_step_at_most_half_as_long_again(
    make_replica: MakeReplica, num_paying: int
) -> None:
    """Spot requests decode and their prompts wait, while others only decode, without an SLO that limits the step."""
    replica, _ = spot_batch(make_replica, 60, num_blocks=1 << 15, budget=512, max_running=256, output=300)
    paying = [replica.add(4, tenant="paying", service=PATIENT, output=120) for _ in range(num_paying)]
    while not all(replica.outputs[key] for key in paying):
        replica.step()
    for n in range(60):
        replica.add(200, tenant=f"spot-{n % 3}", service=SPOT, output=300)
    alone_s = replica.step_s + TOKEN_S * num_paying
    floor_s = TOKEN_S * replica.scheduler.policy.tuning.floor_tokens
    took_s, num_prompt_rows = [], 0
    while not any(key in replica.finishes for key in paying):
        begun_ns = replica.now_ns
        replica.step()
        took_s.append((replica.now_ns - begun_ns) / 1e9)
        num_prompt_rows += replica.prefill_rows[-1]
    assert max(took_s) <= 1.5 * alone_s + floor_s + TOKEN_S
    assert num_prompt_rows, "the prompts got nothing"
    assert sum(took_s) / len(took_s) > 1.2 * alone_s, "the spot requests got nothing"
    replica.run(20_000)


Arrival = tuple[int, int, int, str]


@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 20), st.integers(1, 60), st.integers(1, 20), st.sampled_from(sorted(OTHERS))),
        min_size=1,
        max_size=8,
    ),
    num_spots=st.integers(1, 8),
    num_blocks=st.integers(64, 200),
)
def test_spot_load_delays_no_first_token_by_more_than_the_step_that_runs(
    make_replica: MakeReplica, arrivals: list[Arrival], num_spots: int, num_blocks: int
) -> None:
    """In steps, the first token of a request of another class comes at most one later than without spot load.

    Each other request can end one step later as well, and so give up its memory one step later.
    """

    def first_steps(spots: int) -> list[int | None]:
        replica = make_replica("moiety", num_blocks=num_blocks, max_running=8)
        for n in range(spots):
            replica.add(8, tenant=f"spot-{n % 3}", service=SPOT, output=30)
        for _ in range(12):
            replica.step() if replica.scheduler.queues.by_key else replica.wait(0.02)
        keys: list[int] = []
        steps: dict[int, int] = {}
        due = sorted(arrivals)
        for step in range(400):
            while due and due[0][0] <= step:
                _, prompt, output, name = due.pop(0)
                keys.append(replica.add(prompt, tenant="paying", service=OTHERS[name], output=output))
            if not due and all(key in steps or key in replica.refused for key in keys):
                break
            replica.step() if replica.scheduler.queues.by_key else replica.wait(0.02)
            steps |= {key: step for key in keys if key not in steps and replica.outputs[key]}
        check_answers(replica)
        return [steps.get(key) for key in keys]

    alone, beside = first_steps(0), first_steps(num_spots)
    for without, with_spot in zip(alone, beside, strict=True):
        if without is not None and with_spot is not None:
            assert with_spot <= without + len(arrivals)
