"""Candidates that a plan examines in vain are queued again after the launch, which changes no decision.

Those that find a batch full which nobody leaves are not even examined before.
"""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import examples
from tests.core_submits import core_submit

from moiety_engine.cache.block_pool import BlockPool
from moiety_engine.messages import CoreSubmit
from moiety_engine.scheduling.admission.batching_strategies import STRATEGIES
from moiety_engine.scheduling.kv.kv_ledger import KvLedger
from moiety_engine.scheduling.limits import SchedulerLimits
from moiety_engine.scheduling.plan import Plan
from moiety_engine.scheduling.policies.registry import POLICIES
from moiety_engine.scheduling.scheduler import Scheduler
from moiety_engine.sequence import SequenceState
from moiety_wire.classes import SHIPPED, OverloadAction
from moiety_wire.engine_choices import Batching
from moiety_wire.messages import FinishReason
from moiety_wire.trace_events import Reason

CLASSES = [msgspec.structs.replace(one, on_overload=OverloadAction.QUEUE) for one in SHIPPED]
MS = 1_000_000


def make_submit(key: int, kind: int) -> CoreSubmit:
    submit = core_submit(key, [key * 50 + place for place in range(3 + kind * 5 % 17)], 2 + kind % 7)
    more = {"tenant_id": f"t{kind % 3}", "service": CLASSES[kind % len(CLASSES)]}
    return msgspec.structs.replace(submit, credit_tokens=1 + kind % 5, **more)


class Replica:
    """A scheduler that plans each step while the one before it runs."""

    def __init__(self, policy: str, *, requeues_at_once: bool) -> None:
        kv = KvLedger(BlockPool(14), 4, prefix_caching=True)
        limits = SchedulerLimits(24, 2, max_waiting=1 << 30)
        self.scheduler = Scheduler(kv, limits, STRATEGIES[Batching.CONTINUOUS], policy)
        self._requeues_at_once = requeues_at_once
        self._running: Plan | None = None
        self._num_added = 0
        for kind in range(6):
            self.act(("add", kind), 10**15)

    def act(self, event: tuple[str, int], now_ns: int) -> list[object]:
        what, number = event
        output = None
        if what == "add":
            self.scheduler.add(make_submit(self._num_added, number), seed=0, now_ns=now_ns)
            self._num_added += 1
        elif what == "abort":
            output = self.scheduler.abort(number, FinishReason.ABORT, now_ns=now_ns)
        else:
            output = self.scheduler.extend(number, 30, last=True, now_ns=now_ns)
        return [output, self.scheduler.policy.num_queued]

    def step(self, meanwhile: list[tuple[str, int]], now_ns: int) -> list[object]:
        plan = self.scheduler.plan(now_ns)
        if self.scheduler._prefill_planner.stopped_early:
            self._check_that_nobody_gets_a_place(now_ns)
        if self._requeues_at_once:
            self.scheduler._prefill_planner.requeue_examined()
        came: list[object] = [[(chunk.sequence.key, *chunk[1:]) for chunk in plan.chunks], plan.num_decode]
        for event in meanwhile:
            came += self.act(event, now_ns + MS)
        if self._running is not None:
            tokens = [1] * sum(chunk.samples for chunk in self._running.chunks)
            came += self.scheduler.commit(self._running, tokens, [None] * len(tokens), now_ns + 20 * MS)
            came.append(self.scheduler.policy.num_queued)
        self._running = plan if plan.chunks else None
        if plan.chunks:
            self.scheduler.launched(plan)
        return [*came, self.scheduler.policy.num_queued]

    def _check_that_nobody_gets_a_place(self, now_ns: int) -> None:
        queues, policy = self.scheduler.queues, self.scheduler.policy
        assert len(queues.running) == self.scheduler.limits.max_running
        for sequence in (one for one in queues.by_key.values() if one.entry & 1):
            assert sequence.state is not SequenceState.RUNNING
            assert not policy.victims(queues.running, sequence, now_ns / 1e9, takes_blocks=False)


EVENTS = st.one_of(
    st.tuples(st.just("add"), st.integers(0, 50)),
    st.tuples(st.sampled_from(["abort", "extend"]), st.integers(0, 20)),
)


@pytest.mark.parametrize("policy", sorted(POLICIES))
@settings(max_examples=examples(25), deadline=None)
@given(steps=st.lists(st.tuples(st.lists(EVENTS, max_size=4), st.lists(EVENTS, max_size=2)), max_size=30))
def test_plans_are_those_of_a_scheduler_that_queues_candidates_at_once(
    policy: str, steps: list[tuple[list[tuple[str, int]], list[tuple[str, int]]]]
) -> None:
    late, early = Replica(policy, requeues_at_once=False), Replica(policy, requeues_at_once=True)
    now_ns = 10**15
    for before, meanwhile in steps:
        came = [
            [*(replica.act(event, now_ns) for event in before), replica.step(meanwhile, now_ns)]
            for replica in (late, early)
        ]
        assert came[0] == came[1]
        now_ns += 150 * MS


def test_a_full_batch_that_nobody_leaves_is_looked_past_after_the_launch() -> None:
    scheduler = Replica("moiety", requeues_at_once=False).scheduler
    for key in list(scheduler.queues.by_key):
        scheduler.abort(key, FinishReason.ABORT, now_ns=10**15)
    for key in range(100, 104):
        scheduler.add(make_submit(key, len(CLASSES) * (key - 100)), seed=0, now_ns=10**15)  # of one class
    plan = scheduler.plan(10**15 + MS)
    assert len(plan.chunks) == scheduler.limits.max_running == 2
    waiting = list(scheduler.queues.waiting.values())
    assert [one.timeline.delay for one in waiting] == [None] * 2
    assert scheduler.policy.num_queued == len(waiting)
    scheduler.launched(plan)
    assert Reason.BATCH_FULL in [one.timeline.delay for one in waiting]
    assert scheduler.policy.num_queued == len(waiting)
