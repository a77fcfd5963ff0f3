"""The order of policies that use classes and deadlines, and invariants of all policies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import examples

from moiety_engine.scheduling.policies.registry import POLICIES
from moiety_wire.classes import BATCH, FLEX, PRIORITY, SHIPPED, STANDARD, OverloadAction, ServiceClass
from moiety_wire.trace_events import EventKind

EOS = 7
SECOND = 10**9
SPOT = ServiceClass("spot", 9, completion_s=86_400.0, on_overload=OverloadAction.QUEUE, spot=True)
MakeReplica = Callable[..., Any]


def stream(ttft_s: float, tpot_s: float | None = None, rank: int = 1) -> ServiceClass:
    return ServiceClass(f"stream-{ttft_s}-{rank}", rank, ttft_s=ttft_s, tpot_s=tpot_s)


def job(completion_s: float, rank: int = 1) -> ServiceClass:
    return ServiceClass(f"job-{completion_s}-{rank}", rank, completion_s=completion_s)


# ── all ──


@pytest.mark.parametrize("policy", ["moiety", "vtc", "dlpm"])
def test_a_policy_with_records_has_one_of_each_open_request_and_none_of_those_that_ended(
    make_replica: MakeReplica, policy: str
) -> None:
    replica = make_replica(policy, max_running=1)
    keys = [replica.add(8, tenant=tenant, output=4) for tenant in "ab"]
    assert {sequence.key for sequence in replica.kept_sequences()} == set(keys)
    replica.abort(keys[1])
    assert {sequence.key for sequence in replica.kept_sequences()} == {keys[0]}
    replica.run()
    assert not replica.kept_sequences()


@given(policy=st.sampled_from(sorted(POLICIES)), data=st.data())
@settings(max_examples=examples(250), deadline=None)
def test_under_every_policy_each_request_ends_with_all_its_tokens_once_and_the_pool_is_whole(
    make_replica: MakeReplica, policy: str, data: st.DataObject
) -> None:
    draw = data.draw
    num_blocks = draw(st.integers(16, 40))
    replica = make_replica(
        policy, num_blocks=num_blocks, budget=draw(st.integers(8, 40)), max_running=draw(st.integers(1, 8))
    )
    aborted = set()
    for _ in range(draw(st.integers(5, 50))):
        action = draw(st.sampled_from(["add", "add", "step", "step", "step", "abort", "extend", "wait"]))
        alive = [key for key in replica.wanted if key not in replica.finishes and key not in replica.refused]
        if action == "add":
            shared = draw(st.integers(0, 12))
            replica.add(
                [1] * shared + [-len(replica.wanted) - 1] * draw(st.integers(1, 24)),
                tenant=draw(st.sampled_from("abc")),
                service=draw(st.sampled_from((*SHIPPED, SPOT))),
                output=draw(st.integers(1, 24)),
                weight=draw(st.sampled_from([0.5, 1.0, 4.0])),
                credit=draw(st.sampled_from([1, 5, 1 << 30])),
            )
        elif action == "step":
            replica.step()
        elif action == "wait":
            replica.wait(draw(st.sampled_from([0.5, 5.0, 1000.0])))
        elif alive:
            key = draw(st.sampled_from(alive))
            if action == "abort":
                replica.abort(key)
                aborted.add(key)
            else:
                replica.extend(key, draw(st.integers(1, 30)))
    for key in replica.wanted:
        if key not in replica.finishes and key not in replica.refused:
            replica.extend(key, 1 << 30)
    replica.run()
    for key, wanted in replica.wanted.items():
        if key in replica.refused:
            continue
        expected = [*range(100, 100 + wanted - 1), EOS]
        if key in aborted:
            assert replica.outputs[key] == expected[: len(replica.outputs[key])]
        else:
            assert replica.outputs[key] == expected
            assert replica.finishes[key].num_output_tokens == wanted


@pytest.mark.parametrize("policy", ["fcfs", "strict-priority", "edf", "vtc", "dlpm"])
def test_rivals_without_chunk_sizing_fill_their_fixed_chunk(make_replica: MakeReplica, policy: str) -> None:
    replica = make_replica(policy)
    decoding = replica.add(4, output=30, service=PRIORITY)
    replica.step()
    replica.add(200)
    replica.step()
    assert len(replica.outputs[decoding]) == 2
    assert replica.prefill_rows[-1] == 31


# ── strict-priority ──


def test_strict_priority_goes_by_rank_then_by_arrival(make_replica: MakeReplica) -> None:
    replica = make_replica("strict-priority", max_running=1)
    keys = [replica.add(8, service=service) for service in (BATCH, FLEX, STANDARD, PRIORITY, STANDARD, BATCH)]
    replica.run()
    assert replica.started == [keys[i] for i in (3, 2, 4, 1, 0, 5)]


def test_strict_priority_takes_blocks_from_the_worst_rank_and_not_from_the_youngest(make_replica: MakeReplica) -> None:
    replica = make_replica("strict-priority", num_blocks=16)
    worst = replica.add(16, service=BATCH, output=24)
    others = [replica.add(16, service=STANDARD, output=24), replica.add(16, service=FLEX, output=8)]
    replica.run()
    assert EventKind.PREEMPTED in replica.events(worst)
    assert all(EventKind.PREEMPTED not in replica.events(key) for key in others)


def test_strict_priority_lets_the_last_class_starve_while_better_ones_keep_coming(make_replica: MakeReplica) -> None:
    replica = make_replica("strict-priority", max_running=1)
    replica.add(8)
    last = replica.add(8, service=BATCH)
    for _ in range(50):
        replica.add(8)
        replica.step()
    assert last not in replica.started
    replica.run()
    assert replica.started[-1] == last


# ── edf ──


def test_edf_goes_by_the_first_tokens_deadline_or_that_of_the_whole_answer(make_replica: MakeReplica) -> None:
    replica = make_replica("edf", max_running=1)
    keys = [replica.add(8, service=service) for service in (job(30.0), stream(20.0), job(5.0), stream(1.0, rank=9))]
    replica.run()
    assert replica.started == [keys[i] for i in (3, 2, 1, 0)]


def test_edf_interrupts_a_prompt_for_one_with_an_earlier_deadline(make_replica: MakeReplica) -> None:
    replica = make_replica("edf")
    long = replica.add(100, service=stream(20.0))
    replica.step()
    short = replica.add(20, service=stream(1.0))
    replica.step()
    replica.step()
    assert replica.prefills == [[long], [short, long], [long]]


def test_edf_at_overload_serves_what_is_late_first_and_makes_the_others_late(make_replica: MakeReplica) -> None:
    replica = make_replica("edf", max_running=1)
    late = replica.add(20, service=stream(0.5))
    in_time = replica.add(20, service=stream(2.0))
    replica.wait(1.0)
    replica.run()
    assert replica.started == [late, in_time]


@pytest.mark.parametrize("policy", ["edf", "qoserve"])
def test_the_latest_deadline_gives_way_where_decoding_runs_out_of_blocks(
    make_replica: MakeReplica, policy: str
) -> None:
    replica = make_replica(policy, num_blocks=16)
    late = replica.add(16, service=job(600.0), output=24)
    early = replica.add(16, service=stream(5.0), output=24)
    replica.run()
    assert EventKind.PREEMPTED in replica.events(late)
    assert EventKind.PREEMPTED not in replica.events(early)


# ── qoserve ──


def _pace(make_replica: MakeReplica, policy: str) -> tuple[int, int]:
    """Return the tokens of a stream that were late beside a long prompt, and the steps until the prompt was
    computed."""
    replica = make_replica(policy, budget=256)
    service = stream(0.05, tpot_s=0.05)
    key = replica.add(8, service=service, output=40)
    replica.step()
    began_ns = replica.now_ns - replica.came_ns[key][0] + 1000 * SECOND
    other = replica.add(1500, service=job(600.0))
    num_steps = 0
    while key not in replica.finishes or other not in replica.finishes:
        replica.step()
        num_steps += 1
    due_ns = [began_ns + round((0.05 + 0.05 * n) * SECOND) for n in range(40)]
    return sum(came > due for came, due in zip(replica.came_ns[key], due_ns, strict=True)), num_steps


@pytest.mark.parametrize("policy", ["qoserve-chunking", "qoserve-demotion", "qoserve"])
def test_qoserve_takes_in_as_much_prefill_as_the_next_token_can_wait_for(
    make_replica: MakeReplica, policy: str
) -> None:
    assert _pace(make_replica, "edf")[0] > 0
    num_late, _ = _pace(make_replica, policy)
    assert num_late == 0


@pytest.mark.parametrize("policy", ["qoserve-chunking", "qoserve-demotion", "qoserve"])
def test_qoserve_fills_the_step_where_nobody_runs_who_is_owed_a_pace(make_replica: MakeReplica, policy: str) -> None:
    replica = make_replica(policy, budget=256)
    replica.add(8, service=job(600.0), output=30)
    replica.step()
    replica.add(1000, service=job(600.0))
    replica.step()
    assert replica.prefill_rows[-1] == 255


@pytest.mark.parametrize("policy", ["qoserve-demotion", "qoserve"])
def test_qoserve_sets_aside_what_will_be_late_and_ends_it_all_the_same(make_replica: MakeReplica, policy: str) -> None:
    replica = make_replica(policy, max_running=1)
    late = replica.add(20, service=stream(0.5))
    in_time = replica.add(20, service=stream(2.0))
    replica.wait(1.0)
    replica.run()
    assert replica.started == [in_time, late]
    assert EventKind.DEMOTED in replica.events(late)
    assert replica.scheduler.tally.of(stream(0.5).name).demoted == 1
    assert EventKind.DEMOTED not in replica.events(in_time)


def test_qoserve_sets_aside_before_the_deadline_what_is_too_long_to_meet_it(make_replica: MakeReplica) -> None:
    replica = make_replica("qoserve-demotion", max_running=1)
    long = replica.add(1000, service=stream(0.5))  # takes more than a second
    short = replica.add(20, service=stream(0.6))
    replica.run()
    assert replica.started == [short, long]


def test_qoserve_sets_aside_the_less_important_in_the_stead_of_the_important(make_replica: MakeReplica) -> None:
    replica = make_replica("qoserve-demotion", max_running=1)
    important = replica.add(20, service=stream(0.5, rank=0))
    lesser = replica.add(20, service=stream(2.0, rank=1))
    other = replica.add(20, service=stream(3.0, rank=0))
    replica.wait(1.0)
    replica.run()
    assert replica.started == [important, other, lesser]
    assert EventKind.DEMOTED in replica.events(lesser)
    assert EventKind.DEMOTED not in replica.events(important)


def test_qoserve_sets_aside_one_for_one(make_replica: MakeReplica) -> None:
    replica = make_replica("qoserve-demotion")
    replica.add(200, service=stream(0.5, rank=0))  # takes seven steps
    for _ in range(4):
        replica.add(20, service=job(100.0, rank=1))
    replica.wait(1.0)
    replica.run()
    assert replica.scheduler.tally.of(job(100.0).name).demoted == 1


def test_qoserve_prefers_the_shorter_of_two_with_like_deadlines_and_edf_does_not(make_replica: MakeReplica) -> None:
    def order(policy: str) -> list[int]:
        replica = make_replica(policy, max_running=1)
        replica.add(1000, service=stream(20.0))
        replica.add(20, service=stream(21.0))
        replica.run()
        return replica.started

    assert order("qoserve-demotion") == [0, 1]
    assert order("qoserve") == [1, 0]


def test_qoserve_does_not_put_off_a_prompt_that_a_delay_would_make_late(make_replica: MakeReplica) -> None:
    replica = make_replica("qoserve", budget=64)
    begun = replica.add(600, service=stream(0.75))  # needs ten steps of 74 ms: 0.70 s
    replica.step()
    replica.add(20, service=stream(0.3))
    replica.step()
    assert replica.prefills[-1][0] == begun


def test_qoserve_puts_off_a_prompt_that_has_time(make_replica: MakeReplica) -> None:
    replica = make_replica("qoserve", budget=64)
    replica.add(600, service=stream(5.0))
    replica.step()
    urgent = replica.add(20, service=stream(0.3))
    replica.step()
    assert replica.prefills[-1][0] == urgent
