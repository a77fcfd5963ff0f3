"""The order in which our own policy serves, and how much of the queue a tenant may have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from moiety_wire.classes import FLEX, OverloadAction, ServiceClass
from moiety_wire.messages import EventKind

MakeReplica = Callable[..., Any]


def stream(ttft_s: float) -> ServiceClass:
    return ServiceClass(f"stream-{ttft_s}", 0, ttft_s=ttft_s, on_overload=OverloadAction.QUEUE)


def test_a_tenant_that_was_served_less_is_not_put_off_for_being_late(make_replica: MakeReplica) -> None:
    replica = make_replica("moiety", budget=8)
    greedy = [replica.add(32, tenant="greedy", service=stream(60.0)) for _ in range(20)]
    for _ in range(12):
        replica.step()
    late = replica.add(40, tenant="modest", service=stream(0.01))
    replica.run()
    assert EventKind.RELEGATED in replica.events(late)
    assert replica.started.index(late) <= 5, "the other tenant's requests that are in time went before"
    assert len(replica.started) == len(greedy) + 1


def test_of_one_tenant_what_is_late_comes_after_what_is_not(make_replica: MakeReplica) -> None:
    replica = make_replica("moiety", budget=8)
    late = replica.add(40, service=stream(0.01))
    others = [replica.add(16, service=stream(60.0)) for _ in range(6)]
    replica.run()
    assert replica.started == [*others, late]


@pytest.mark.parametrize(("length", "goes_on"), [(100, True), (1000, False)])
def test_a_prompt_that_has_begun_goes_on_first_if_little_of_it_is_left(
    make_replica: MakeReplica, length: int, goes_on: bool
) -> None:
    replica = make_replica("moiety", budget=8)
    begun = replica.add(length, tenant="a", service=stream(60.0))
    other = replica.add(8, tenant="b", service=stream(60.0))
    replica.step()
    replica.step()
    assert replica.prefills[:2] == [[begun], [begun if goes_on else other]]
    replica.run()


def test_a_tenant_may_have_twice_the_places_that_are_left_in_the_queue(make_replica: MakeReplica) -> None:
    replica = make_replica("moiety", max_waiting=12)
    greedy = [replica.add(4, tenant="greedy", service=FLEX) for _ in range(12)]
    modest = [replica.add(4, tenant="modest", service=FLEX) for _ in range(12)]
    assert [key for key in greedy if key not in replica.refused] == greedy[:8]
    assert [key for key in modest if key not in replica.refused] == modest[:3]
    assert replica.scheduler.tally.of("flex").rejected == {"tenant_queue_full": 13}
    replica.run()
    assert replica.add(4, tenant="greedy", service=FLEX) not in replica.refused


def test_under_overload_a_rank_of_mixed_promises_keeps_more_of_them_by_work_than_by_deadline(
    make_replica: MakeReplica,
) -> None:
    late = {}
    for policy in ("moiety", "edf"):
        replica = make_replica(policy, budget=64, max_running=32)
        job = ServiceClass("job", 0, completion_s=60.0, on_overload=OverloadAction.QUEUE)
        keys = []
        for second in range(120):  # 900 tokens a second fit, 1,640 come
            replica.now_ns = max(replica.now_ns, (1000 + second) * 10**9)
            keys += [replica.add(1400, service=job), *(replica.add(20, service=job) for _ in range(9))]
            keys += [replica.add(20, service=stream(30.0)) for _ in range(3)]
            while replica.now_ns < (1001 + second) * 10**9 and not replica.scheduler.idle:
                replica.step()
        begun_ns = {key: (1000 + index // 13) * 10**9 for index, key in enumerate(keys)}
        replica.run(20_000)
        late[policy] = sum(
            replica.came_ns[key][-1] - begun_ns[key] > (30 if index % 13 > 9 else 60) * 10**9
            for index, key in enumerate(keys)
        )
    assert late["moiety"] <= 120, "more than the long jobs were late"
    assert late["moiety"] < late["edf"] / 2
