from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from moiety_engine.messages import CoreAbort, CoreAdmission, CoreExtend, CoreSubmit
from moiety_engine.scripted.engine import ScriptedEngine
from moiety_engine.scripted.script import Script, ScriptedDecision, ScriptedEvent
from moiety_wire.classes import FLEX, PRIORITY, STANDARD, OverloadAction
from moiety_wire.messages import FailureCode, FinishReason, Sampling
from moiety_wire.trace_events import EventKind, Reason

STEP, SUBMIT, EXTEND, ABORT = range(4)
actions = st.lists(
    st.one_of(
        st.tuples(st.just(STEP)),
        st.tuples(st.just(SUBMIT), st.integers(1, 20), st.integers(1, 40), st.integers(0, 10)),
        st.tuples(st.just(EXTEND), st.integers(0, 5), st.integers(0, 50), st.booleans()),
        st.tuples(st.just(ABORT), st.integers(0, 5)),
    ),
    max_size=60,
)


def core_submit(key: int, num_prompt: int = 5, max_tokens: int = 10, credit: int = 100, **changes: Any) -> CoreSubmit:
    fields: dict[str, Any] = {
        "sampling": Sampling(),
        "min_tokens": 0,
        "stop_token_ids": [],
        "cache_salt": b"",
        "arrival_unix_ns": 0,
        "max_tokens": max_tokens,
        "credit_tokens": credit,
        "prompt_ids": list(range(1, num_prompt + 1)),
    }
    return CoreSubmit(key, "tenant", changes.pop("service", STANDARD), **{**fields, **changes})


@settings(max_examples=300, deadline=None)
@given(todo=actions, tokens_per_step=st.integers(1, 5))
def test_credit_is_never_exceeded_blocks_are_conserved_and_everything_ends_once(
    todo: list[Any], tokens_per_step: int
) -> None:
    engine = ScriptedEngine(Script(tokens_per_step=tokens_per_step, num_blocks=8, block_size=8, max_running=3))
    credit: dict[int, int] = {}
    emitted: dict[int, int] = {}
    ended: set[int] = set()

    def look() -> None:
        step = engine.step()
        for failure in step.failures:
            assert failure.key not in ended
            ended.add(failure.key)
        for output in step.outputs:
            assert output.key not in ended
            emitted[output.key] += len(output.token_ids)
            assert emitted[output.key] <= credit[output.key]
            if output.finish is not None:
                assert output.finish.num_output_tokens == emitted[output.key]
                ended.add(output.key)
        load = step.load
        assert load is not None, "a scripted engine tells it with each step"
        assert 0 <= load.kv_blocks_used <= 8
        assert load.num_running <= 3
        assert load.output_tokens_total == sum(emitted.values())
        assert load.num_running + load.num_waiting + load.num_paused == len(credit) - len(ended)

    for action in todo:
        match action:
            case (0,):
                look()
            case (1, num_prompt, max_tokens, tokens):
                key = len(credit)
                credit[key], emitted[key] = tokens, 0
                engine.execute_commands([core_submit(key, num_prompt, max_tokens, tokens)])
            case (2, key, tokens, last):
                if key in credit:
                    credit[key] = max(credit[key], tokens)
                engine.execute_commands([CoreExtend(key, tokens, last)])
            case (3, key):
                engine.execute_commands([CoreAbort(key, FinishReason.ABORT)])
    for key, tokens in credit.items():
        engine.execute_commands([CoreExtend(key, tokens, last=True)])
    for _ in range(10_000):
        if not engine.has_work:
            break
        look()
    assert ended == set(credit)
    assert engine.load().kv_blocks_used == 0


def test_a_request_that_can_never_fit_fails_at_once() -> None:
    engine = ScriptedEngine(Script(num_blocks=2, block_size=8))
    engine.execute_commands([core_submit(0, 10, 10)])
    step = engine.step()
    assert [failure.key for failure in step.failures] == [0]
    assert "blocks" in step.failures[0].message


