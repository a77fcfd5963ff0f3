"""Speculative prefill of the next turn: what that turn gains, and that other requests lose nothing."""

from __future__ import annotations

import functools
import gc
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import examples
from tests.core_submits import core_submit

from moiety_engine.cache.block_pool import BlockPool
from moiety_engine.cache.host import HostTier
from moiety_engine.loop import EngineLoop
from moiety_engine.messages import CoreFinish, CoreOutput, CoreSubmit
from moiety_engine.scheduling.admission.batching_strategies import STRATEGIES
from moiety_engine.scheduling.kv.kv_ledger import KvLedger
from moiety_engine.scheduling.limits import SchedulerLimits
from moiety_engine.scheduling.scheduler import Scheduler
from moiety_engine.scheduling.speculative_prefill.return_patterns import HORIZON_S, ConversationWatch, ReturnPatterns
from moiety_engine.scheduling.speculative_prefill.speculative_prefill import LIKELY, MAX_WANTED, _Wanted
from moiety_wire.block_hashes import tenant_mark
from moiety_wire.engine_choices import Batching
from moiety_wire.messages import FinishReason, SpeculativePrefillRequest

BLOCK = 4


def make_scheduler(num_blocks: int = 64, *, prefix_caching: bool = True, apart: bool = False) -> Scheduler:
    ledger = KvLedger(BlockPool(num_blocks), BLOCK, prefix_caching=prefix_caching, answers_apart=apart)
    limits = SchedulerLimits(16, 8, batch_size=4, batch_timeout_ms=5.0)
    return Scheduler(ledger, limits, STRATEGIES[Batching.CONTINUOUS], "fcfs")


def ask(key: int, prompt: list[int], *, tenant: str = "a", max_tokens: int = 4) -> CoreSubmit:
    return core_submit(key, prompt, max_tokens, tenant_id=tenant, cache_salt=tenant.encode())


def prefetch(key: int, prompt: list[int], *, tenant: str = "a", pattern: str = "h", **before: Any) -> CoreSubmit:
    wanted = SpeculativePrefillRequest(pattern, **before)
    return msgspec.structs.replace(ask(key, prompt, tenant=tenant, max_tokens=0), speculative_prefill=wanted)


