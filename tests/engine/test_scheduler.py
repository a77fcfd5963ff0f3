"""Invariants of the scheduler, on the real scheduler and block pool with a stand-in for the model."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import examples
from tests.core_submits import core_submit

from moiety_engine.cache.block_pool import BlockPool
from moiety_engine.messages import CoreFinish, CoreSubmit
from moiety_engine.scheduling.admission.batching_strategies import STRATEGIES
from moiety_engine.scheduling.kv.kv_ledger import KvLedger
from moiety_engine.scheduling.limits import SchedulerLimits
from moiety_engine.scheduling.scheduler import Scheduler
from moiety_wire.engine_choices import Batching
from moiety_wire.messages import FinishReason, Sampling

BLOCK_SIZE = 4
EOS = 7


def make_scheduler(
    *,
    num_blocks: int = 32,
    budget: int = 16,
    max_running: int = 8,
    batching: Batching = Batching.CONTINUOUS,
    size: int = 4,
    policy: str = "fcfs",
) -> Scheduler:
    ledger = KvLedger(BlockPool(num_blocks), BLOCK_SIZE, prefix_caching=True)
    limits = SchedulerLimits(budget, max_running, batch_size=size, batch_timeout_ms=5.0)
    return Scheduler(ledger, limits, STRATEGIES[batching], policy)


def make_submit(
    key: int, prompt: list[int], *, max_tokens: int = 8, credit: int = 1 << 30, salt: bytes = b"", min_tokens: int = 0
) -> CoreSubmit:
    return core_submit(
        key,
        prompt,
        max_tokens,
        sampling=Sampling(),
        min_tokens=min_tokens,
        stop_token_ids=[EOS],
        credit_tokens=credit,
        cache_salt=salt,
    )


class Driver:
    """Steps a scheduler with a model that says token 100+position, and checks every law at every step."""

    def __init__(self, scheduler: Scheduler, eos_at: dict[int, int] | None = None) -> None:
        self.scheduler = scheduler
        self.eos_at = eos_at or {}
        self.outputs: dict[int, list[int]] = {}
        self.finishes: dict[int, CoreFinish] = {}
        self.credit: dict[int, int] = {}
        self.steps = 0
        self.num_rows: list[int] = []
        self.live = True  # a request with credit runs, unless the dynamic strategy waits for further requests

    def add(self, submit: CoreSubmit) -> None:
        self.outputs[submit.key] = []
        self.credit[submit.key] = submit.credit_tokens
        self.scheduler.add(submit, seed=0, now_ns=self.steps * 10**6)

    def extend(self, key: int, credit: int, *, last: bool = False) -> None:
        self.credit[key] = max(self.credit[key], credit)
        self._take(self.scheduler.extend(key, credit, last=last, now_ns=self.steps))

    def abort(self, key: int) -> None:
        self._take(self.scheduler.abort(key, FinishReason.ABORT, now_ns=self.steps))

    def step(self) -> bool:
        plan = self.scheduler.plan(self.steps * 10**6)
        self.num_rows.append(plan.num_rows)
        assert plan.num_rows <= self.scheduler.limits.max_batch_tokens
        assert plan.num_rows == sum(c.num_tokens + c.num_pad for c in plan.chunks)
        assert len({c.sequence.key for c in plan.chunks}) == len(plan.chunks)
        if self.live and not plan.chunks:
            assert not [
                s for s in self.scheduler.queues.by_key.values() if s.has_credit and not s.padded_row.is_finished
            ]
        tokens = []
        for chunk in plan.chunks:
            sequence = chunk.sequence
            needed = sequence.kv.num_computed + chunk.num_tokens + chunk.num_pad
            assert len(sequence.kv.blocks) * BLOCK_SIZE >= needed
            if chunk.samples:
                assert sequence.kv.num_computed + chunk.num_tokens == len(sequence.tokens)
                position = sequence.num_output
                tokens.append(EOS if self.eos_at.get(sequence.key) == position else 100 + position)
        for output in self.scheduler.commit(plan, tokens, [None] * len(tokens), self.steps * 10**6):
            self._take(output)
        self.steps += 1
        self.check_blocks()
        self.check_pending_tokens()
        return bool(plan.chunks)

    def _take(self, output: object) -> None:
        if output is None:
            return
        self.outputs[output.key] += output.token_ids  # type: ignore[attr-defined]
        assert len(self.outputs[output.key]) <= self.credit[output.key]  # type: ignore[attr-defined]
        if output.finish is not None:  # type: ignore[attr-defined]
            assert output.key not in self.finishes  # type: ignore[attr-defined]
            self.finishes[output.key] = output.finish  # type: ignore[attr-defined]

    def check_blocks(self) -> None:
        """A block is used by exactly the sequences that hold it, and written by one only."""
        sequences = self.scheduler.queues.by_key.values()
        held = [block for s in sequences for block in s.kv.blocks]
        assert self.scheduler.kv.pool.num_used == len(set(held))
        unsealed = [block for s in sequences for block in s.kv.blocks[s.kv.num_sealed :]]
        assert len(unsealed) == len(set(unsealed))

    def check_pending_tokens(self) -> None:
        """Tokens to prefill are counted once, from the arrival of a request until it decodes."""
        queues = self.scheduler.queues
        begun = [len(s.tokens) - s.kv.num_computed for s in (*queues.prefilling, *queues.returning)]
        assert queues.num_pending_tokens() == sum(s.kv.num_uncached for s in queues.waiting.values()) + sum(begun)
        assert all(count >= 0 for count in begun)

    def run(self, limit: int = 2000) -> None:
        while not self.scheduler.idle:
            assert self.steps < limit, "the scheduler makes no progress"
            self.step()
        assert self.scheduler.kv.pool.num_used == 0
        assert self.scheduler.queues.num_pending_tokens() == 0


@st.composite
def _requests(draw: st.DrawFn) -> list[tuple[int, int, int, int, bytes]]:
    """Draw requests: arrival step, lengths of prompt, shared prefix and output, and salt."""
    return draw(
        st.lists(
            st.tuples(
                st.integers(0, 12),
                st.integers(1, 40),
                st.integers(0, 40),
                st.integers(1, 20),
                st.sampled_from([b"a", b"b"]),
            ),
            min_size=1,
            max_size=12,
        )
    )


@given(
    requests=_requests(),
    num_blocks=st.integers(15, 40),
    budget=st.integers(8, 32),
    batching=st.sampled_from(list(Batching)),
    eos=st.integers(0, 25),
)
@settings(max_examples=examples(150), deadline=None)
def test_every_request_ends_with_all_its_tokens_once_and_the_pool_is_whole(
    requests: list[tuple[int, int, int, int, bytes]], num_blocks: int, budget: int, batching: Batching, eos: int
) -> None:
    driver = Driver(
        make_scheduler(num_blocks=num_blocks, budget=budget, batching=batching),
        eos_at=dict.fromkeys(range(0, 12, 3), eos),
    )
    driver.live = batching is not Batching.DYNAMIC
    pending = sorted(enumerate(requests), key=lambda item: item[1][0])
    while pending or not driver.scheduler.idle:
        while pending and pending[0][1][0] <= driver.steps:
            key, (_, length, shared, output, salt) = pending.pop(0)
            shared = min(shared, length)
            driver.add(make_submit(key, [1] * shared + [50 + key] * (length - shared), max_tokens=output, salt=salt))
        driver.step()
        assert driver.steps < 3000
    assert driver.scheduler.kv.pool.num_used == 0
    for key, (_, _, _, output, _) in enumerate(requests):
        ends_early = key % 3 == 0 and eos < output
        expected = [100 + i for i in range(eos)] + [EOS] if ends_early else [100 + i for i in range(output)]
        assert driver.outputs[key] == expected
        assert driver.finishes[key].num_output_tokens == len(expected)
        assert driver.finishes[key].reason == (FinishReason.STOP if ends_early else FinishReason.LENGTH)


@given(data=st.data(), batching=st.sampled_from(list(Batching)))
@settings(max_examples=examples(100), deadline=None)
def test_credit_is_never_exceeded_and_blocks_are_conserved_under_any_order_of_commands(
    data: st.DataObject, batching: Batching
) -> None:
    max_running = data.draw(st.integers(1, 8))
    driver = Driver(make_scheduler(num_blocks=14, budget=8, max_running=max_running, batching=batching))
    driver.live = batching is not Batching.DYNAMIC
    next_key = 0
    for _ in range(data.draw(st.integers(5, 60))):
        action = data.draw(st.sampled_from(["add", "step", "step", "step", "extend", "abort", "last"]))
        alive = [key for key in driver.outputs if key not in driver.finishes]
        if action == "add":
            prompt = [data.draw(st.integers(1, 2))] * data.draw(st.integers(1, 30))
            driver.add(make_submit(next_key, prompt, max_tokens=20, credit=data.draw(st.integers(0, 6))))
            next_key += 1
        elif action == "step":
            driver.step()
        elif alive:
            key = data.draw(st.sampled_from(alive))
            if action == "abort":
                driver.abort(key)
            else:
                driver.extend(key, data.draw(st.integers(0, 25)), last=action == "last")
            driver.check_blocks()
    for key in driver.outputs:
        if key not in driver.finishes:
            driver.extend(key, 1000)
    driver.run()
    assert set(driver.finishes) == set(driver.outputs)


def test_preempting_the_holder_of_a_shared_prefix_preempts_others_too() -> None:
    driver = Driver(make_scheduler(num_blocks=14, budget=8, max_running=2))
    for key, (token, length, credit) in enumerate([(1, 22, 4), (1, 17, 1), (2, 5, 1)]):
        driver.add(make_submit(key, [token] * length, max_tokens=20, credit=credit))
    while driver.step():
        pass
    assert driver.scheduler.num_paused == 3, "all have what they may have, and hold their blocks"
    driver.add(make_submit(3, [2] * 28, max_tokens=20, credit=1))
    assert driver.step(), "it needs what the last has, and one block more"


def test_a_paused_request_goes_on_where_it_stopped_when_credit_arrives() -> None:
    driver = Driver(make_scheduler())
    driver.add(make_submit(0, [1, 2, 3], max_tokens=6, credit=2))
    for _ in range(5):
        driver.step()
    assert driver.outputs[0] == [100, 101]
    assert driver.scheduler.num_paused == 1
    driver.extend(0, 6)
    driver.run()
    assert driver.outputs[0] == [100, 101, 102, 103, 104, 105]


@pytest.mark.parametrize("batching", [b for b in Batching if b is not Batching.DYNAMIC])
def test_clients_that_do_not_read_hold_neither_the_batch_nor_the_blocks(batching: Batching) -> None:
    driver = Driver(make_scheduler(num_blocks=12, max_running=3, batching=batching, size=3))
    for key in range(6):
        driver.add(make_submit(key, [10 + key] * 9, max_tokens=8, credit=3))
    while driver.step():
        pass
    assert driver.scheduler.num_paused == 6
    driver.add(make_submit(6, [30] * 20, max_tokens=8))
    while 6 not in driver.finishes:
        assert driver.step()
    for key in range(6):
        driver.extend(key, 8)
    driver.run()
    assert all(driver.outputs[key] == [100 + i for i in range(8)] for key in range(7))


def test_the_last_credit_ends_a_request_with_length_and_a_stable_detail() -> None:
    driver = Driver(make_scheduler())
    driver.add(make_submit(0, [1, 2, 3], max_tokens=6, credit=2))
    for _ in range(5):
        driver.step()
    driver.extend(0, 2, last=True)
    assert driver.finishes[0].reason == FinishReason.LENGTH
    assert driver.finishes[0].detail == "credit_refused"
    assert driver.scheduler.kv.pool.num_used == 0


def test_an_abort_frees_the_blocks_before_the_next_step() -> None:
    driver = Driver(make_scheduler())
    driver.add(make_submit(0, [1] * 30))
    driver.step()
    assert driver.scheduler.kv.pool.num_used > 0
    driver.abort(0)
    assert driver.scheduler.kv.pool.num_used == 0


def test_a_prefix_is_shared_within_a_salt_and_never_across() -> None:
    prompt = list(range(20, 33))
    driver = Driver(make_scheduler())
    for key, salt in enumerate([b"a", b"a", b"b"]):
        driver.add(make_submit(key, prompt, salt=salt))
        driver.run()
    assert [driver.finishes[key].num_cached_tokens for key in range(3)] == [0, 12, 0]


def test_requests_that_arrive_together_with_one_prefix_compute_it_once() -> None:
    prompt = list(range(20, 36))
    driver = Driver(make_scheduler(budget=64))
    for key in range(4):
        driver.add(make_submit(key, [*prompt, 50 + key]))
    driver.run()
    assert [driver.finishes[key].num_cached_tokens for key in range(4)] == [0, 16, 16, 16]


def test_a_long_prompt_is_prefilled_in_chunks_while_others_decode() -> None:
    driver = Driver(make_scheduler(budget=8))
    driver.add(make_submit(0, [1, 2], max_tokens=10))
    driver.step()
    driver.add(make_submit(1, list(range(20, 50))))
    driver.step()
    assert driver.num_rows[-1] == 8
    assert len(driver.outputs[0]) == 2


@pytest.mark.parametrize(
    ("batching", "first_step_rows"),
    [(Batching.NONE, 3), (Batching.STATIC, 6), (Batching.PADDED, 8), (Batching.CONTINUOUS, 9)],
)
def test_strategies_differ_in_who_joins_and_what_is_padded(batching: Batching, first_step_rows: int) -> None:
    driver = Driver(make_scheduler(batching=batching, size=2))
    for key, prompt in enumerate([[1, 2, 3], [4, 5, 6], [7, 8, 9]]):
        driver.add(make_submit(key, prompt if batching is not Batching.PADDED else prompt[: 3 - key] + [9] * (key * 2)))
    driver.step()
    assert driver.num_rows[0] == first_step_rows


def test_dynamic_waits_for_company_until_the_batch_is_full_or_the_time_is_up() -> None:
    driver = Driver(make_scheduler(batching=Batching.DYNAMIC, size=2))
    driver.live = False
    driver.add(make_submit(0, [1, 2, 3], max_tokens=1))
    assert not driver.step()
    driver.add(make_submit(1, [1, 2, 3], max_tokens=1))
    assert driver.step()
    driver.run()
    driver.add(make_submit(2, [4, 5, 6], max_tokens=1))
    arrived = driver.steps
    driver.run()  # a step is a millisecond, and the timeout five
    assert driver.steps - arrived == 6
    assert driver.outputs[2] == [100]
