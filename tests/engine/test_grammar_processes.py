"""Processes that compile and step grammars: limits, crashes, restarts, and fairness between tenants."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from structlog.testing import capture_logs

from moiety_demo import checkpoint_path
from moiety_engine.config import EngineConfig, GrammarLimits, Overlap
from moiety_engine.errors import InvalidConfig
from moiety_engine.limited_processes.errors import WorkerFailed
from moiety_engine.loop import EngineLoop
from moiety_engine.messages import CoreFailure, CoreSubmit
from moiety_engine.offline import run_all
from moiety_engine.startup import load_loop
from moiety_engine.structured_outputs.compile_queue import GrammarCompileQueue
from moiety_engine.structured_outputs.compiler import GrammarCompiler
from moiety_engine.structured_outputs.errors import GrammarRefused
from moiety_engine.structured_outputs.service import GrammarService
from moiety_engine.structured_outputs.stepping import GrammarHandle
from moiety_text.folder import read_text_model
from moiety_text.tokenizer import Tokenizer
from moiety_wire.classes import STANDARD
from moiety_wire.engine_choices import LoadFormat
from moiety_wire.grammars import GrammarKind, GrammarSpec, ToolCallGrammar, ToolCallsGrammar
from moiety_wire.messages import FailureCode, Sampling

TEXT = read_text_model(checkpoint_path())
TOKENIZER = Tokenizer.from_json(TEXT.tokenizer_json)
COMPILER = GrammarCompiler(TEXT.tokenizer_json, TEXT.eos_token_ids)
MASK_BYTES = 4 * COMPILER.num_words
INT64_MIN = -(2**63)
CRASHING = [
    GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps({"type": "integer", "minimum": INT64_MIN, "maximum": INT64_MIN})),
    GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps({"type": "integer", "minimum": -(10**19), "maximum": -(10**19)})),
    GrammarSpec(
        GrammarKind.GRAMMAR, f'start: %json {{"type": "integer", "minimum": {INT64_MIN}, "maximum": {INT64_MIN}}}'
    ),
]
SLOW = [GrammarSpec(GrammarKind.REGEX, letter * 30_000) for letter in ("x?", "y?")]
CHOICE = GrammarSpec(GrammarKind.CHOICE, '["yes", "no"]')
LIST = GrammarSpec(
    GrammarKind.JSON_SCHEMA, '{"type": "array", "items": {"type": "integer"}, "minItems": 40, "maxItems": 40}'
)
LIMITS = GrammarLimits(compile_cpu_s=0.3)


@pytest.fixture(scope="module")
def service() -> Iterator[GrammarService]:
    made = GrammarService(checkpoint_path(), LIMITS)
    yield made
    made.close()


def until(condition: Callable[[], Any], timeout_s: float = 30.0) -> Any:
    """The condition's value once it holds."""
    deadline_s = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline_s, "it did not come true in time"
    return found


def asked(key: int, grammar: GrammarSpec | None, tenant_id: str = "t", **more: Any) -> CoreSubmit:
    prompt, eos = TOKENIZER.encode("What is it?"), list(TEXT.eos_token_ids)
    submit = CoreSubmit(key, tenant_id, STANDARD, prompt, Sampling(seed=key), 60, 0, eos, 60, b"", 0, grammar=grammar)
    return msgspec.structs.replace(submit, **more)


