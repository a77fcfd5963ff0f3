"""The order in which the policy `moiety` serves requests, and the limit of the queue for each tenant."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from moiety_wire.classes import BATCH, FLEX, PRIORITY, OverloadAction, ServiceClass
from moiety_wire.trace_events import EventKind

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
    assert EventKind.DEMOTED in replica.events(late)
    assert replica.started.index(late) <= 5, "the other tenant's requests that are in time went before"
    assert len(replica.started) == len(greedy) + 1


def test_late_requests_of_a_tenant_are_ordered_after_its_others(make_replica: MakeReplica) -> None:
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


def test_a_step_is_short_only_while_somebody_was_promised_a_first_token(make_replica: MakeReplica) -> None:
    replica = make_replica("moiety", budget=512)  # which would take half a second
    replica.add(2048, service=BATCH)
    replica.step()
    assert replica.prefill_rows == [512]
    replica.add(4, service=PRIORITY)
    replica.step()
    assert 0 < replica.prefill_rows[-1] < 256
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
        for second in range(120):  # 900 tokens per second fit, 1,640 arrive
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


def test_a_full_queue_makes_room_for_a_better_rank_also_of_a_tenant_with_requests_of_its_own(
    make_replica: MakeReplica,
) -> None:
    replica = make_replica("moiety", max_waiting=4, max_running=1, budget=8)
    for tenant in "abcd":
        replica.add(4, tenant=tenant, service=BATCH)
    urgent = [replica.add(400, tenant="gold", service=stream(60.0)) for _ in range(3)]
    assert not replica.refused & set(urgent)
    assert replica.scheduler.tally.of("batch").rejected == {"shed": 3}
    replica.scheduler.take_verdicts()
    assert len(replica.scheduler.queues.waiting) == 4


@pytest.mark.parametrize("seed", range(6))
def test_streams_that_come_back_for_one_token_at_a_time_lose_no_place(make_replica: MakeReplica, seed: int) -> None:
    """They return with their blocks, and prompts of a better rank may have used the whole step."""
    rng = random.Random(seed)
    replica = make_replica("moiety", budget=400, max_running=16, num_blocks=4000)
    chat = ServiceClass("chat", 0, ttft_s=20.0, tpot_s=0.5, on_overload=OverloadAction.QUEUE)
    slow = ServiceClass("slow", 1, ttft_s=20.0, tpot_s=5.0, on_overload=OverloadAction.QUEUE)
    streams = [replica.add(8, tenant=f"stream-{n}", service=slow, output=30, credit=2) for n in range(4)]
    for number in range(80):
        if rng.random() < 0.5:
            replica.add(rng.choice([50, 300, 900]), tenant=f"prompt-{number}", service=chat)
        for key in streams:
            if key not in replica.finishes and rng.random() < 0.3:
                replica.extend(key, replica.credit[key] + 1)
        replica.step()
        for sequence in replica.scheduler.queues.decoding:
            assert sequence.entry % 2 == 0, "it decodes, and waits for prefill, too"
    for key in streams:
        replica.extend(key, 1 << 30)
    replica.run()


def test_late_requests_get_a_bounded_share_of_the_time(make_replica: MakeReplica) -> None:
    replica = make_replica("moiety", budget=32, num_blocks=8192)
    patient = ServiceClass("patient", 3, completion_s=1e6, max_queue_s=1.0, on_overload=OverloadAction.QUEUE)
    starved = replica.add(20_000, tenant="starved", service=patient)
    busy = [replica.add(64, service=stream(1e5)) for _ in range(4)]
    for _ in range(3000):  # 42 ms each
        replica.step()
        busy = [key for key in busy if key not in replica.finishes]
        while len(busy) < 4:
            busy.append(replica.add(64, service=stream(1e5)))
    boosted = sum(rows for keys, rows in zip(replica.prefills, replica.prefill_rows, strict=True) if keys == [starved])
    assert 0.005 < boosted / sum(replica.prefill_rows) < 0.03


def test_few_late_prompts_are_in_progress_at_a_time(make_replica: MakeReplica) -> None:
    replica = make_replica("moiety", budget=32, num_blocks=8192)
    hopeless = ServiceClass("hopeless", 0, ttft_s=0.01, max_queue_s=1.0, on_overload=OverloadAction.QUEUE)
    late = [replica.add(1000, tenant="late", service=hopeless) for _ in range(8)]
    busy = [replica.add(64, service=stream(1e5)) for _ in range(4)]
    most_begun = 0
    for _ in range(4000):
        replica.step()
        begun = [key for key in late if key in replica.started and key not in replica.finishes]
        most_begun = max(most_begun, len(begun))
        busy = [key for key in busy if key not in replica.finishes]
        while len(busy) < 4:
            busy.append(replica.add(64, service=stream(1e5)))
    assert most_begun <= 2, "the one that had begun before it was too late, and one that the lane ends"
    assert sum(key in replica.finishes for key in late) >= 2, "what is late still ends"


def test_a_late_request_starts_although_the_batch_is_full(
    make_replica: MakeReplica,
) -> None:
    replica = make_replica("moiety", budget=32, num_blocks=8192, max_running=4)
    hopeless = ServiceClass("hopeless", 0, ttft_s=0.01, max_queue_s=1.0, on_overload=OverloadAction.QUEUE)
    busy = [replica.add(64, service=stream(1e5), output=20) for _ in range(8)]
    for _ in range(10):
        replica.step()
    late = replica.add(200, service=hopeless)
    while late not in replica.started:
        replica.step()
        busy = [key for key in busy if key not in replica.finishes]
        busy += [replica.add(64, service=stream(1e5), output=20) for _ in range(8 - len(busy))]
        assert replica.now_ns < 1010 * 10**9, "it starves"
    replica.run()


def test_a_late_request_without_a_batch_slot_does_not_delay_better_ranks(
    make_replica: MakeReplica,
) -> None:
    replica = make_replica("moiety", budget=64, num_blocks=8192, max_running=4, step_s=0.06)
    urgent = ServiceClass("urgent", 0, ttft_s=1.5, on_overload=OverloadAction.QUEUE)
    slow = ServiceClass("slow", 1, ttft_s=0.2, max_queue_s=1.0, on_overload=OverloadAction.QUEUE)
    for _ in range(4):
        replica.add(32, tenant="slow", service=slow, output=3000)
    for _ in range(60):
        replica.step()
    for number in range(3):  # they take the places of three slow ones, which wait too long
        replica.add(32, tenant=f"urgent-{number}", service=urgent, output=400)
    for _ in range(300):
        replica.step()
    begin_ns = replica.now_ns
    newest = replica.add(32, tenant="newest", service=urgent, output=5)
    while not replica.came_ns[newest]:
        replica.step()
    assert replica.now_ns - begin_ns <= 0.3e9


def test_time_for_an_answer_is_demanded_up_to_the_length_that_was_asked_for_and_no_further(
    make_replica: MakeReplica,
) -> None:
    replica = make_replica("moiety")
    far, near = (
        ServiceClass(f"in-{end_s}-s", 0, completion_s=end_s, on_overload=OverloadAction.QUEUE) for end_s in (1e4, 1.2)
    )
    for _ in range(6):
        replica.add(8, service=far, output=40)
    replica.run()
    soon = replica.add(8, service=near, output=40)  # takes 0.45 s
    replica.run()
    assert EventKind.DEMOTED not in replica.events(soon)


def test_demand_counts_waiting_requests_that_are_not_late(make_replica: MakeReplica) -> None:
    replica = make_replica("moiety", budget=8, max_running=2)
    rng = random.Random(0)
    jobs = [ServiceClass(f"job-{n}", n, completion_s=0.3, on_overload=OverloadAction.QUEUE) for n in range(2)]
    for number in range(150):
        key = replica.add(rng.randint(4, 40), tenant=f"{number % 3}", service=rng.choice(jobs))
        if rng.random() < 0.2:
            replica.abort(key)
        for _ in range(rng.randint(0, 3)):
            replica.step()
        classes = replica.scheduler.policy._slo.demand._classes
        demanded = {name: inflow.pending_tokens for name, (_, inflow) in classes.items()}
        records = replica.scheduler.policy._records
        waiting = [s for s in replica.scheduler.queues.waiting.values() if not records[s].demoted]
        for job in jobs:
            assert demanded.get(job.name, 0) == sum(s.kv.num_uncached for s in waiting if s.service.name == job.name)
    assert replica.scheduler.tally.of("job-1").demoted > 0
    replica.run()


def test_blocks_of_non_preemptible_requests_are_reserved(make_replica: MakeReplica) -> None:
    replica = make_replica("moiety", num_blocks=32, max_running=8)
    first = replica.add(40, tenant="a", service=PRIORITY, output=24)
    replica.step()
    replica.step()
    guarantees = replica.scheduler.policy._kv_admission._guarantees
    held = guarantees.reserved_tokens(replica.scheduler.queues.by_key[first])
    assert held > 40
    others = [replica.add(40, tenant="b", service=PRIORITY, output=24) for _ in range(3)]
    replica.run()
    for key in (first, *others):
        assert EventKind.PREEMPTED not in replica.events(key)
        assert len(replica.outputs[key]) == 24


def test_one_of_two_requests_beyond_the_preemption_limit_pauses_with_its_blocks(
    make_replica: MakeReplica,
) -> None:
    replica = make_replica("moiety", num_blocks=20, max_running=4)
    for _ in range(20):
        replica.add(8, service=FLEX, output=3)  # so that short answers are expected
    replica.run()
    keys = [replica.add(20, service=FLEX, output=40) for _ in range(2)]
    while not all(replica.outputs[key] for key in keys):
        replica.step()
    for key in keys:
        sequence = replica.scheduler.queues.by_key[key]
        sequence.timeline.num_preemptions = 2
        replica.scheduler.policy.preempted(sequence, None, 0.0)
    paused: set[int] = set()
    while not replica.scheduler.idle:
        before = {
            key: (len(replica.outputs[key]), len(s.kv.blocks)) for key, s in replica.scheduler.queues.by_key.items()
        }
        replica.step()
        for key, s in replica.scheduler.queues.by_key.items():
            if len(replica.outputs[key]) == before[key][0]:
                paused.add(key)
                assert len(s.kv.blocks) == before[key][1]
    assert len(paused) == 1
    assert [len(replica.outputs[key]) for key in keys] == [40, 40]
    assert all(EventKind.PREEMPTED not in replica.events(key) for key in keys)