class Driver:
    """A scheduler and a model that returns 100 + position, with steps of a millisecond."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.now_ns = 0
        self.ends: dict[int, CoreFinish] = {}
        self.plans: list[list[tuple[int, int]]] = []  # key and tokens of requests, without speculative prefill

    def add(self, submit: CoreSubmit) -> None:
        self.scheduler.add(submit, seed=0, now_ns=self.now_ns)
        self._take([])

    def step(self) -> bool:
        """Run a step; return whether it computed anything, speculative prefill included."""
        plan = self.scheduler.plan(self.now_ns)
        if not plan.is_speculative_prefill:
            self.plans.append([(chunk.sequence.key, chunk.num_tokens) for chunk in plan.chunks])
        tokens = [100 + chunk.sequence.num_output for chunk in plan.chunks if chunk.samples]
        self.now_ns += 10**6
        self._take(self.scheduler.commit(plan, tokens, [None] * len(tokens), self.now_ns))
        if plan.is_speculative_prefill:
            assert self.scheduler.idle, "something was computed unasked beside what was asked for"
            assert self.scheduler.kv.pool.num_used == 0
        return bool(plan.chunks)

    def run(self) -> None:
        for _ in range(2000):
            if not self.step():
                return
        raise AssertionError("the scheduler makes no progress")

    def _take(self, outputs: list[CoreOutput]) -> None:
        for output in [*outputs, *self.scheduler.speculative_prefill.take_ended()]:
            if output.finish is not None:
                assert output.key not in self.ends
                self.ends[output.key] = output.finish


def answered(driver: Driver, key: int, prompt: list[int], **more: Any) -> CoreFinish:
    driver.add(ask(key, prompt, **more))
    driver.run()
    return driver.ends[key]


def test_the_next_turn_hits_the_blocks_of_speculative_prefill() -> None:
    driver = Driver(make_scheduler())
    answered(driver, 1, list(range(10)))
    history = [*range(10), *range(50, 63)]  # without its reasoning the answer has other tokens
    driver.add(prefetch(2, history, num_shared=10, other_ids=[100, 101, 102, 103], num_asked=10))
    driver.run()
    assert (driver.ends[2].detail, driver.ends[2].num_speculative_tokens) == ("computed", 12)
    turn = answered(driver, 3, [*history, 7, 8, 9])
    assert (turn.num_cached_tokens, turn.num_speculative_tokens) == (20, 12)
    account = driver.scheduler.speculative_prefill.account
    assert (account.computed_total, account.used_total, account.wasted_total) == (12, 12, 0)
    again = answered(driver, 4, [*history, 7, 8, 9])
    assert (again.num_cached_tokens, again.num_speculative_tokens) == (24, 0), "a token comes true once"


def test_speculative_prefill_uses_the_answer_where_prompts_do_not_continue_it() -> None:
    driver = Driver(make_scheduler(apart=True))
    answered(driver, 1, list(range(8)), max_tokens=9)
    history = [*range(8), *range(100, 108), 1]
    driver.add(prefetch(2, history, num_shared=16, num_asked=8))
    driver.run()
    assert driver.ends[2].num_speculative_tokens == 8
    assert answered(driver, 3, [*history, 7, 8, 9]).num_cached_tokens == 16


def test_speculative_prefill_runs_in_idle_steps_only_and_yields_to_new_requests() -> None:
    driver = Driver(make_scheduler(num_blocks=200))
    driver.add(ask(1, list(range(30)), max_tokens=3))
    driver.add(prefetch(2, [9] * 400))
    for _ in range(4):
        assert driver.step()
        assert driver.scheduler.speculative_prefill.account.computed_total == 0
    assert driver.ends[1].reason is FinishReason.LENGTH
    assert driver.step()
    begun = driver.scheduler.speculative_prefill.account.computed_total
    assert 0 < begun < 400
    driver.add(ask(3, list(range(40, 50)), max_tokens=2))
    driver.step()
    assert driver.plans[-1] == [(3, 10)]
    driver.run()
    assert driver.ends[3].num_output_tokens == 2
    assert (driver.ends[2].detail, driver.ends[2].num_speculative_tokens) == ("computed", 400)


def test_it_waits_for_parked_requests_too_which_go_on_at_any_moment() -> None:
    driver = Driver(make_scheduler())
    driver.add(msgspec.structs.replace(ask(1, [1, 2, 3]), credit_tokens=1))
    driver.add(prefetch(2, [9] * 20))
    while driver.step():
        pass
    assert driver.scheduler.num_paused == 1
    assert driver.scheduler.speculative_prefill.account.computed_total == 0
    driver.scheduler.abort(1, FinishReason.ABORT, now_ns=driver.now_ns)
    driver.run()
    assert driver.ends[2].num_speculative_tokens == 20


def test_a_full_cache_is_left_alone_but_for_what_the_conversation_cannot_use_any_more() -> None:
    driver = Driver(make_scheduler(num_blocks=12))
    thoughts = [100, 101, 102, 103, 104, 105, 106, 107]
    answered(driver, 1, list(range(8)), max_tokens=9)
    answered(driver, 2, list(range(200, 231)), max_tokens=1, tenant="b")
    assert driver.scheduler.kv.pool.num_blank == 1
    history = [*range(8), *range(60, 72)]
    driver.add(prefetch(3, history, num_shared=8, other_ids=thoughts, num_asked=8))
    driver.run()
    assert (driver.ends[3].detail, driver.ends[3].num_speculative_tokens) == ("computed", 12)
    driver.add(prefetch(4, [9] * 8))
    driver.run()
    assert (driver.ends[4].detail, driver.ends[4].num_speculative_tokens) == ("no_room", 0)
    others = answered(driver, 5, list(range(200, 232)), max_tokens=1, tenant="b")
    assert others.num_cached_tokens == 28


def test_speculative_prefill_skips_blocks_in_host_memory() -> None:
    ledger = KvLedger(BlockPool(6), BLOCK, prefix_caching=True, host=HostTier(16))
    limits = SchedulerLimits(16, 8, batch_size=4, batch_timeout_ms=5.0)
    driver = Driver(Scheduler(ledger, limits, STRATEGIES[Batching.CONTINUOUS], "fcfs"))
    answered(driver, 1, list(range(12)), max_tokens=1)
    answered(driver, 2, list(range(200, 220)), max_tokens=1, tenant="b")
    driver.add(prefetch(3, [*range(12), *range(60, 68)], num_shared=12, num_asked=12))
    driver.run()
    assert (driver.ends[3].detail, driver.ends[3].num_speculative_tokens) == ("no_room", 0)
    assert answered(driver, 4, list(range(13)), max_tokens=1).num_cached_tokens == 12


def test_unused_speculative_prefill_counts_as_wasted_and_is_not_repeated() -> None:
    driver = Driver(make_scheduler(num_blocks=400))
    for key in range(12):
        driver.add(prefetch(key, [key] * 8))
        driver.run()
        driver.now_ns += int(HORIZON_S * 1e9)
    driver.add(prefetch(99, [99] * 8))
    driver.add(prefetch(100, [100] * 8, pattern="another"))
    driver.run()
    account = driver.scheduler.speculative_prefill.account
    assert driver.ends[0].detail == driver.ends[100].detail == "computed"
    assert driver.ends[99].detail == "unlikely"
    assert account.wasted_total == account.computed_total - 8 > 0
    assert len(driver.ends) == 14, "each is told of once"
    assert account.computed_total == account.used_total + account.wasted_total + account.open_tokens


def test_speculative_prefill_is_dropped_when_the_actual_prompt_arrives() -> None:
    driver = Driver(make_scheduler())
    driver.add(ask(1, list(range(10))))
    driver.add(prefetch(2, [9] * 8))
    driver.add(ask(3, [9] * 10))
    driver.run()
    assert (driver.ends[2].detail, driver.ends[2].num_speculative_tokens) == ("came", 0)
    assert driver.ends[3].num_speculative_tokens == 0


def test_a_tenant_that_foresees_much_crowds_out_itself() -> None:
    driver = Driver(make_scheduler(num_blocks=3000))
    driver.add(ask(0, [1, 2, 3], max_tokens=2))
    for key in range(1, MAX_WANTED + 1):
        driver.add(prefetch(key, [key] * 8, pattern=str(key)))
    driver.add(prefetch(9999, [7] * 8, tenant="b", pattern="b"))
    assert [key for key, end in driver.ends.items() if end.detail == "crowded"] == [1]
    driver.run()
    order = [key for key, end in driver.ends.items() if end.detail == "computed"]
    assert order.index(9999) <= 1, "each tenant has its share, however much another speculative_prefill"


def test_one_that_is_given_up_ends_at_once_and_what_it_had_stays_cached() -> None:
    driver = Driver(make_scheduler(num_blocks=200))
    driver.add(prefetch(1, [9] * 400))
    driver.step()
    assert driver.scheduler.abort(1, FinishReason.ABORT, now_ns=driver.now_ns) is None
    assert not driver.step()
    done = driver.ends[1]
    assert done.reason is FinishReason.ABORT
    assert 0 < done.num_speculative_tokens < 400
    assert answered(driver, 2, [9] * 400).num_speculative_tokens == done.num_speculative_tokens


def test_a_tenant_cannot_detect_another_tenants_speculative_prefill() -> None:
    driver = Driver(make_scheduler())
    driver.add(prefetch(1, [9] * 20))
    driver.run()
    assert answered(driver, 2, [9] * 21, tenant="b").num_cached_tokens == 0
    assert answered(driver, 3, [9] * 21).num_speculative_tokens == 20


def test_a_habit_is_likely_by_how_often_and_how_soon_its_conversations_came_back() -> None:
    patterns, now_s = ReturnPatterns(), 0.0
    watch = ConversationWatch[None](patterns)
    assert patterns.likelihood("new", 0.0) == pytest.approx(0.5)
    for number in range(120):
        watch.open(b"chat%d" % number, "chat", now_s)
        watch.open(b"script%d" % number, "script", now_s)
        watch.advance(now_s := now_s + 20.0)
        assert watch.found(b"chat%d" % number, now_s) is not None
    assert patterns.likelihood("chat", 0.0) > 0.9
    assert patterns.likelihood("chat", 600.0) < LIKELY, "all came back sooner"
    assert patterns.likelihood("script", 0.0) < LIKELY
    for number in range(300):  # most of which is still open
        watch.open(b"busy%d" % number, "busy", now_s)
        watch.advance(now_s := now_s + 1.0)
        if number % 10 and number >= 16:
            watch.found(b"busy%d" % (number - 15), now_s)
    assert patterns.likelihood("busy", 0.0) > 0.8, "one that may yet come back is not taken for one that does not"


_ARRIVALS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 30), st.integers(0, 30), st.integers(1, 8), st.sampled_from("ab")),
    min_size=1,
    max_size=10,
)
_FORESEEN = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 60), st.integers(0, 9)), max_size=10)


def _served(arrivals: list[Any], foreseen: list[Any], num_blocks: int) -> tuple[Driver, list[list[tuple[int, int]]]]:
    """Return what each step computed for requests; tenant c has speculative prefill only."""
    driver = Driver(make_scheduler(num_blocks))
    steps = []
    for number in range(110):
        for key, (at, length, shared, output, tenant) in enumerate(arrivals):
            if at == number:
                prompt = [1] * min(shared, length) + [50 + key] * max(0, length - shared)
                driver.add(ask(key, prompt, tenant=tenant, max_tokens=output))
        for key, (at, length, first) in enumerate(foreseen, 1000):
            if at == number:
                driver.add(prefetch(key, [first] * length, tenant="c", pattern=str(key)))
        driver.plans = []
        driver.step()
        steps.append(driver.plans[0] if driver.plans else [])
    return driver, steps


@given(arrivals=_ARRIVALS, foreseen=_FORESEEN, num_blocks=st.integers(12, 40))
@settings(max_examples=examples(60), deadline=None)
def test_speculative_prefill_changes_no_step_of_other_requests(
    arrivals: list[Any], foreseen: list[Any], num_blocks: int
) -> None:
    with_it, steps = _served(arrivals, foreseen, num_blocks)
    without, same = _served(arrivals, [], num_blocks)
    assert steps == same
    for key in range(len(arrivals)):
        assert with_it.ends[key].num_cached_tokens == without.ends[key].num_cached_tokens
    assert sorted(key for key in with_it.ends if key >= 1000) == [1000 + key for key in range(len(foreseen))]
    account, pool = with_it.scheduler.speculative_prefill.account, with_it.scheduler.kv.pool
    assert account.computed_total == account.used_total + account.wasted_total + account.open_tokens
    assert (pool.num_used, pool.num_free) == (0, num_blocks)
    assert len(pool.allocate(num_blocks)) == num_blocks


def _finished(loop: EngineLoop, keys: set[int]) -> dict[int, CoreOutput]:
    """Run steps until all these requests have ended."""
    found: dict[int, CoreOutput] = {}
    tokens: dict[int, list[int]] = {key: [] for key in keys}
    for _ in range(2000):
        loop.step()
        told = loop.take_outputs()
        for output in told.outputs if told else ():
            tokens.setdefault(output.key, []).extend(output.token_ids)
            if output.finish is not None:
                found[output.key] = CoreOutput(output.key, tokens[output.key], None, output.finish)
        if keys <= found.keys():
            return found
    raise AssertionError(f"{keys - found.keys()} have not ended")


def test_answers_after_speculative_prefill_are_equal_with_less_computation(loops: Any) -> None:
    prompt, history = list(range(3, 43)), [*range(3, 43), *range(100, 160)]
    turn = [*history, 7, 8, 9]
    plain, foreseeing = loops.make(), loops.make()
    plain.submit(ask(1, turn, max_tokens=8))
    (expected,) = _finished(plain, {1}).values()
    foreseeing.submit(ask(1, prompt, max_tokens=8))
    _finished(foreseeing, {1})
    foreseeing.submit(prefetch(2, history, num_shared=40, num_asked=40))
    ahead = _finished(foreseeing, {2})[2].finish
    foreseeing.submit(ask(3, turn, max_tokens=8))
    got = _finished(foreseeing, {3})[3]
    assert ahead is not None
    assert got.finish is not None
    assert got.token_ids == expected.token_ids
    size = foreseeing.block_size
    assert got.finish.num_cached_tokens == 100 // size * size
    assert got.finish.num_speculative_tokens == ahead.num_speculative_tokens > 100 - 40 - size
    load = foreseeing.load()
    assert (load.speculative_tokens_total, load.speculative_used_tokens_total) == (ahead.num_speculative_tokens,) * 2
    assert load.requests_total == 2, "what is foreseen is no request"


def test_cancelled_speculative_prefill_leaves_no_objects() -> None:
    scheduler = make_scheduler()
    speculative_prefill = scheduler.speculative_prefill
    for key in range(1, 40):
        speculative_prefill.add(prefetch(key, [1000 + key] * 200), key * 10**6)
        speculative_prefill.abort(key, key * 10**6)
    speculative_prefill.take_ended()
    gc.collect()
    assert not [one for one in gc.get_objects() if type(one) is _Wanted]


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_nothing_is_computed_for_who_was_erased(when: str) -> None:
    driver = Driver(make_scheduler(num_blocks=200))
    answered(driver, 1, list(range(10)))
    erase = functools.partial(driver.scheduler.groups.forget_tenants, frozenset([tenant_mark("a")]))
    if when == "before":
        erase()
    driver.add(prefetch(2, [9] * 400))
    if when == "meanwhile":
        assert driver.step()
        erase()
    assert not driver.step()
    assert driver.ends[2].detail == "no_room"
