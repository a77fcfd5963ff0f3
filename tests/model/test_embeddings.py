"""Embeddings are transformers' last hidden states as unit vectors, whatever runs beside them and however batched."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.core_submits import core_submit

from moiety_engine.config import EngineConfig, PolicyName
from moiety_engine.loop import EngineLoop
from moiety_engine.loop_setup import build_loop
from moiety_engine.messages import CoreSubmit
from moiety_engine.model.loading import load_model
from moiety_engine.offline import Result, run_all
from moiety_wire.engine_choices import Batching
from moiety_wire.messages import FailureCode, FinishReason
from moiety_wire.trace_events import EventKind

TOLERANCE = 1e-4
LENGTHS = (1, 7, 16, 40, 150)


@pytest.fixture(params=["qwen3_moe", "llama, llama3 rope"])
def checkpoint(request: pytest.FixtureRequest, make_checkpoint: Any) -> Any:
    return make_checkpoint(request.param)


@pytest.fixture
def make_loop(checkpoint: Any, device: str) -> Callable[..., EngineLoop]:
    model = load_model(checkpoint.folder, device=device, dtype="float32")

    def make(**settings: Any) -> EngineLoop:
        return build_loop(model, EngineConfig(model=str(checkpoint.folder), name="tiny", **settings))

    return make


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(0, 384, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


PROMPTS = {key: tokens(length, seed=key) for key, length in enumerate(LENGTHS)}


def to_embed(key: int, prompt: list[int]) -> CoreSubmit:
    return _submit(key, prompt, embed=True, max_tokens=0)


def to_complete(key: int, prompt: list[int], max_tokens: int = 12) -> CoreSubmit:
    return _submit(key, prompt, embed=False, max_tokens=max_tokens)


def _submit(key: int, prompt: list[int], *, embed: bool, max_tokens: int) -> CoreSubmit:
    return core_submit(key, prompt, max_tokens, embed=embed)


EMBEDDED = [to_embed(key, prompt) for key, prompt in PROMPTS.items()]
COMPLETED = [to_complete(100 + number, tokens(length, seed=100 + number)) for number, length in enumerate((3, 60, 20))]
MIXED = [EMBEDDED[0], COMPLETED[0], EMBEDDED[4], EMBEDDED[1], COMPLETED[1], EMBEDDED[2], COMPLETED[2], EMBEDDED[3]]


def run(loop: EngineLoop, submits: Iterable[CoreSubmit]) -> dict[int, Result]:
    results = run_all(loop, submits)
    assert loop.scheduler.idle and loop.scheduler.kv.pool.num_used == 0
    return results


def vectors(results: dict[int, Result]) -> dict[int, np.ndarray]:
    """Return the embeddings of the requests that asked for one."""
    found = {}
    for key in PROMPTS.keys() & results.keys():
        finish = results[key].finish
        assert finish is not None and not results[key].token_ids
        assert (finish.reason, finish.num_output_tokens) == (FinishReason.STOP, 0)
        found[key] = np.frombuffer(finish.embedding, "<f4")
    return found


def generated(results: dict[int, Result]) -> dict[int, list[int]]:
    return {key: result.token_ids for key, result in results.items() if key not in PROMPTS}


@torch.no_grad()
def oracle(checkpoint: Any, prompt: list[int]) -> np.ndarray:
    hidden = checkpoint.oracle.model(torch.tensor([prompt])).last_hidden_state[0, -1].double().numpy()
    return hidden / np.linalg.norm(hidden)


def assert_right(checkpoint: Any, found: dict[int, np.ndarray]) -> None:
    assert found.keys() == PROMPTS.keys()
    for key, vector in found.items():
        assert np.abs(vector - oracle(checkpoint, PROMPTS[key])).max() <= TOLERANCE
        assert np.linalg.norm(vector) == pytest.approx(1.0, abs=1e-5)


def test_a_checkpoint_without_a_head_embeds_alike(make_checkpoint: Any, tmp_path: Path) -> None:
    whole = make_checkpoint("qwen3, tied")
    whole.oracle.model.save_pretrained(tmp_path / "headless")
    found = []
    for folder in (whole.folder, tmp_path / "headless"):
        model = load_model(folder, device="cpu", dtype="float32")
        loop = build_loop(model, EngineConfig(model=str(folder), name="tiny"))
        found.append(vectors(run(loop, EMBEDDED)))
    assert_right(whole, found[0])
    assert all(np.array_equal(found[0][key], found[1][key]) for key in PROMPTS)


def test_alone_each_is_the_oracles(checkpoint: Any, make_loop: Any) -> None:
    found: dict[int, np.ndarray] = {}
    for submit in EMBEDDED:
        found |= vectors(run(make_loop(), [submit]))
    assert_right(checkpoint, found)


@pytest.mark.parametrize("max_batch_tokens", [7, 64, 512])
def test_embeddings_beside_generation_equal_the_oracles_and_change_no_other_request(
    checkpoint: Any, make_loop: Any, max_batch_tokens: int
) -> None:
    alone = generated(run(make_loop(), COMPLETED))
    results = run(make_loop(max_batch_tokens=max_batch_tokens, max_running=5), MIXED)
    assert_right(checkpoint, vectors(results))
    assert generated(results) == alone


@pytest.mark.parametrize("batching", list(Batching))
def test_every_strategy_gives_the_oracles(checkpoint: Any, make_loop: Any, batching: Batching) -> None:
    alone = generated(run(make_loop(), COMPLETED))
    results = run(make_loop(batching=batching, static_batch_size=3, batch_timeout_ms=1.0, max_batch_tokens=64), MIXED)
    assert_right(checkpoint, vectors(results))
    assert generated(results) == alone


@pytest.mark.parametrize("policy", list(PolicyName))
def test_every_policy_gives_the_oracles(checkpoint: Any, make_loop: Any, policy: PolicyName) -> None:
    loop = make_loop(policy=policy, max_batch_tokens=32, max_running=3)
    assert_right(checkpoint, vectors(run(loop, MIXED)))
    assert loop.scheduler.policy.num_queued == 0


def test_after_a_prefix_hit_each_is_still_the_oracles(checkpoint: Any, make_loop: Any) -> None:
    loop = make_loop(block_size=4, max_batch_tokens=64)
    run(loop, EMBEDDED)
    run(loop, [to_complete(200, PROMPTS[3][:20])])
    results = run(loop, EMBEDDED)
    assert_right(checkpoint, vectors(results))
    cached = {key: results[key].finish.num_cached_tokens for key in PROMPTS}
    assert cached == {0: 0, 1: 4, 2: 12, 3: 36, 4: 148}  # whole blocks, but never the last token


def test_one_that_gives_way_in_mid_prompt_and_comes_back_is_still_the_oracles(checkpoint: Any, make_loop: Any) -> None:
    block_bytes = make_loop(block_size=8).executor.model.kv_bytes_per_block(8)
    loop = make_loop(
        block_size=8,
        kv_memory_bytes=13 * block_bytes,  # for both prompts, but not for the answer
        max_batch_tokens=8,
        prefix_caching=False,
        policy=PolicyName.FCFS,
    )
    result = run(loop, [to_complete(100, tokens(60, 1), max_tokens=30), EMBEDDED[3]])[3]
    assert EventKind.PREEMPTED in [event.kind for event in result.finish.events]
    vector = np.frombuffer(result.finish.embedding, "<f4")
    assert np.abs(vector - oracle(checkpoint, PROMPTS[3])).max() <= TOLERANCE


def test_a_prompt_may_fill_the_context_and_no_more(make_loop: Any) -> None:
    loop = make_loop(max_context_tokens=32)
    (result,) = run(loop, [to_embed(0, tokens(32, 9))]).values()
    assert len(result.finish.embedding) == 4 * 64
    loop.submit(to_embed(1, tokens(33, 9)))
    step = loop.take_outputs()
    assert step is not None
    assert step.failures[0].code == FailureCode.CONTEXT_LENGTH_EXCEEDED
    assert "1 to 32" in step.failures[0].message


def test_an_abort_in_mid_prompt_frees_the_blocks_and_brings_no_vector(make_loop: Any) -> None:
    loop = make_loop(max_batch_tokens=16, max_running=4)
    loop.submit(EMBEDDED[4])
    loop.step()
    assert loop.load().kv_blocks_used > 0
    loop.abort(EMBEDDED[4].key)
    assert loop.load().kv_blocks_used == 0
    step = loop.take_outputs()
    assert step is not None and step.outputs[-1].finish is not None
    assert (step.outputs[-1].finish.reason, step.outputs[-1].finish.embedding) == (FinishReason.ABORT, b"")
