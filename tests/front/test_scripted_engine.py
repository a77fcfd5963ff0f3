from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from moiety_engine.messages import CoreAbort, CoreExtend, CoreSubmit
from moiety_engine.scripted.engine import ScriptedEngine
from moiety_engine.scripted.script import Script
from moiety_wire.messages import FinishReason, Sampling

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
    return CoreSubmit(key, "tenant", "standard", **{**fields, **changes})


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
        assert 0 <= load.kv_blocks_used <= 8
        assert load.num_running <= 3
        assert load.output_tokens_total == sum(emitted.values())
        assert load.num_running + load.num_waiting == len(credit) - len(ended)

    for action in todo:
        match action:
            case (0,):
                look()
            case (1, num_prompt, max_tokens, tokens):
                key = len(credit)
                credit[key], emitted[key] = tokens, 0
                engine.obey([core_submit(key, num_prompt, max_tokens, tokens)])
            case (2, key, tokens, last):
                if key in credit:
                    credit[key] = max(credit[key], tokens)
                engine.obey([CoreExtend(key, tokens, last)])
            case (3, key):
                engine.obey([CoreAbort(key, FinishReason.ABORT)])
    for key, tokens in credit.items():
        engine.obey([CoreExtend(key, tokens, last=True)])
    for _ in range(10_000):
        if not engine.has_work:
            break
        look()
    assert ended == set(credit)
    assert engine.load().kv_blocks_used == 0


def test_a_request_that_can_never_fit_fails_at_once() -> None:
    engine = ScriptedEngine(Script(num_blocks=2, block_size=8))
    engine.obey([core_submit(0, 10, 10)])
    step = engine.step()
    assert [failure.key for failure in step.failures] == [0]
    assert "blocks" in step.failures[0].message


def test_the_same_script_answers_the_same() -> None:
    engine = ScriptedEngine(Script(tokens=(7, 8, 9), tokens_per_step=4))
    engine.obey([core_submit(0, max_tokens=5), core_submit(1, max_tokens=5)])
    outputs = [output for _ in range(2) for output in engine.step().outputs]
    assert [(output.key, output.token_ids) for output in outputs] == [
        (0, [7, 8, 9, 7]),
        (1, [7, 8, 9, 7]),
        (0, [8]),
        (1, [8]),
    ]
    assert not engine.has_work
