"""Processes that compile and step grammars: limits, crashes and restarts."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from structlog.testing import capture_logs

from moiety_demo import checkpoint_path
from moiety_engine.config import GrammarLimits
from moiety_engine.errors import InvalidConfig
from moiety_engine.structured_outputs.errors import GrammarRefused
from moiety_engine.structured_outputs.service import GrammarService
from moiety_engine.structured_outputs.stepping import GrammarHandle
from moiety_limited_processes.errors import WorkerFailed
from moiety_wire.grammars import GrammarKind, GrammarSpec, ToolCallGrammar, ToolCallsGrammar
from moiety_wire.messages import FailureCode

from .grammar_services import (
    CHOICE,
    COMPILER,
    CRASHING,
    LIMITS,
    LIST,
    SLOW,
    TOKENIZER,
    children_of,
    kill,
    mask_of,
    masks_of,
    opened,
    service,
    template_pid,
    until,
)

__all__ = ["service"]  # fixtures


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
    """Return the grammar of a forced call of one of the tools `f0`, `f1` … with these preferred schemas."""
    any_object = '{"type": "object"}'
    tools = [ToolCallGrammar(f"f{i}", any_object, preferred_schema=json.dumps(one)) for i, one in enumerate(preferred)]
    form = ToolCallsGrammar(tools, "<", "", " ", "", None, ">", {}, must_call=True, is_named=False, may_repeat=False)
    return GrammarSpec(GrammarKind.CALLS, msgspec.json.encode(form).decode())


def may_follow(handle: GrammarHandle, told: str, text: str) -> bool:
    """Return whether `text` may follow the text `told`."""
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
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))  # a limit with which no process could start
    with pytest.raises(ValueError, match=reason):
        GrammarService(tmp_path / name, LIMITS)


def test_a_trial_leaves_no_process_behind(service: GrammarService) -> None:
    for grammar in (GrammarSpec(GrammarKind.REGEX, "no+pe"), GrammarSpec(GrammarKind.REGEX, "(b"), SLOW[0]):
        with contextlib.suppress(GrammarRefused):
            service.compile(grammar)
    num_steppers = sum(worker.has(GrammarSpec(GrammarKind.REGEX, "no+pe")) for worker in service._workers)
    until(lambda: len(children_of(template_pid(service))) == num_steppers)


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


def test_a_step_does_not_wait_for_the_report_of_an_end_as_long_as_a_compilation_does(service: GrammarService) -> None:
    handle = opened(service, LIST)
    before, template = mask_of(handle), template_pid(service)
    until(lambda: len(children_of(template)) == 1)  # the last trial has ended
    (stepper,) = children_of(template)
    with service._template.fork() as waiting, ThreadPoolExecutor(2) as threads, capture_logs() as logs:
        until(lambda: len(children_of(template)) == 2)
        os.kill(template, signal.SIGSTOP)  # so it reports nothing
        try:
            compilation = threads.submit(waiting.kill)
            kill([stepper])
            step = threads.submit(mask_of, handle)
            until(lambda: any(log["event"] == "grammar_worker_restarted" for log in logs))
            assert not compilation.done()  # it began to wait first
        finally:
            os.kill(template, signal.SIGCONT)
        assert step.result() == before
        assert compilation.result() is not None


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
    assert not service.refusal_of(grammar)  # it says nothing about the grammar


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
