"""The queue of grammar compilations: fairness between tenants, limits, aborts, and the step loop that uses it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from moiety_demo import checkpoint_path
from moiety_engine.config import EngineConfig, Overlap
from moiety_engine.loop import EngineLoop
from moiety_engine.messages import CoreFailure
from moiety_engine.offline import run_all
from moiety_engine.startup import load_loop
from moiety_engine.structured_outputs.compile_queue import GrammarCompileQueue
from moiety_engine.structured_outputs.service import GrammarService
from moiety_wire.engine_choices import LoadFormat
from moiety_wire.grammars import GrammarKind, GrammarSpec
from moiety_wire.messages import FailureCode, Sampling

from .grammar_services import (
    CHOICE,
    CRASHING,
    LIMITS,
    LIST,
    SLOW,
    asked,
    children_of,
    kill,
    service,
    template_pid,
    until,
)

__all__ = ["service"]  # fixtures


def drained(queue: GrammarCompileQueue, keys: set[int]) -> tuple[list[int], list[CoreFailure]]:
    """Return keys in the order in which they were ready or refused, and the refusals."""
    order: list[int] = []
    refusals: list[CoreFailure] = []

    def take() -> bool:
        order.extend(submit.key for submit, _ in queue.take_ready())
        refused = queue.take_refused()
        order.extend(one.key for one in refused)
        refusals.extend(refused)
        return keys <= set(order)

    until(take)
    return order, refusals


class FaultyService(GrammarService):
    """A service that raises an error of its own."""

    def compile(self, spec: GrammarSpec) -> Any:
        raise RuntimeError("an error of ours")


def test_an_error_of_the_compiler_is_the_engines_and_not_the_requests() -> None:
    service = FaultyService(checkpoint_path(), LIMITS)
    queue = GrammarCompileQueue(service, LIMITS)
    queue.add_request(asked(1, CHOICE, "tenant"))
    _, (failure,) = drained(queue, {1})
    assert failure.code is FailureCode.ENGINE_FAILED and "error in the engine" in failure.message
    service.close()


def test_a_tenant_with_expensive_grammars_does_not_delay_another(service: GrammarService) -> None:
    queue = GrammarCompileQueue(service, LIMITS)
    slow = [GrammarSpec(GrammarKind.REGEX, "x?" * (20_000 + i)) for i in range(6)]
    for key, grammar in enumerate(slow):
        queue.add_request(asked(key, grammar, "hostile"))
    queue.add_request(asked(100, GrammarSpec(GrammarKind.CHOICE, '["red", "green"]'), "other"))
    assert queue.num_waiting == 7
    order, _ = drained(queue, {100})
    assert len(order) <= 2  # at most one of the expensive ones ended before it
    for key in range(6):
        queue.remove_request(key)
    assert queue.num_waiting == 0


def test_the_tenant_that_has_used_the_least_goes_first(service: GrammarService) -> None:
    queue = GrammarCompileQueue(service, LIMITS)
    tenants = [f"tenant-{i}" for i in range(3)]
    for i in range(9):
        grammar = GrammarSpec(GrammarKind.REGEX, "x?" * (21_000 + i) if i < 6 else f"cheap {i}")
        queue.add_request(asked(i, grammar, tenants[i // 3]))
    order, _ = drained(queue, set(range(9)))
    assert max(order.index(i) for i in (6, 7, 8)) <= 5  # the cheap ones of the third do not wait for the others'


def test_requests_with_one_grammar_are_compiled_together_also_of_several_tenants(service: GrammarService) -> None:
    queue = GrammarCompileQueue(service, LIMITS)
    grammar = GrammarSpec(GrammarKind.REGEX, "(together|apart)+")
    for key in range(8):
        queue.add_request(asked(key, grammar, f"tenant-{key % 3}"))
    used_s = service.compile_seconds_total
    order, refusals = drained(queue, set(range(8)))
    assert sorted(order) == list(range(8)) and not refusals
    assert service.compile_seconds_total - used_s < 0.2
    queue.add_request(asked(9, grammar))
    assert [submit.key for submit, _ in queue.take_ready()] == [9]  # at once


def test_a_full_queue_of_one_tenant_refuses_it_and_nobody_else(service: GrammarService) -> None:
    queue = GrammarCompileQueue(service, msgspec.structs.replace(LIMITS, max_waiting_per_tenant=2))
    for key in range(4):
        queue.add_request(asked(key, GrammarSpec(GrammarKind.REGEX, f"full {key}"), "eager"))
    queue.add_request(asked(9, GrammarSpec(GrammarKind.REGEX, "full 9"), "other"))
    order, refusals = drained(queue, {0, 1, 2, 3, 9})
    assert [(one.key, one.code) for one in refusals] == [(2, FailureCode.OVERLOADED), (3, FailureCode.OVERLOADED)]
    assert all(one.retry_after_s and "2 grammars" in one.message for one in refusals)
    assert sorted(order) == [0, 1, 2, 3, 9]


def test_an_aborted_request_leaves_and_the_others_are_served(service: GrammarService) -> None:
    queue = GrammarCompileQueue(service, LIMITS)
    grammar = GrammarSpec(GrammarKind.REGEX, "leave (or|stay)")
    for key in (1, 2):
        queue.add_request(asked(key, grammar))
    gone = queue.remove_request(1)
    assert gone is not None and gone.key == 1
    assert queue.remove_request(1) is None
    assert drained(queue, {2})[0] == [2]
    queue.add_request(asked(3, grammar))
    ready = queue.remove_request(3)  # it is ready, and has not been taken
    assert ready is not None and ready.key == 3
    assert not list(queue.take_ready())


def make_loop(**settings: Any) -> EngineLoop:
    settings = {"load_format": LoadFormat.DUMMY, "kv_memory_bytes": 2**23, "num_threads": 1, **settings}
    config = EngineConfig(model=str(checkpoint_path()), name="m", device="cpu", dtype="float32", **settings)
    return load_loop(config)


@pytest.mark.parametrize(
    "layout",
    [
        {"overlap": Overlap.OFF},
        {"overlap": Overlap.ON},
        {"tp": 2},
        pytest.param({"pp": 2}, marks=pytest.mark.thorough),
        pytest.param({"dp_attention": 2}, marks=pytest.mark.thorough),
    ],
    ids=["one rank", "overlapped steps", "tp", "pp", "dp_attention"],
)
def test_streams_are_the_same_when_grammar_processes_are_killed_in_their_middle(layout: dict[str, Any]) -> None:
    with make_loop(**layout, grammar=LIMITS) as loop:
        submits = [asked(key, LIST, sampling=Sampling(temperature=0.0)) for key in range(1, 7)]
        undisturbed = {key: result.token_ids for key, result in run_all(loop, submits).items()}
        service = loop.intake.grammars._service
        assert service is not None
        found: dict[int, list[int]] = {key: [] for key in undisturbed}
        for submit in submits:
            loop.submit(submit)
        failures, num_steps = [], 0
        while not loop.scheduler.idle or loop.waits_for_others:
            loop.step()
            step = loop.take_outputs()
            for output in [] if step is None else step.outputs:
                found[output.key] += output.token_ids
            failures += [] if step is None else step.failures
            num_steps += 1
            if num_steps in (10, 11, 25):
                pid = template_pid(service)
                kill([*children_of(pid), *([pid] if num_steps == 25 else [])])
        assert failures == []
        assert found == undisturbed
        assert loop.load().grammar_worker_restarts_total >= 2


def test_grammars_that_crash_or_overrun_cost_their_requests_while_others_are_answered() -> None:
    with make_loop(grammar=LIMITS) as loop:
        grammars = [SLOW[0], SLOW[1], CHOICE, None, *CRASHING]
        for key, grammar in enumerate(grammars):
            loop.submit(asked(key, grammar, f"tenant-{key}", max_tokens=8))
        failures: dict[int, CoreFailure] = {}
        ended = set()
        while not loop.scheduler.idle or loop.waits_for_others:
            loop.step()
            step = loop.take_outputs()
            if step is not None:
                failures |= {one.key: one for one in step.failures}
                ended |= {output.key for output in step.outputs if output.finish is not None}
        assert {one.code for one in failures.values()} == {FailureCode.GRAMMAR_REFUSED}
        assert failures.keys() >= {0, 1} and ended >= {2, 3}
        assert failures.keys() | ended == set(range(len(grammars)))
        assert loop.load().grammar_compile_seconds_total > 0
        assert loop.load().grammars_waiting == 0
