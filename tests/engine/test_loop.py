"""The step loop with a real model: the answer to a request does not depend on its scheduling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.core_submits import core_submit

from moiety_engine.config import EngineConfig, PolicyName
from moiety_engine.errors import InvalidConfig, OutOfMemory
from moiety_engine.loop import EngineLoop
from moiety_engine.loop_setup import build_loop
from moiety_engine.messages import CoreSubmit
from moiety_engine.offline import Result, run_all
from moiety_engine.startup import load_loop
from moiety_kernels.cpu.team import Program, Team
from moiety_wire.engine_choices import Batching
from moiety_wire.messages import FailureCode, FinishReason, Sampling

from .conftest import tokens, tokens_alone

BLOCK_BYTES_8 = 2 * 2 * 2 * 16 * 8 * 4  # layers · (K, V) · heads · width · tokens · float32


def make_submit(
    key: int, prompt: list[int], *, max_tokens: int = 24, salt: bytes = b"s", **sampling: Any
) -> CoreSubmit:
    return core_submit(key, prompt, max_tokens, sampling=Sampling(**({"temperature": 0.0} | sampling)), cache_salt=salt)


def prompt_of(length: int, seed: int) -> list[int]:
    return torch.randint(3, 320, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


MIXED = [
    make_submit(0, prompt_of(40, 0)),
    make_submit(1, prompt_of(3, 1), temperature=1.0, seed=11),
    make_submit(2, prompt_of(70, 2), temperature=0.8, top_p=0.9, seed=12, max_tokens=9),
    make_submit(3, prompt_of(17, 3), temperature=1.2, top_k=20, seed=13),
    make_submit(4, [*prompt_of(40, 0), 5, 6, 7], temperature=0.9, min_p=0.05, seed=14),
]


@pytest.fixture(scope="module")
def alone(loops: Any) -> dict[int, list[int]]:
    return tokens_alone(loops, MIXED)


def test_greedy_output_is_that_of_transformers(loops: Any, checkpoint: Path) -> None:
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    prompt = prompt_of(60, 5)
    expected = oracle.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None)
    assert tokens(loops.make(), [make_submit(0, prompt)])[0] == expected[0, 60:].tolist()


def test_a_dozen_that_decode_together_get_the_tokens_they_get_alone_and_their_steps_are_replayed(
    loops: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    submits = [make_submit(key, prompt_of(5 + key, key)) for key in range(12)]
    alone = {key: one for submit in submits for key, one in tokens(loops.make(), [submit]).items()}
    replayed: list[Program] = []
    replay = Team.replay

    def note(self: Team, program: Program) -> None:
        replayed.append(program)
        replay(self, program)

    monkeypatch.setattr(Team, "replay", note)
    assert tokens(loops.make(), submits) == alone
    assert len(replayed) >= 12


@pytest.mark.parametrize("batching", list(Batching))
def test_every_strategy_gives_each_request_the_tokens_it_gets_alone(
    loops: Any, alone: dict[int, list[int]], batching: Batching
) -> None:
    loop = loops.make(batching=batching, static_batch_size=3, max_batch_tokens=64)
    assert tokens(loop, MIXED) == alone
    assert loop.scheduler.kv.pool.num_used == 0


def test_with_a_cache_of_bfloat16_too_requests_get_together_and_in_chunks_what_they_get_alone(checkpoint: Path) -> None:
    config = EngineConfig(model=str(checkpoint), name="t", dtype="bfloat16", kv_dtype="bf16", max_batch_tokens=24)
    together = load_loop(config)
    found = tokens(together, MIXED)
    whole = msgspec.structs.replace(config, max_batch_tokens=512, prefix_caching=False)
    model = together.executor.model
    assert found == {submit.key: tokens(build_loop(model, whole), [submit])[submit.key] for submit in MIXED}
    assert model.only_kernels, "its steps are replayed"


def test_preempted_requests_get_the_tokens_of_an_undisturbed_run(loops: Any, alone: dict[int, list[int]]) -> None:
    loop = loops.make(  # FCFS admits whatever fits now, and preempts later
        kv_memory_bytes=15 * BLOCK_BYTES_8,
        max_batch_tokens=64,
        prefix_caching=False,
        max_context_tokens=100,
        policy=PolicyName.FCFS,
    )
    preempted = 0
    for submit in MIXED:
        loop.submit(submit)
    outputs: dict[int, list[int]] = {key: [] for key in alone}
    while not loop.scheduler.idle:
        loop.step()
        preempted += any(s.timeline.num_preemptions for s in loop.scheduler.queues.by_key.values())
        step = loop.take_outputs()
        for output in step.outputs if step else []:
            outputs[output.key] += output.token_ids
    assert preempted > 0
    assert outputs == alone


def test_a_prefix_hit_changes_nothing_but_the_work(loops: Any, alone: dict[int, list[int]]) -> None:
    loop = loops.make()
    first = run_all(loop, MIXED)
    second = run_all(loop, MIXED)
    assert {key: r.token_ids for key, r in first.items()} == alone
    assert {key: r.token_ids for key, r in second.items()} == alone
    assert _cached(second[2]) == 68


def test_log_probabilities_of_a_prompts_end_use_the_prefix_cache_and_are_those_of_the_whole_prompt(loops: Any) -> None:
    prompt, loop = prompt_of(60, 6), loops.make(block_size=8)
    whole = _scores(loops.make(prefix_caching=False), make_submit(0, prompt, max_tokens=1, num_prompt_logprobs=0))
    run_all(loop, [make_submit(0, prompt)])
    for first, num_cached in ((1, 0), (8, 0), (9, 8), (48, 40), (49, 48), (59, 56)):
        submit = make_submit(1, prompt, max_tokens=1, num_prompt_logprobs=0, prompt_logprobs_from=first)
        found = _scores(loop, submit)
        assert sorted(found) == list(range(first, 60))
        assert found == pytest.approx({position: whole[position] for position in found}, abs=1e-4)
        assert _cached(run_all(loop, [submit])[1]) == num_cached


def test_prompts_that_share_their_beginning_and_have_log_probabilities_compute_it_once(loops: Any) -> None:
    common, loop = prompt_of(64, 7), loops.make(block_size=8, max_batch_tokens=256)
    scoring: dict[str, Any] = {"max_tokens": 1, "num_prompt_logprobs": 0, "prompt_logprobs_from": 65}
    results = run_all(loop, [make_submit(key, [*common, key + 3, 9], **scoring) for key in range(6)])
    assert sorted(_cached(result) for result in results.values()) == [0, *[64] * 5]


@given(
    chunk=st.integers(8, 80),
    order=st.permutations(range(len(MIXED))),
    delays=st.lists(st.integers(0, 6), min_size=len(MIXED), max_size=len(MIXED)),
)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_seeded_requests_tokens_do_not_depend_on_neighbours_chunks_or_arrival(
    loops: Any, alone: dict[int, list[int]], chunk: int, order: list[int], delays: list[int]
) -> None:
    loop = loops.make(max_batch_tokens=chunk, max_running=8)
    outputs: dict[int, list[int]] = {key: [] for key in alone}
    for place in order:
        for _ in range(delays[place]):
            loop.step()
        loop.submit(MIXED[place])
    while not loop.scheduler.idle:
        loop.step()
    step = loop.take_outputs()
    assert step is not None
    for output in step.outputs:
        outputs[output.key] += output.token_ids
    assert outputs == alone


def test_an_abort_in_mid_stream_frees_the_blocks_and_counts_the_tokens(loops: Any) -> None:
    loop = loops.make()
    loop.submit(make_submit(0, prompt_of(40, 0)))
    for _ in range(5):
        loop.step()
    assert loop.load().kv_blocks_used > 0
    loop.abort(0)
    assert loop.load().kv_blocks_used == 0
    step = loop.take_outputs()
    assert step is not None
    finish = step.outputs[-1].finish
    assert finish is not None
    assert (finish.reason, finish.num_output_tokens) == (FinishReason.ABORT, 5)


def test_a_prompt_that_does_not_fit_is_refused_with_both_lengths(loops: Any) -> None:
    loop = loops.make(max_context_tokens=32)
    loop.submit(make_submit(0, prompt_of(32, 0)))
    step = loop.take_outputs()
    assert step is not None
    assert step.failures[0].code == FailureCode.CONTEXT_LENGTH_EXCEEDED
    assert "32" in step.failures[0].message
    assert "31" in step.failures[0].message


def test_a_request_longer_than_the_cache_ends_at_its_size_and_blocks_no_others(loops: Any) -> None:
    loop = loops.make(block_size=8, kv_memory_bytes=6 * BLOCK_BYTES_8)
    assert loop.max_context_tokens == 48
    greedy = [make_submit(key, prompt_of(20 + key, key), max_tokens=100) for key in range(3)]
    short = make_submit(9, prompt_of(30, 9), max_tokens=4)
    results = run_all(loop, [*greedy, short], on_step=lambda _: assert_goes_on(loop))
    assert {key: len(results[key].token_ids) for key in range(3)} == {0: 28, 1: 27, 2: 26}
    assert results[9].finish is not None


def assert_goes_on(loop: EngineLoop) -> None:
    assert loop.steps_total < 1000, "nobody waits for ever"


def test_logprobs_come_with_each_token(loops: Any) -> None:
    result = run_all(loops.make(), [make_submit(0, prompt_of(9, 0), num_logprobs=2, max_tokens=5)])[0]
    assert len(result.logprobs) == 5
    for token_id, logprob in zip(result.token_ids, result.logprobs, strict=True):
        assert logprob.top_ids[0] == token_id
        assert logprob.top_logprobs[0] == pytest.approx(logprob.logprob)


def test_a_kv_cache_too_small_for_anything_says_what_to_raise(loops: Any) -> None:
    with pytest.raises(OutOfMemory, match="--kv-memory-bytes"):
        loops.make(block_size=8, kv_memory_bytes=BLOCK_BYTES_8)


def test_any_block_size_works(loops: Any, alone: dict[int, list[int]]) -> None:
    for block_size in (1, 2, 3, 16):
        loop = loops.make(block_size=block_size)
        loop.warm_up()
        assert tokens(loop, MIXED) == alone


def test_a_small_budget_alone_lowers_the_batch_to_fit(loops: Any) -> None:
    assert loops.make(max_batch_tokens=32).scheduler.limits.max_running == 32


def test_a_budget_below_the_batch_is_refused(loops: Any) -> None:
    with pytest.raises(InvalidConfig, match="max_batch_tokens"):
        loops.make(max_batch_tokens=4, max_running=8)


def test_the_pool_is_sized_from_what_the_batch_could_use(loops: Any) -> None:
    loop = loops.make(max_running=4, block_size=8)
    assert loop.load().kv_blocks_total == 4 * 512 // 8


def _scores(loop: EngineLoop, submit: CoreSubmit) -> dict[int, float]:
    """Return the log-probabilities of a prompt's tokens by position."""
    loop.submit(submit)
    found: dict[int, float] = {}
    while not loop.scheduler.idle:
        loop.step()
        step = loop.take_outputs()
        for output in step.outputs if step else []:
            if output.scores is not None:
                found |= {at: one.logprob for at, one in enumerate(output.scores.logprobs, output.scores.position)}
    return found


def _cached(result: Result) -> int:
    assert result.finish is not None
    return result.finish.num_cached_tokens