def children_of(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_dead(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def kill(pids: Iterable[int], number: signal.Signals = signal.SIGKILL) -> None:
    """End processes, and wait until they have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # a trial that has ended by itself
            os.kill(pid, number)
        until(partial(is_dead, pid))


def template_pid(service: GrammarService) -> int:
    return service._template.pid


def opened(service: GrammarService, grammar: GrammarSpec) -> GrammarHandle:
    service.compile(grammar)
    handle = service.open(grammar)
    assert handle is not None
    return handle


def mask_of(handle: GrammarHandle) -> bytes:
    (mask,) = masks_of([handle])
    assert mask is not None, handle.problem
    return mask


def masks_of(handles: list[GrammarHandle]) -> list[bytes | None]:
    """One round trip; None where a handle has a problem. All handles are of one process."""
    masks, places = handles[0].worker.step(handles)
    return [None if one < 0 else bytes(masks[one * MASK_BYTES : (one + 1) * MASK_BYTES]) for one in places]


# ── trials ──


@pytest.mark.parametrize("grammar", CRASHING)
def test_a_schema_on_which_the_library_crashes_is_followed_or_refused_and_others_go_on(
    service: GrammarService, grammar: GrammarSpec
) -> None:
    before = service.restarts_total
    outcomes = []
    for _ in range(2):
        try:
            service.compile(grammar)
            outcomes.append("")
        except GrammarRefused as exc:
            outcomes.append(str(exc))
    assert outcomes[0] == outcomes[1] == service.refusal_of(grammar)
    service.compile(CHOICE)
    assert service.restarts_total == before


def test_a_grammar_that_crashes_the_compiler_is_refused_and_costs_nothing_when_repeated() -> None:
    service = GrammarService(checkpoint_path(), GrammarLimits(compile_cpu_s=60, compile_wall_s=60))
    try:
        with ThreadPoolExecutor(1) as threads:
            compiling = threads.submit(service.compile, SLOW[0])
            (trial,) = until(lambda: children_of(template_pid(service)))
            kill([trial], signal.SIGSEGV)
            with pytest.raises(GrammarRefused, match=r"crashed the compiler .*SIGSEGV"):
                compiling.result()
        used_s = service.compile_seconds_total
        with pytest.raises(GrammarRefused, match="crashed the compiler"):
            service.compile(SLOW[0])
        assert service.compile_seconds_total == used_s
        service.compile(CHOICE)
    finally:
        service.close()


def test_a_trial_that_is_killed_from_outside_is_repeated_and_proves_nothing(service: GrammarService) -> None:
    slow = GrammarSpec(GrammarKind.REGEX, "z?" * 4000)  # passes its trial
    steppers = set(children_of(template_pid(service)))
    with ThreadPoolExecutor(1) as threads:
        compiling = threads.submit(service.compile, slow)
        trial = until(lambda: set(children_of(template_pid(service))) - steppers)
        kill(trial)
        assert compiling.result()[0].spec == slow
    assert not service.refusal_of(slow)


@pytest.mark.parametrize("grammar", SLOW)
def test_a_grammar_that_takes_too_long_is_ended_at_the_limit(service: GrammarService, grammar: GrammarSpec) -> None:
    used_s = service.compile_seconds_total
    with pytest.raises(GrammarRefused, match=r"more than 0\.3 s of CPU time"):
        service.compile(grammar)
    assert service.compile_seconds_total - used_s < 2 * LIMITS.compile_cpu_s


def test_a_grammar_that_takes_too_much_memory_is_ended_at_the_limit() -> None:
    limits = GrammarLimits(compile_cpu_s=30, compile_wall_s=30, compile_memory_bytes=64 << 20)
    service = GrammarService(checkpoint_path(), limits)
    try:
        with pytest.raises(GrammarRefused, match="more than 64 MiB"):
            service.compile(GrammarSpec(GrammarKind.REGEX, "x?" * 10_000))
        service.compile(CHOICE)
    finally:
        service.close()


def test_a_refusal_of_the_compiler_has_its_words(service: GrammarService) -> None:
    with pytest.raises(GrammarRefused, match="the group is not closed"):
        service.compile(GrammarSpec(GrammarKind.REGEX, "(a"))


def forced(*preferred: dict[str, Any]) -> GrammarSpec:
    """Grammar of a forced call of one of the tools `f0`, `f1` … with these preferred schemas."""
    any_object = '{"type": "object"}'
    tools = [ToolCallGrammar(f"f{i}", any_object, preferred_schema=json.dumps(one)) for i, one in enumerate(preferred)]
    form = ToolCallsGrammar(tools, "<", "", " ", "", None, ">", {}, must_call=True, is_named=False, may_repeat=False)
    return GrammarSpec(GrammarKind.CALLS, msgspec.json.encode(form).decode())


def may_follow(handle: GrammarHandle, told: str, text: str) -> bool:
    """Whether the answer can go on with this text after the one told."""
    handle.take(TOKENIZER.encode(told))
    token_id = TOKENIZER.encode(text)[0]
    return bool(mask_of(handle)[token_id // 8] >> token_id % 8 & 1)


NUMBERED = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
DATED = {"type": "object", "properties": {"b": {"type": "string", "format": "color"}}}
COSTLY = {"type": "object", "properties": {"c": {"type": "string", "pattern": "x?" * 10_000}}, "required": ["c"]}
COSTLY_TO_COMPILE = {"type": "object", "properties": {"c": {"pattern": "x?" * 30_000, "minLength": 5}}}


def test_only_the_preferred_schemas_that_are_supported_are_followed_and_the_log_says_so_once(
    service: GrammarService,
) -> None:
    grammar = forced(NUMBERED, DATED)
    with capture_logs() as logged:
        for told, text, is_right in (('f0 {"', "a", True), ('f0 {"', "z", False), ('f1 {"', "z", True)):
            assert may_follow(opened(service, grammar), told, text) is is_right, told
    assert [(one["event"], one["num_tools"]) for one in logged] == [("tool_schemas_not_enforced", 1)]


def test_a_preferred_schema_that_takes_too_long_is_not_followed_and_not_tried_again(service: GrammarService) -> None:
    grammar = forced(COSTLY_TO_COMPILE, NUMBERED)
    assert may_follow(opened(service, grammar), 'f0 {"', "z")
    used_s = service.compile_seconds_total
    assert may_follow(opened(service, grammar), 'f1 {"', "z"), "any object is valid for all tools then"
    assert service.compile_seconds_total == used_s and not service.refusal_of(grammar)


def test_a_preferred_schema_that_crashes_its_process_is_not_followed_any_more(service: GrammarService) -> None:
    grammar = forced(NUMBERED, {})
    handle = opened(service, grammar)
    for _ in range(2):
        service.note_crash(handle.grammar.spec, "it crashed")
    assert not service.refusal_of(grammar)
    assert may_follow(opened(service, grammar), 'f0 {"', "z")


def test_an_answer_goes_on_without_a_preferred_schema_that_is_too_costly_and_others_beside_it_as_before(
    service: GrammarService,
) -> None:
    costly, beside = opened(service, forced(NUMBERED, COSTLY)), opened(service, forced(COSTLY))
    assert not may_follow(costly, 'f1 {"', "z")
    beside.take(TOKENIZER.encode("f0 {"))
    before = mask_of(beside)
    costly.take(TOKENIZER.encode('c": "'))
    assert masks_of([costly, beside])[1] == before
    assert costly.grammar.fallback is None and may_follow(costly, 'z", "', "z") and not costly.problem


def test_the_template_has_one_thread_so_that_forking_is_safe(service: GrammarService) -> None:
    assert len(os.listdir(f"/proc/{template_pid(service)}/task")) == 1  # noqa: PTH208 - no folder of files


@pytest.mark.parametrize(("name", "reason"), [("", "has no tokenizer.json"), ("gone", "is not a folder")])
def test_a_checkpoint_without_a_tokenizer_starts_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, reason: str
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))  # with which no process would start
    with pytest.raises(ValueError, match=reason):
        GrammarService(tmp_path / name, LIMITS)


def test_a_trial_leaves_no_process_behind(service: GrammarService) -> None:
    for grammar in (GrammarSpec(GrammarKind.REGEX, "no+pe"), GrammarSpec(GrammarKind.REGEX, "(b"), SLOW[0]):
        with contextlib.suppress(GrammarRefused):
            service.compile(grammar)
    num_steppers = sum(worker.has(GrammarSpec(GrammarKind.REGEX, "no+pe")) for worker in service._workers)
    until(lambda: len(children_of(template_pid(service))) == num_steppers)


# ── stepping ──


def test_masks_are_those_of_the_compiler_itself(service: GrammarService) -> None:
    handle, state = opened(service, LIST), COMPILER.open(LIST)
    for token_id in TOKENIZER.encode("[1, 2"):
        own_W = np.zeros(service.num_words, dtype=np.int32)
        state.write(own_W.ctypes.data, own_W.nbytes)
        assert mask_of(handle) == own_W.tobytes()
        state.take([token_id])
        handle.take([token_id])


def test_many_rows_share_one_round_trip_and_each_has_its_own_mask(service: GrammarService) -> None:
    handles = [opened(service, LIST) for _ in range(3)]
    worker = handles[0].worker
    handles += [worker.open(handles[0].grammar) for _ in range(200)]
    handles[1].take(TOKENIZER.encode("["))
    handles[-1].take(TOKENIZER.encode("[1"))
    masks = masks_of(handles)
    assert len(masks) == len(handles)
    assert masks[0] == masks[2] == masks[-2]
    assert len({masks[0], masks[1], masks[-1]}) == 3


def test_an_answer_that_violates_its_grammar_fails_alone(service: GrammarService) -> None:
    bad = opened(service, CHOICE)
    good = bad.worker.open(bad.grammar)
    bad.take(TOKENIZER.encode("maybe"))
    assert [mask is None for mask in masks_of([bad, good])] == [True, False]
    assert bad.problem and not good.problem


@pytest.mark.parametrize("who", ["stepper", "template", "both"])
def test_after_a_kill_every_state_goes_on_where_it_was(service: GrammarService, who: str) -> None:
    handles = [opened(service, LIST) for _ in range(4)]
    for i, handle in enumerate(handles):
        handle.take(TOKENIZER.encode("[1, 22, 333"[: 2 * i + 1]))
    before = [mask_of(handle) for handle in handles]
    template, restarts = template_pid(service), service.restarts_total
    steppers = children_of(template)
    kill({"stepper": steppers, "template": [template], "both": [template, *steppers]}[who])
    assert [mask_of(handle) for handle in handles] == before
    assert service.restarts_total > restarts
    service.compile(GrammarSpec(GrammarKind.REGEX, f"a new grammar after a kill of {who}"))


def test_a_process_that_was_stopped_is_replaced(service: GrammarService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moiety_engine.structured_outputs.stepping.STALL_S", 0.2)
    handle = opened(service, LIST)
    before = mask_of(handle)
    for pid in children_of(template_pid(service)):
        os.kill(pid, signal.SIGSTOP)
    assert mask_of(handle) == before


def test_only_the_request_whose_operation_ended_the_process_fails(service: GrammarService) -> None:
    grammar = GrammarSpec(GrammarKind.REGEX, "[cd]{30}")
    first = opened(service, grammar)
    worker = first.worker
    for is_second in (False, True):
        handles = [worker.open(first.grammar) for _ in range(3)]
        worker.step(handles)
        process = worker._process
        assert process is not None
        process.masks.mark_state(handles[1].state_id)  # as a crashing process would leave it
        kill(children_of(template_pid(service)), signal.SIGSEGV)
        masks = masks_of(handles)
        assert [mask is None for mask in masks] == [False, True, False]
        assert "signal 11" in handles[1].problem
        assert bool(service.refusal_of(grammar)) is is_second  # after the second time it is not compiled any more


def test_a_request_at_whose_operation_a_process_is_killed_goes_on_once(service: GrammarService) -> None:
    grammar = GrammarSpec(GrammarKind.REGEX, "[ab]{30}")
    handle = opened(service, grammar)
    before = mask_of(handle)
    for is_last in (False, True):
        process = handle.worker._process
        assert process is not None
        process.masks.mark_state(handle.state_id)
        kill(children_of(template_pid(service)))
        (mask,) = masks_of([handle])
        assert (mask is None) is is_last
        assert is_last or mask == before
    assert not service.refusal_of(grammar)  # which proves nothing against the grammar


def test_states_of_requests_that_ended_are_freed(service: GrammarService) -> None:
    handle = opened(service, LIST)
    worker = handle.worker
    num_open = worker.num_open
    del handle
    assert worker.num_open == num_open - 1


def test_a_closed_service_says_so_and_leaves_no_process() -> None:
    service = GrammarService(checkpoint_path(), LIMITS)
    handle, pid = opened(service, CHOICE), template_pid(service)
    steppers = children_of(pid)
    service.close()
    until(lambda: not any(Path(f"/proc/{one}").exists() for one in (pid, *steppers)))
    with pytest.raises(WorkerFailed, match="shutting down"):
        service.compile(LIST)
    assert masks_of([handle]) == [None]
    assert handle.code is FailureCode.ENGINE_FAILED


@pytest.mark.parametrize(
    "wrong",
    [
        {"compile_cpu_s": 0},
        {"compile_wall_s": 100},
        {"compile_memory_bytes": 1},
        {"worker_memory_bytes": 1 << 20},
        {"max_waiting_per_tenant": 0},
    ],
)
def test_limits_that_cannot_work_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig):
        GrammarLimits(**wrong)


# ── the queue ──


def drained(queue: GrammarCompileQueue, keys: set[int]) -> tuple[list[int], list[CoreFailure]]:
    """Keys in the order in which they were ready or refused, and the refusals."""
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
    """A service with an error of its own."""

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


# ── in the step loop ──


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
