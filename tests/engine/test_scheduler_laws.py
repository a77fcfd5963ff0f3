"""Invariants of the scheduler on a stateful model: requests of all classes arrive, grow, are aborted, run out of
credit, are preempted and resume."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.conftest import THOROUGH

from moiety_engine.scheduling.fairness.tenant_counters import OUTPUT_WEIGHT
from moiety_engine.scheduling.speculative_decoding.drafted_kv import DraftedKv
from moiety_wire.classes import OverloadAction, ServiceClass
from moiety_wire.engine_choices import Batching

from .scheduler_replica import BLOCK_SIZE, CLASSES, MAX_OUTPUT, MAX_PROMPT, Client, Replica, make_scheduler, make_submit

MIN_BLOCKS = (MAX_PROMPT + MAX_OUTPUT) // BLOCK_SIZE
LONGEST_STEP_S = 0.5


@dataclass(frozen=True, slots=True)
class Setup:
    """Settings of a replica: its batches, its drafts, its rank groups, and what its cache keeps."""

    policy: str = "moiety"
    batching: Batching = Batching.CONTINUOUS
    overlap: bool = False
    draft_tokens: int = 0
    by_model: bool = False
    num_groups: int = 1
    windows: tuple[int | None, ...] = (None,)
    num_snapshots: int | None = None
    steps_in_flight: int = 1


class Machine(RuleBasedStateMachine):
    """Anything that may happen to a replica, in any order."""

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.setup = setup

    @initialize(
        num_blocks=st.integers(MIN_BLOCKS, 30),
        host_blocks=st.sampled_from([0, 6, 40]),
        budget=st.integers(8, 24),
        max_running=st.integers(1, 6),
        lag=st.sampled_from([0, 1]),
    )
    def start(self, num_blocks: int, host_blocks: int, budget: int, max_running: int, lag: int) -> None:
        setup = self.setup
        scheduler = make_scheduler(
            setup.policy,
            num_blocks,
            host_blocks,
            budget,
            max_running,
            batching=setup.batching,
            draft_tokens=setup.draft_tokens,
            num_groups=setup.num_groups,
            held=(held := DraftedKv(BLOCK_SIZE, lag) if setup.by_model else None),
            windows=setup.windows,
            num_snapshots=setup.num_snapshots,
            steps_in_flight=setup.steps_in_flight,
        )
        self.replica = Replica(scheduler, overlap=setup.overlap or setup.steps_in_flight > 1, held=held)

    @rule(
        service=st.sampled_from(sorted(CLASSES)),
        tenant=st.integers(0, 2),
        length=st.integers(1, MAX_PROMPT),
        shared=st.integers(0, MAX_PROMPT),
        max_tokens=st.integers(1, MAX_OUTPUT),
        answer=st.integers(1, 2 * MAX_OUTPUT),
        credit=st.sampled_from([0, 2, 7, 1 << 20]),
        weight=st.sampled_from([1.0, 3.0]),
        embed=st.sampled_from([False, False, True]),
        repeats=st.sampled_from([0, 1, 1, 2, 3]),
    )
    def add(
        self,
        service: str,
        tenant: int,
        length: int,
        shared: int,
        max_tokens: int,
        answer: int,
        credit: int,
        weight: float,
        embed: bool,
        repeats: int,
    ) -> None:
        key = len(self.replica.clients)
        prompt = [1] * min(shared, length) + [1000 + key] * (length - min(shared, length))
        submit = make_submit(key, tenant, CLASSES[service], prompt, max_tokens, self.replica.now_ns, 1.0 + tenant)
        submit = msgspec.structs.replace(submit, credit_tokens=credit)
        if embed:
            submit = msgspec.structs.replace(submit, embed=True, max_tokens=0, credit_tokens=0)
        self.replica.add(Client(submit, answer, credit, repeats=repeats))

    @rule(seconds=st.sampled_from([0.001, 0.02, LONGEST_STEP_S]), times=st.integers(1, 4))
    def step(self, seconds: float, times: int) -> None:
        for _ in range(times):
            self.replica.step(seconds)

    @rule(seconds=st.sampled_from([0.1, 3.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.replica.now_ns += int(seconds * 1e9)

    @precondition(lambda self: self.alive())
    @rule(data=st.data(), credit=st.integers(0, MAX_OUTPUT), last=st.booleans())
    def extend(self, data: st.DataObject, credit: int, last: bool) -> None:
        self.replica.extend(data.draw(st.sampled_from(self.alive())), credit, last=last)

    @precondition(lambda self: self.alive())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.replica.abort(data.draw(st.sampled_from(self.alive())))

    @invariant()
    def laws(self) -> None:
        if hasattr(self, "replica"):
            self.replica.check()

    def teardown(self) -> None:
        if hasattr(self, "replica"):
            self.replica.drain()

    def alive(self) -> list[Client]:
        return [client for client in self.replica.clients.values() if not client.over]


SETUPS = [
    Setup(),
    Setup(policy="fcfs"),
    Setup(overlap=True),
    Setup(policy="fcfs", overlap=True),
    Setup(policy="fcfs", batching=Batching.PADDED),
    Setup(policy="fcfs", batching=Batching.PADDED, overlap=True),
    Setup(draft_tokens=3),
    Setup(policy="fcfs", draft_tokens=5),
    Setup(draft_tokens=3, overlap=True),
    Setup(policy="fcfs", draft_tokens=5, overlap=True),
    Setup(draft_tokens=3, by_model=True),
    Setup(policy="fcfs", draft_tokens=5, by_model=True, overlap=True),
    Setup(policy="fcfs", num_groups=3),
    Setup(draft_tokens=3, overlap=True, num_groups=2),
    Setup(overlap=True, windows=(None, 6)),
    Setup(policy="fcfs", windows=(5,)),
    Setup(draft_tokens=3, overlap=True, windows=(None, 3, 9)),
    Setup(overlap=True, num_snapshots=3),
    Setup(policy="fcfs", num_groups=3, windows=(None, 6), num_snapshots=1),
    Setup(steps_in_flight=2),
    Setup(policy="fcfs", steps_in_flight=3),
    Setup(draft_tokens=3, by_model=True, steps_in_flight=2),
    Setup(policy="fcfs", num_groups=2, draft_tokens=5, steps_in_flight=3),
    Setup(windows=(None, 6), num_snapshots=3, steps_in_flight=3),
]


def name_of(setup: Setup) -> str:
    return (
        f"{setup.policy}-{setup.batching}"
        + "-overlapped" * setup.overlap
        + "-drafting" * bool(setup.draft_tokens)
        + "-by_model" * setup.by_model
        + "-groups" * (setup.num_groups > 1)
        + "-windows" * (setup.windows != (None,))
        + "-states" * (setup.num_snapshots is not None)
        + f"-pipeline of {setup.steps_in_flight}" * (setup.steps_in_flight > 1)
    )


@pytest.mark.parametrize("setup", SETUPS, ids=name_of)
def test_the_laws_hold_whatever_happens(setup: Setup) -> None:
    run_state_machine_as_test(
        partial(Machine, setup),
        settings=settings(
            max_examples=150 if THOROUGH else 15,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )


@given(
    lengths=st.tuples(st.integers(1, MAX_PROMPT), st.integers(1, MAX_PROMPT)),
    outputs=st.tuples(st.integers(1, MAX_OUTPUT), st.integers(1, MAX_OUTPUT)),
    weights=st.tuples(st.sampled_from([1.0, 2.0]), st.sampled_from([1.0, 3.0])),
    head_start=st.integers(0, 20),
    num_blocks=st.integers(80, 160),  # where one prompt is half of the pool, shares of blocks decide instead
    promise=st.sampled_from([{"ttft_s": 1e4, "tpot_s": 1e3}, {"completion_s": 1e5}]),  # nothing is urgent
)
@settings(max_examples=100 if THOROUGH else 25, deadline=None, derandomize=True)
def test_the_service_of_two_backlogged_tenants_stays_within_the_bound_of_virtual_token_counters(
    lengths: tuple[int, int],
    outputs: tuple[int, int],
    weights: tuple[float, float],
    head_start: int,
    num_blocks: int,
    promise: dict[str, float],
) -> None:
    max_running = 8
    replica = Replica(make_scheduler("moiety", num_blocks, 0, 24, max_running, max_waiting=100))
    served = [0.0, 0.0]
    computed: Counter[int] = Counter()  # prompt tokens, once each
    patient = ServiceClass("patient", 2, on_overload=OverloadAction.QUEUE, max_queue_s=1e6, **promise)

    def top_up(tenant: int) -> None:
        mine = [c for c in replica.clients.values() if c.submit.tenant_id == f"t{tenant}" and not c.over]
        while sum(not client.tokens for client in mine) <= max_running:  # more than a step can take
            key = len(replica.clients)
            prompt = [1000 + key] * lengths[tenant]
            submit = make_submit(key, tenant, patient, prompt, outputs[tenant], replica.now_ns, weights[tenant])
            client = Client(submit, 99, submit.credit_tokens)
            mine.append(client)
            replica.add(client)
            assert not client.over

    bound = 2 * max(*lengths, OUTPUT_WEIGHT * num_blocks * BLOCK_SIZE) / min(weights)
    for step in range(100):
        top_up(0)
        if step >= head_start:
            top_up(1)
        plan = replica.step(0.02)
        for chunk in plan.chunks:
            sequence, tenant = chunk.sequence, int(chunk.sequence.request.tenant[1:])
            new = max(0, min(sequence.kv.peak_computed, sequence.request.num_prompt) - computed[sequence.key])
            computed[sequence.key] += new
            if step >= head_start:  # both have been waiting since
                served[tenant] += (new + OUTPUT_WEIGHT * chunk.samples) / weights[tenant]
        assert abs(served[0] - served[1]) <= bound


@pytest.mark.parametrize("overlap", [False, True])
def test_a_prompt_of_a_worse_rank_is_computed_where_it_has_the_place_that_the_best_rank_waits_for(
    overlap: bool,
) -> None:
    replica = Replica(make_scheduler("moiety", 10, 0, 8, 1), overlap=overlap)

    def add(service: str, *, embed: bool) -> None:
        key = len(replica.clients)
        submit = make_submit(key, 0, CLASSES[service], [1000 + key], 1, replica.now_ns, 1.0)
        submit = msgspec.structs.replace(submit, credit_tokens=0)
        if embed:
            submit = msgspec.structs.replace(submit, embed=True, max_tokens=0)
        replica.add(Client(submit, 1, 0))

    def wait(seconds: float) -> None:
        replica.now_ns += int(seconds * 1e9)

    add("batch", embed=True)
    replica.step(0.02)
    replica.step(0.02)
    wait(3.5)
    replica.step(0.001)
    add("standard", embed=True)
    wait(3.0)
    add("patient priority", embed=True)
    for _ in range(8):  # the share of worse ranks takes turns
        replica.step(0.001)
    replica.drain()
    assert all(client.over for client in replica.clients.values())
