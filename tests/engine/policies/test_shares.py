"""What a tenant that asks for little may count on under our own policy while another of its rank asks for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from moiety_wire.classes import OverloadAction, ServiceClass
from moiety_wire.notes import EventKind, Reason

MakeReplica = Callable[..., Any]

PATIENT = ServiceClass("patient", 0, ttft_s=3600.0, max_queue_s=1.0, on_overload=OverloadAction.QUEUE)
CHAT = ServiceClass("chat", 0, ttft_s=600.0, tpot_s=0.1, on_overload=OverloadAction.QUEUE)


def greedy_running(replica: Any) -> int:
    return sum(sequence.tenant == "greedy" for sequence in replica.scheduler.places.running)


@pytest.mark.parametrize("steps_before", [20, 92, 128, 188])
def test_a_tenant_with_nothing_gets_blocks_at_once_though_others_hold_them_all_and_wait_for_more(
    make_replica: MakeReplica, steps_before: int
) -> None:
    """Also where those others gave way before, have waited too long, and would take every block that gets free."""
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


def test_what_gives_way_to_a_tenant_with_nothing_is_said_to_be_over_its_share(make_replica: MakeReplica) -> None:
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
