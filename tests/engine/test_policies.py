"""What each policy orders by, and what holds under all of them, on the real scheduler with a stand-in for the model."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moiety_engine.cache.blocks import BlockPool
from moiety_engine.config import Batching
from moiety_engine.messages import CoreFinish, CoreOutput, CoreSubmit
from moiety_engine.scheduling.kv import KvLedger
from moiety_engine.scheduling.policies import POLICIES
from moiety_engine.scheduling.scheduler import Limits, Scheduler
from moiety_engine.scheduling.steptime import StepTimeModel
from moiety_engine.scheduling.strategies import STRATEGIES
from moiety_wire.classes import BATCH, FLEX, PRIORITY, SHIPPED, STANDARD, ServiceClass
from moiety_wire.messages import EventKind, FinishReason, Sampling

BLOCK_SIZE = 4
EOS = 7
SECOND = 10**9
TOKEN_S = 0.001
STEP_S = 0.01
LINEAR = (STEP_S, 100 * TOKEN_S, 0.0, 0.0, 0.0, 0.0)  # a step-time model that is right: a constant and a time a row


class Replica:
    """A scheduler, a clock, and a model that says 100 + position until an answer is as long as was wanted."""

    def __init__(
        self, policy: str, *, num_blocks: int = 1024, budget: int = 32, max_running: int = 8, caching: bool = True
    ) -> None:
        ledger = KvLedger(BlockPool(num_blocks), BLOCK_SIZE, prefix_caching=caching)
        limits = Limits(budget, max_running)
        strategy = STRATEGIES[Batching.CONTINUOUS]
        self.scheduler = Scheduler(ledger, limits, strategy, policy, step_time=StepTimeModel(LINEAR))
        self.now_ns = 1000 * SECOND
        self.wanted: dict[int, int] = {}
        self.credit: dict[int, int] = {}
        self.outputs: dict[int, list[int]] = {}
        self.came_ns: dict[int, list[int]] = {}
        self.finishes: dict[int, CoreFinish] = {}
        self.started: list[int] = []  # in the order in which they first ran
        self.prefills: list[list[int]] = []  # of each step, whose prompts it computed
        self.prefill_rows: list[int] = []
        self.refused: set[int] = set()

    def add(
        self,
        prompt: list[int] | int,
        *,
        tenant: str = "t",
        service: ServiceClass = STANDARD,
        output: int = 1,
        weight: float = 1.0,
        credit: int = 1 << 30,
    ) -> int:
        """A request; a prompt that is a length is like no other."""
        key = len(self.wanted)
        self.wanted[key], self.outputs[key], self.came_ns[key] = output, [], []
        self.credit[key] = credit
        submit = CoreSubmit(
            key=key,
            tenant_id=tenant,
            service=service,
            prompt_ids=[-key - 1] * prompt if isinstance(prompt, int) else prompt,
            sampling=Sampling(),
            max_tokens=max(output, 40),
            min_tokens=0,
            stop_token_ids=[EOS],
            credit_tokens=credit,
            cache_salt=b"",
            arrival_unix_ns=self.now_ns,
            tenant_weight=weight,
        )
        self.scheduler.add(submit, seed=0, now_ns=self.now_ns)
        self.refused.update(failure.key for failure in self.scheduler.take_verdicts()[1])
        return key

    def extend(self, key: int, credit: int) -> None:
        self.credit[key] = max(self.credit[key], credit)
        self._take(self.scheduler.extend(key, credit, last=False, now_ns=self.now_ns))

    def abort(self, key: int) -> None:
        self._take(self.scheduler.abort(key, FinishReason.ABORT, now_ns=self.now_ns))

    def wait(self, seconds: float) -> None:
        self.now_ns += round(seconds * SECOND)

    def step(self) -> None:
        plan = self.scheduler.plan(self.now_ns)
        assert plan.num_rows <= self.scheduler.limits.max_batch_tokens
        if not plan.chunks:
            assert not [s for s in self.scheduler.places.by_key.values() if s.has_credit], "somebody is left waiting"
        tokens = []
        prefills = plan.chunks[plan.num_decode :]
        self.prefills.append([chunk.sequence.key for chunk in prefills])
        self.prefill_rows.append(sum(chunk.num_tokens for chunk in prefills))
        for chunk in plan.chunks:
            key = chunk.sequence.key
            if key not in self.started:
                self.started.append(key)
            if chunk.samples:
                position = chunk.sequence.num_output
                tokens.append(EOS if position + 1 == self.wanted[key] else 100 + position)
        self.now_ns += round((STEP_S + TOKEN_S * plan.num_rows) * SECOND)
        for output in self.scheduler.commit(plan, tokens, [None] * len(tokens), self.now_ns):
            self._take(output)
        held = [block for s in self.scheduler.places.by_key.values() for block in s.blocks]
        assert self.scheduler.kv.pool.num_used == len(set(held))

    def run(self, limit: int = 5000) -> None:
        for _ in range(limit):
            if self.scheduler.idle:
                assert self.scheduler.kv.pool.num_used == 0
                assert self.scheduler.policy.num_queued == 0
                return
            self.step()
        raise AssertionError("the scheduler makes no progress")

    def events(self, key: int) -> list[EventKind]:
        return [event.kind for event in self.finishes[key].events]

    def _take(self, output: CoreOutput | None) -> None:
        if output is None:
            return
        self.outputs[output.key] += output.token_ids
        self.came_ns[output.key] += [self.now_ns] * len(output.token_ids)
        assert len(self.outputs[output.key]) <= self.credit[output.key]
        if output.finish is not None:
            assert output.key not in self.finishes
            self.finishes[output.key] = output.finish


def stream(ttft_s: float, tpot_s: float | None = None, rank: int = 1) -> ServiceClass:
    return ServiceClass(f"stream-{ttft_s}-{rank}", rank, ttft_s=ttft_s, tpot_s=tpot_s)


def job(completion_s: float, rank: int = 1) -> ServiceClass:
    return ServiceClass(f"job-{completion_s}-{rank}", rank, completion_s=completion_s)


# ── all ──


@given(policy=st.sampled_from(sorted(POLICIES)), data=st.data())
@settings(max_examples=250, deadline=None)
def test_under_every_policy_each_request_ends_with_all_its_tokens_once_and_the_pool_is_whole(
    policy: str, data: st.DataObject
) -> None:
    draw = data.draw
    num_blocks = draw(st.integers(16, 40))
    replica = Replica(
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
                service=draw(st.sampled_from(SHIPPED)),
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
def test_rivals_without_chunk_sizing_fill_their_fixed_chunk(policy: str) -> None:
    replica = Replica(policy)
    decoding = replica.add(4, output=30, service=PRIORITY)
    replica.step()
    replica.add(200)
    replica.step()
    assert len(replica.outputs[decoding]) == 2
    assert replica.prefill_rows[-1] == 31


# ── strict-priority ──


def test_strict_priority_goes_by_rank_then_by_arrival() -> None:
    replica = Replica("strict-priority", max_running=1)
    keys = [replica.add(8, service=service) for service in (BATCH, FLEX, STANDARD, PRIORITY, STANDARD, BATCH)]
    replica.run()
    assert replica.started == [keys[i] for i in (3, 2, 4, 1, 0, 5)]


def test_strict_priority_takes_blocks_from_the_worst_rank_and_not_from_the_youngest() -> None:
    replica = Replica("strict-priority", num_blocks=16)
    worst = replica.add(16, service=BATCH, output=24)
    others = [replica.add(16, service=STANDARD, output=24), replica.add(16, service=FLEX, output=8)]
    replica.run()
    assert EventKind.PREEMPTED in replica.events(worst)
    assert all(EventKind.PREEMPTED not in replica.events(key) for key in others)


def test_strict_priority_lets_the_last_class_starve_while_better_ones_keep_coming() -> None:
    replica = Replica("strict-priority", max_running=1)
    replica.add(8)
    last = replica.add(8, service=BATCH)
    for _ in range(50):
        replica.add(8)
        replica.step()
    assert last not in replica.started
    replica.run()
    assert replica.started[-1] == last


# ── edf ──


def test_edf_goes_by_the_first_tokens_deadline_or_that_of_the_whole_answer() -> None:
    replica = Replica("edf", max_running=1)
    keys = [replica.add(8, service=service) for service in (job(30.0), stream(20.0), job(5.0), stream(1.0, rank=9))]
    replica.run()
    assert replica.started == [keys[i] for i in (3, 2, 1, 0)]


def test_edf_interrupts_a_prompt_for_one_with_an_earlier_deadline() -> None:
    replica = Replica("edf")
    long = replica.add(100, service=stream(20.0))
    replica.step()
    short = replica.add(20, service=stream(1.0))
    replica.step()
    replica.step()
    assert replica.prefills == [[long], [short, long], [long]]


def test_edf_at_overload_serves_what_is_late_first_and_makes_the_others_late() -> None:
    replica = Replica("edf", max_running=1)
    late = replica.add(20, service=stream(0.5))
    in_time = replica.add(20, service=stream(2.0))
    replica.wait(1.0)
    replica.run()
    assert replica.started == [late, in_time]


# ── vtc ──


def _shares(replica: Replica, tenants: dict[int, str], num: int) -> dict[str, int]:
    """How many of the first `num` that started are whose."""
    first = [tenants[key] for key in replica.started[:num]]
    return {name: first.count(name) for name in sorted(set(tenants.values()))}


@pytest.mark.parametrize("policy", ["vtc", "dlpm"])
def test_a_tenant_that_floods_the_queue_leaves_half_to_another(policy: str) -> None:
    replica = Replica(policy, max_running=2)
    tenants = {replica.add(24, tenant="a", output=8): "a" for _ in range(60)}
    tenants |= {replica.add(24, tenant="b", output=8): "b" for _ in range(20)}
    replica.run()
    shares = _shares(replica, tenants, 40)
    assert abs(shares["a"] - shares["b"]) <= 2


@pytest.mark.parametrize("policy", ["vtc", "dlpm"])
def test_tenants_are_served_in_proportion_to_their_weights(policy: str) -> None:
    replica = Replica(policy, max_running=2)
    tenants = {}
    for _ in range(60):
        tenants[replica.add(24, tenant="a", output=8)] = "a"
        tenants[replica.add(24, tenant="b", output=8, weight=3.0)] = "b"
    replica.run()
    shares = _shares(replica, tenants, 40)
    assert 2.5 <= shares["b"] / shares["a"] <= 3.5


def test_vtc_counts_output_twice() -> None:
    replica = Replica("vtc", max_running=1)
    tenants = {}
    for _ in range(30):
        tenants[replica.add(20, tenant="reads", output=1)] = "reads"  # 22 a request
        tenants[replica.add(2, tenant="writes", output=10)] = "writes"  # 22 as well
    replica.run()
    shares = _shares(replica, tenants, 20)
    assert abs(shares["reads"] - shares["writes"]) <= 1


def test_vtc_is_fair_within_its_bound_while_both_are_backlogged() -> None:
    replica = Replica("vtc", max_running=6, num_blocks=32)
    tenants = {}
    for _ in range(40):
        tenants[replica.add(8, tenant="a", output=20)] = "a"
        tenants[replica.add(30, tenant="b", output=3)] = "b"
    bound = 2 * max(30, 2 * 32 * BLOCK_SIZE)
    worst = 0.0
    while replica.scheduler.places.waiting and {tenants[key] for key in replica.scheduler.places.waiting} == {"a", "b"}:
        replica.step()
        served = {"a": 0, "b": 0}
        for key in replica.started:
            prompt = 8 if tenants[key] == "a" else 30
            served[tenants[key]] += prompt + 2 * len(replica.outputs[key])
        worst = max(worst, abs(served["a"] - served["b"]))
    assert 0 < worst <= bound


def test_vtc_lifts_a_tenant_that_returns_so_that_idleness_earns_nothing() -> None:
    replica = Replica("vtc", max_running=1)
    tenants = {replica.add(20, tenant="busy"): "busy" for _ in range(40)}
    for _ in range(20):
        replica.step()
    before = len(replica.started)
    tenants |= {replica.add(20, tenant="back"): "back" for _ in range(20)}
    replica.run()
    after = [tenants[key] for key in replica.started[before : before + 10]]
    assert abs(after.count("busy") - after.count("back")) <= 1


def test_vtc_lifts_to_the_last_that_left_where_nobody_is_queued() -> None:
    replica = Replica("vtc", max_running=1)
    for _ in range(20):
        replica.add(20, tenant="busy")
    replica.run()
    before = len(replica.started)
    tenants = {}
    for _ in range(10):
        tenants[replica.add(20, tenant="new")] = "new"
        tenants[replica.add(20, tenant="busy")] = "busy"
    replica.run()
    after = [tenants[key] for key in replica.started[before : before + 10]]
    assert abs(after.count("busy") - after.count("new")) <= 1


def test_vtc_does_not_charge_what_the_cache_held() -> None:
    replica = Replica("vtc", max_running=1)
    prefix = list(range(200, 240))
    replica.add([*prefix, 1], tenant="warm-up")
    replica.run()
    before = len(replica.started)
    tenants = {}
    for number in range(30):
        tenants[replica.add([*prefix, number], tenant="cached")] = "cached"  # 1 + 2 a request
        tenants[replica.add(40, tenant="uncached")] = "uncached"  # 40 + 2
    replica.run()
    first = [tenants[key] for key in replica.started[before : before + 16]]
    assert first.count("cached") >= 14


def test_vtc_serves_a_tenant_by_arrival_and_lets_no_one_interrupt_a_prompt() -> None:
    replica = Replica("vtc")
    long = replica.add(100, tenant="a")
    replica.step()
    others = [replica.add(8, tenant="b"), replica.add(8, tenant="b")]
    replica.run()
    assert replica.prefills[:4] == [[long], [long], [long], [long, *others]]


# ── dlpm ──


def test_dlpm_starts_the_longest_cached_prefix_first() -> None:
    replica = Replica("dlpm", max_running=1)
    prefix = list(range(200, 240))
    replica.add([*prefix, 1])
    replica.run()
    keys = [replica.add(20), replica.add([*prefix[:20], 3, 4, 5]), replica.add([*prefix, 9])]
    replica.run()
    assert replica.started[1:] == [keys[2], keys[1], keys[0]]


def test_dlpm_sees_a_prefix_that_was_computed_after_the_request_had_come() -> None:
    replica = Replica("dlpm", max_running=1)
    prefix = list(range(200, 240))
    first, other, same = replica.add([*prefix, 1]), replica.add(20), replica.add([*prefix, 2])
    replica.run()
    assert replica.started == [first, same, other]
    assert replica.finishes[same].num_cached_tokens == 40


def test_dlpm_sees_that_a_prefix_has_gone() -> None:
    replica = Replica("dlpm", max_running=1, num_blocks=24)
    prefix, shorter = list(range(200, 240)), list(range(300, 308))
    replica.add([*prefix, 1])
    replica.run()
    holding = replica.add(60, output=20)  # takes most blocks, those of the prefix among them
    replica.step()
    gone = replica.add([*prefix, 2])
    kept = replica.add([*shorter, 1])
    assert replica.started[-1] == holding
    replica.run()
    assert set(replica.started[2:]) == {gone, kept}
    assert replica.finishes[gone].num_cached_tokens < 40


def test_dlpm_passes_over_a_tenant_without_deficit_whose_prefix_is_longer() -> None:
    replica = Replica("dlpm", max_running=1)  # the quantum is a step's 32 tokens
    prefix = list(range(200, 240))
    replica.add([*prefix, 1], tenant="local")
    replica.run()
    tenants = {}
    for number in range(30):
        tenants[replica.add([*prefix, number, number], tenant="local", output=8)] = "local"  # 2 + 16 a request
        tenants[replica.add(18, tenant="other")] = "other"  # 18 + 2
    replica.run()
    first = [tenants[key] for key in replica.started[1:25]]
    assert abs(first.count("local") - first.count("other")) <= 4
    assert max(len(list(run)) for run in _runs(first)) >= 2  # it goes by prefix as long as the deficit lasts


def _runs(names: list[str]) -> list[list[str]]:
    runs = [[names[0]]]
    for before, name in pairwise(names):
        if name == before:
            runs[-1].append(name)
        else:
            runs.append([name])
    return runs


def test_dlpm_gives_quanta_until_one_that_is_far_below_zero_may_start() -> None:
    replica = Replica("dlpm", max_running=1, num_blocks=512)
    keys = [replica.add(1000, tenant="a"), replica.add(1000, tenant="a")]
    replica.run()
    assert replica.started == keys


# ── qoserve ──


def _pace(policy: str) -> tuple[int, int]:
    """(tokens of a stream that came late beside a long prompt, steps until that prompt was done)."""
    replica = Replica(policy, budget=256)
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


@pytest.mark.parametrize("policy", ["qoserve-chunking", "qoserve-relegation", "qoserve"])
def test_qoserve_takes_in_as_much_prefill_as_the_next_token_can_wait_for(policy: str) -> None:
    assert _pace("edf")[0] > 0
    num_late, _ = _pace(policy)
    assert num_late == 0


@pytest.mark.parametrize("policy", ["qoserve-chunking", "qoserve-relegation", "qoserve"])
def test_qoserve_fills_the_step_where_nobody_runs_who_is_owed_a_pace(policy: str) -> None:
    replica = Replica(policy, budget=256)
    replica.add(8, service=job(600.0), output=30)
    replica.step()
    replica.add(1000, service=job(600.0))
    replica.step()
    assert replica.prefill_rows[-1] == 255


@pytest.mark.parametrize("policy", ["qoserve-relegation", "qoserve"])
def test_qoserve_sets_aside_what_will_be_late_and_ends_it_all_the_same(policy: str) -> None:
    replica = Replica(policy, max_running=1)
    late = replica.add(20, service=stream(0.5))
    in_time = replica.add(20, service=stream(2.0))
    replica.wait(1.0)
    replica.run()
    assert replica.started == [in_time, late]
    assert EventKind.RELEGATED in replica.events(late)
    assert replica.scheduler.tally.of(stream(0.5).name).relegated == 1
    assert EventKind.RELEGATED not in replica.events(in_time)


def test_qoserve_sets_aside_before_the_deadline_what_is_too_long_to_meet_it() -> None:
    replica = Replica("qoserve-relegation", max_running=1)
    long = replica.add(1000, service=stream(0.5))  # takes more than a second
    short = replica.add(20, service=stream(0.6))
    replica.run()
    assert replica.started == [short, long]


def test_qoserve_sets_aside_the_less_important_in_the_stead_of_the_important() -> None:
    replica = Replica("qoserve-relegation", max_running=1)
    important = replica.add(20, service=stream(0.5, rank=0))
    lesser = replica.add(20, service=stream(2.0, rank=1))
    other = replica.add(20, service=stream(3.0, rank=0))
    replica.wait(1.0)
    replica.run()
    assert replica.started == [important, other, lesser]
    assert EventKind.RELEGATED in replica.events(lesser)
    assert EventKind.RELEGATED not in replica.events(important)


def test_qoserve_prefers_the_shorter_of_two_with_like_deadlines_and_edf_does_not() -> None:
    def order(policy: str) -> list[int]:
        replica = Replica(policy, max_running=1)
        replica.add(1000, service=stream(20.0))
        replica.add(20, service=stream(21.0))
        replica.run()
        return replica.started

    assert order("qoserve-relegation") == [0, 1]
    assert order("qoserve") == [1, 0]


def test_qoserve_does_not_put_off_a_prompt_that_a_delay_would_make_late() -> None:
    replica = Replica("qoserve", budget=64)
    begun = replica.add(600, service=stream(0.75))  # needs ten steps of 74 ms: 0.70 s
    replica.step()
    replica.add(20, service=stream(0.3))
    replica.step()
    assert replica.prefills[-1][0] == begun


def test_qoserve_puts_off_a_prompt_that_has_time() -> None:
    replica = Replica("qoserve", budget=64)
    replica.add(600, service=stream(5.0))
    replica.step()
    urgent = replica.add(20, service=stream(0.3))
    replica.step()
    assert replica.prefills[-1][0] == urgent
