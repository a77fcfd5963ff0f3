"""A request that comes with another engine's output continues with the tokens of an undisturbed run."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from tests.core_submits import core_submit

from moiety_engine.config import PolicyName
from moiety_engine.messages import CoreSubmit
from moiety_engine.offline import Result, run_all
from moiety_wire.engine_choices import Batching
from moiety_wire.messages import Sampling, TokenRules
from moiety_wire.trace_events import EventKind, Reason

LENGTH = 20


def asked(key: int, **sampling: Any) -> CoreSubmit:
    prompt = torch.randint(3, 320, (10 + 9 * key,), generator=torch.Generator().manual_seed(key)).tolist()
    return core_submit(
        key,
        prompt,
        LENGTH,
        sampling=Sampling(**({"temperature": 0.0} | sampling)),
        min_tokens=12,
        stop_token_ids=[7, 8],
    )


KINDS = [
    asked(0, num_logprobs=3),
    asked(1, temperature=1.0, seed=11, frequency_penalty=0.7, presence_penalty=0.2, num_logprobs=0),
    asked(2, temperature=0.8, top_p=0.9, seed=12, repetition_penalty=1.3),
    asked(3, temperature=1.2, top_k=20, seed=13, logit_bias={5: 9.0}, token_rules=TokenRules(banned_runs=((5, 5),))),
]


@pytest.fixture(scope="module")
def whole(loops: Any) -> dict[int, Result]:
    return run_all(loops.make(), KINDS)


def broken_off(whole: dict[int, Result]) -> list[CoreSubmit]:
    """Return each of KINDS after 0, 1, 7 and all but one of its tokens, under keys of their own."""
    pieces = []
    for submit in KINDS:
        ids = whole[submit.key].token_ids
        for number, num_had in enumerate((0, 1, 7, len(ids) - 1)):
            key = 100 * number + submit.key
            pieces.append(msgspec.structs.replace(submit, key=key, resumed_ids=ids[:num_had]))
    return pieces


@pytest.mark.parametrize(
    "settings",
    [{"policy": policy} for policy in PolicyName]
    + [{"batching": batching, "static_batch_size": 3} for batching in Batching]
    + [{"prefix_caching": False, "max_batch_tokens": 16, "max_running": 3}],
    ids=str,
)
def test_tokens_logprobs_and_end_are_those_of_an_undisturbed_run(
    loops: Any, whole: dict[int, Result], settings: dict[str, Any]
) -> None:
    loop = loops.make(**settings)
    submits = broken_off(whole)
    results = run_all(loop, submits)
    for submit in submits:
        right, result = whole[submit.key % 100], results[submit.key]
        num_had = len(submit.resumed_ids or ())
        assert result.token_ids == right.token_ids[num_had:]
        assert result.finish is not None and right.finish is not None
        assert (result.finish.reason, result.finish.num_output_tokens) == (
            right.finish.reason,
            right.finish.num_output_tokens,
        )
        assert result.finish.num_cached_tokens <= len(submit.prompt_ids)
        assert (result.finish.events[0].kind, result.finish.events[0].reason) == (
            EventKind.ADMITTED,
            Reason.FAILED_OVER,
        )
        for got, expected in zip(result.logprobs, right.logprobs[num_had:], strict=True):
            assert got.logprob == pytest.approx(expected.logprob, abs=1e-4)
            assert got.top_ids == expected.top_ids
    assert loop.scheduler.kv.pool.num_used == 0
