"""The fair share of a tenant with few requests while another tenant of its rank floods the replica."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from moiety_wire.classes import BATCH, FLEX, PRIORITY, STANDARD, OverloadAction, ServiceClass
from moiety_wire.trace_events import EventKind, Reason

MakeReplica = Callable[..., Any]

PATIENT = ServiceClass("patient", 0, ttft_s=3600.0, max_queue_s=1.0, on_overload=OverloadAction.QUEUE)
CHAT = ServiceClass("chat", 0, ttft_s=600.0, tpot_s=0.1, on_overload=OverloadAction.QUEUE)


def greedy_running(replica: Any) -> int:
    return sum(sequence.request.tenant == "greedy" for sequence in replica.scheduler.queues.running)


@pytest.mark.parametrize("steps_before", [20, 92, 128, 188])
def test_a_tenant_with_nothing_gets_blocks_at_once_though_others_hold_them_all_and_wait_for_more(
    make_replica: MakeReplica, steps_before: int
) -> None:
    """This holds also if the other requests were preempted, have waited too long, and want every block that is
    freed."""
    replica = make_replica("moiety", num_blocks=64, max_running=32)
    greedy = [replica.add(8, tenant="greedy", service=PATIENT, output=36) for _ in range(80)]
    for _ in range(steps_before):
        replica.step()
    modest = replica.add(8, tenant="modest", service=PATIENT, output=36)
    for _ in range(5):
        replica.step()
    assert modest in replica.started
    replica.run()
    assert all(len(replica.outputs[key]) == 36 for key in (*greedy, modest))


def test_requests_preempted_for_a_new_tenant_have_the_reason_over_share(make_replica: MakeReplica) -> None:
    replica = make_replica("moiety", num_blocks=64, max_running=32)
    greedy = [replica.add(8, tenant="greedy", service=PATIENT, output=36) for _ in range(80)]
    for number in range(12):
        for _ in range(6):
            replica.step()
        replica.add(8, tenant=f"modest-{number % 3}", service=PATIENT, output=36)
    replica.run()
    events = [event for key in greedy for event in replica.finishes[key].events if event.kind is EventKind.PREEMPTED]
    assert Reason.OVER_SHARE in {event.reason for event in events}


def test_a_tenant_that_floods_the_batch_leaves_places_while_another_is_there_and_takes_all_alone(
    make_replica: MakeReplica,
) -> None:
    """A decoding request makes each step 1 ms longer, so that the prompts of others wait for places and for steps."""
    replica = make_replica("moiety", num_blocks=4096, max_running=32)
    other = replica.add(8, tenant="modest", service=CHAT, output=40)
    flood = [replica.add(4, tenant="greedy", service=CHAT, output=40) for _ in range(100)]
    most = 0
    while other not in replica.finishes:
        replica.step()
        most = max(most, greedy_running(replica))
    assert 12 <= most <= 16, "half of the places are its share"
    while flood[60] not in replica.started:
        replica.step()
        most = max(most, greedy_running(replica))
    assert most == 32
    replica.run()


@pytest.mark.parametrize("num_preempted", [0, 2])
def test_short_requests_of_a_better_rank_find_a_place_however_many_came_before(
    make_replica: MakeReplica, num_preempted: int
) -> None:
    """This holds also if each running stream has been preempted as often as is allowed."""
    replica = make_replica("moiety", num_blocks=4096, max_running=8)
    streams = [replica.add(4, tenant="greedy", service=BATCH, output=900) for _ in range(20)]
    while len(replica.scheduler.queues.decoding) < 8:
        replica.step()
    for sequence in replica.scheduler.queues.running:
        for _ in range(num_preempted):
            sequence.timeline.num_preemptions += 1
            replica.scheduler.policy.preempted(sequence, None, 0.0)
    for _ in range(60):  # more than twice per stream
        while len(replica.scheduler.queues.running) < 8:
            replica.step()
        key, num_steps = replica.add(4, tenant="modest", service=PRIORITY, output=2), 0
        while key not in replica.finishes:
            replica.step()
            num_steps += 1
            assert num_steps <= 4
    replica.run(50_000)
    assert all(len(replica.outputs[key]) == 900 for key in streams)


@pytest.mark.parametrize("service", [PATIENT, STANDARD, PRIORITY, FLEX, BATCH], ids=lambda service: service.name)
@pytest.mark.parametrize("num_others", [1, 3])
def test_a_newcomer_joins_a_batch_that_another_tenant_filled_within_a_few_steps(
    make_replica: MakeReplica, service: ServiceClass, num_others: int
) -> None:
    """This holds for streams of any length, and for newcomers at any rate."""
    replica = make_replica("moiety", num_blocks=4096, max_running=8)
    service = msgspec.structs.replace(service, on_overload=OverloadAction.QUEUE, ttft_s=service.ttft_s and 3600.0)
    greedy = [replica.add(4, tenant="greedy", service=service, output=400) for _ in range(40)]
    for _ in range(30):
        replica.step()
    assert greedy_running(replica) == 8
    for number in range(30):
        modest = replica.add(8, tenant=f"modest-{number % num_others}", service=service, output=4)
        for _ in range(3):
            replica.step()
        assert modest in replica.started
        for _ in range(7):
            replica.step()
        assert modest in replica.finishes
    replica.run(20_000)
    assert all(len(replica.outputs[key]) == 400 for key in greedy)


def fill_places(replica: Any, num_requests: int, output: int) -> None:
    """Let the flooding tenant occupy the whole batch."""
    for _ in range(num_requests):
        replica.add(4, tenant="greedy", service=PATIENT, output=output)
    for _ in range(20):
        replica.step()


def test_tenants_within_their_share_of_batch_slots_do_not_pause_each_other(make_replica: MakeReplica) -> None:
    replica = make_replica("moiety", num_blocks=4096, max_running=8)
    fill_places(replica, 10, output=120)
    keys = [replica.add(4, tenant="modest", service=PATIENT, output=120) for _ in range(10)]
    pauses = []
    for _ in range(60):
        replica.step()
        pauses.append(sum(s.timeline.num_pauses for s in replica.scheduler.queues.by_key.values()))
    running = [s.request.tenant for s in replica.scheduler.queues.running]
    assert (running.count("greedy"), running.count("modest")) == (4, 4)
    assert pauses[9] == pauses[-1] == 4, "one pause for each place that was given back, and none after"
    replica.run()
    assert all(len(replica.outputs[key]) == 120 for key in keys)


def test_batch_slots_are_shared_by_weight(make_replica: MakeReplica) -> None:
    replica = make_replica("moiety", num_blocks=4096, max_running=8)
    fill_places(replica, 20, output=300)
    for _ in range(20):
        replica.add(4, tenant="heavy", service=PATIENT, output=300, weight=3.0)
    for _ in range(20):
        replica.step()
    running = [s.request.tenant for s in replica.scheduler.queues.running]
    assert (running.count("greedy"), running.count("heavy")) == (2, 6)
    replica.run(20_000)