def test_the_same_script_answers_the_same() -> None:
    engine = ScriptedEngine(Script(tokens=(7, 8, 9), tokens_per_step=4))
    engine.execute_commands([core_submit(0, max_tokens=5), core_submit(1, max_tokens=5)])
    outputs = [output for _ in range(2) for output in engine.step().outputs]
    assert [(output.key, output.token_ids) for output in outputs] == [
        (0, [7, 8, 9, 7]),
        (1, [7, 8, 9, 7]),
        (0, [8]),
        (1, [8]),
    ]
    assert not engine.has_work


FALLING_BACK = replace(STANDARD, on_overload=OverloadAction.DOWNGRADE)


def test_requests_are_rejected_and_downgraded_as_scripted() -> None:
    verdicts = (
        ScriptedDecision(service_class="priority", reason=Reason.PREDICTED_LATE, retry_after_s=2.5),
        ScriptedDecision(tenant_id="tenant", reason=Reason.KV_PEAK, downgrades=True),
    )
    engine = ScriptedEngine(Script(verdicts=verdicts, predicted_ttft_s={"flex": 7.0}))
    engine.execute_commands(
        [core_submit(1, service=PRIORITY), core_submit(2, service=FALLING_BACK, fallback=FLEX), core_submit(3)]
    )
    step = engine.step()
    assert [(f.key, f.code, f.reason, f.retry_after_s) for f in step.failures] == [
        (1, FailureCode.OVERLOADED, Reason.PREDICTED_LATE, 2.5)
    ]
    assert step.admissions == [
        CoreAdmission(2, "flex", Reason.KV_PEAK, 7.0),
        CoreAdmission(3, "standard", Reason.ACCEPTED_LATE, None),  # it has no fallback
    ]
    assert step.load is not None, "a scripted engine tells it with each step"
    classes = {load.name: load for load in step.load.classes}
    assert classes["priority"].rejected_total == {"predicted_late": 1}
    assert (classes["standard"].downgraded_total, classes["standard"].admitted_total) == (1, 1)
    assert (classes["flex"].admitted_total, classes["flex"].predicted_ttft_s) == (1, 7.0)


def test_scripted_events_come_with_the_end_and_are_counted() -> None:
    events = (
        ScriptedEvent(kind=EventKind.PREEMPTED, reason=Reason.DECODE_NEEDS_BLOCKS, after_tokens=2, names_another=True),
        ScriptedEvent(kind=EventKind.RESUMED, reason=Reason.RECOMPUTE, after_tokens=2),
    )
    engine = ScriptedEngine(Script(events=events))
    engine.execute_commands([core_submit(1, num_prompt=5, max_tokens=3), core_submit(2, num_prompt=5, max_tokens=3)])
    finishes = {o.key: o.finish for _ in range(3) for o in engine.step().outputs if o.finish is not None}
    assert [(e.kind, e.reason, e.other) for e in finishes[2].events] == [
        (EventKind.ADMITTED, Reason.IN_TIME, 0),
        (EventKind.PREEMPTED, Reason.DECODE_NEEDS_BLOCKS, 1),
        (EventKind.RESUMED, Reason.RECOMPUTE, 0),
    ]
    assert finishes[2].num_recomputed_tokens == 7
    (load,) = engine.load().classes
    assert (load.preempted_total, load.recomputed_tokens_total) == ({"decode_needs_blocks": 2}, 14)


def test_a_parked_request_keeps_its_blocks_and_comes_back_before_those_that_wait() -> None:
    engine = ScriptedEngine(Script(max_running=1))
    engine.execute_commands([core_submit(1, credit=1), core_submit(2, credit=2), core_submit(3)])
    engine.step()
    load = engine.load()
    assert (load.num_running, load.num_waiting, load.num_paused, load.kv_blocks_used) == (0, 2, 1, 1)
    engine.execute_commands([CoreExtend(1, 2, last=False)])
    assert [output.key for output in engine.step().outputs] == [1]
