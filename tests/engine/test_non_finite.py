"""A request whose logits, embedding or scores are not finite fails, and no other request is affected."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from moiety_engine.adapters.dummy import write_adapter
from moiety_engine.config import EngineConfig, Speculate
from moiety_engine.loop import EngineLoop
from moiety_engine.loop_setup import build_loop
from moiety_engine.messages import CoreFailure, CoreSubmit
from moiety_engine.offline import run_all
from moiety_engine.sampling import Best, Sampler
from moiety_engine.sampling.finite import finite_rows
from moiety_engine.sequence import Sequence
from moiety_engine.startup import load_loop
from moiety_wire.classes import STANDARD
from moiety_wire.engine_choices import Batching
from moiety_wire.messages import FailureCode, Sampling

from .conftest import Loops

NUM_OUTPUT = 12
PROMPTS = {key: [3 + (7 * i + 11 * key) % 200 for i in range(9 + 5 * key)] for key in range(1, 6)}
BAD = 3  # the request whose answer meets the token without a finite embedding
LIMIT_S = 120.0


def submit(key: int, **changes: Any) -> CoreSubmit:
    asked = Sampling(temperature=0.0)
    made = CoreSubmit(key, "t", STANDARD, PROMPTS[key], asked, NUM_OUTPUT, 0, [], NUM_OUTPUT, b"s", 0)
    return msgspec.structs.replace(made, **changes)


def step_through(loop: EngineLoop, submits: list[CoreSubmit]) -> tuple[dict[int, list[int]], dict[int, CoreFailure]]:
    """Run steps until all requests have ended; return tokens and failures by key."""
    tokens: dict[int, list[int]] = {one.key: [] for one in submits}
    failed: dict[int, CoreFailure] = {}
    for one in submits:
        loop.submit(one)
    ended, end_s = 0, time.monotonic() + LIMIT_S
    while ended < len(submits):
        assert time.monotonic() < end_s, "a request does not end"
        loop.step()
        step = loop.take_outputs()
        for output in step.outputs if step else ():
            tokens[output.key] += output.token_ids
            ended += output.finish is not None
        for failure in step.failures if step else ():
            failed[failure.key] = failure
            ended += 1
    return tokens, failed


def with_embedding(checkpoint: Path, into: Path, token_id: int, value: float) -> Path:
    """Write the checkpoint with one token's embedding set to `number`."""
    shutil.copytree(checkpoint, into)
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["model.embed_tokens.weight"][token_id] = value
    save_file(tensors, into / "model.safetensors", metadata={"format": "pt"})
    return into


@pytest.fixture(scope="module")
def healthy(loops: Loops) -> dict[int, list[int]]:
    return {key: one.token_ids for key, one in run_all(loops.make(), map(submit, PROMPTS)).items()}


@pytest.fixture(scope="module")
def bad_token(healthy: dict[int, list[int]]) -> tuple[int, int]:
    """Return a token that only the answer BAD has, at a position after its first, and that position."""
    others = {token for key, prompt in PROMPTS.items() for token in (*prompt, *(healthy[key] if key != BAD else ()))}
    answer = healthy[BAD]
    places = (i for i in range(2, NUM_OUTPUT - 2) if answer[i] not in others and answer[i] not in answer[:i])
    return (answer[place := next(places)], place)


@pytest.fixture(scope="module")
def poisoned(checkpoint: Path, bad_token: tuple[int, int], tmp_path_factory: pytest.TempPathFactory) -> Loops:
    return Loops(with_embedding(checkpoint, tmp_path_factory.mktemp("bad") / "nan", bad_token[0], float("nan")))


WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "replayed decodes": ({}, {}),
    "log-probabilities": ({}, {"num_logprobs": 2}),
    "penalties": ({}, {"presence_penalty": 1e-6}),
    "one row a step": ({"max_running": 1}, {}),
    "padded": ({"batching": Batching.PADDED, "static_batch_size": 5}, {}),
    "static": ({"batching": Batching.STATIC, "static_batch_size": 5}, {}),
    "no prefix cache": ({"prefix_caching": False}, {}),
}


@pytest.mark.parametrize("way", WAYS)
def test_an_answer_that_is_not_finite_ends_there_and_the_others_are_as_they_were(
    poisoned: Loops, healthy: dict[int, list[int]], bad_token: tuple[int, int], way: str
) -> None:
    settings, asked = WAYS[way]
    loop = poisoned.make(**settings)
    tokens, failed = step_through(loop, [submit(key, sampling=Sampling(temperature=0.0, **asked)) for key in PROMPTS])
    expected = healthy | {BAD: healthy[BAD][: bad_token[1] + 1]}  # the token itself is said: what follows it is not
    assert tokens == expected
    assert {key: (one.code, one.num_output_tokens) for key, one in failed.items()} == {
        BAD: (FailureCode.NON_FINITE, bad_token[1] + 1)
    }
    assert "checkpoint" in failed[BAD].message
    assert loop.scheduler.idle
    assert all(kv.pool.num_used == 0 for kv in loop.scheduler.groups)


def test_drawn_tokens_are_checked_too(poisoned: Loops, bad_token: tuple[int, int]) -> None:
    drawn = Sampling(temperature=0.9, top_p=0.9, seed=5)
    good = submit(1, sampling=drawn)
    expected = run_all(poisoned.make(), [good])[1].token_ids
    bad = submit(2, prompt_ids=[*PROMPTS[2], bad_token[0]], sampling=drawn)
    tokens, failed = step_through(poisoned.make(), [good, bad])
    assert tokens == {1: expected, 2: []}
    assert failed[2].code is FailureCode.NON_FINITE


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_every_non_finite_value_fails_its_request(checkpoint: Path, tmp_path: Path, value: float) -> None:
    loop = Loops(with_embedding(checkpoint, tmp_path / "bad", 250, value)).make()
    tokens, failed = step_through(loop, [submit(1), submit(2, prompt_ids=[5, 250, 6])])
    assert len(tokens[1]) == NUM_OUTPUT
    assert (tokens[2], failed[2].code) == ([], FailureCode.NON_FINITE)


def test_a_token_id_outside_the_embedding_fails_its_request(loops: Loops, healthy: dict[int, list[int]]) -> None:
    tokens, failed = step_through(loops.make(), [submit(1), submit(2, prompt_ids=[5, 1 << 20, 6])])
    assert tokens == {1: healthy[1], 2: []}
    assert failed[2].code is FailureCode.NON_FINITE


@pytest.mark.parametrize("by", ["ngram", "draft"])
def test_accepted_draft_tokens_before_a_non_finite_value_are_kept(
    poisoned: Loops, sketch_loops: Loops, healthy: dict[int, list[int]], bad_token: tuple[int, int], by: str
) -> None:
    given: dict[str, Any] = {"speculate": Speculate.NGRAM}
    if by == "draft":
        given = {"speculate": Speculate.DRAFT, "draft_model": str(poisoned.folder)}  # whose guesses all come true
    config = EngineConfig(model=str(poisoned.folder), name="tiny", **given)
    ticks = iter(range(10**18, 2 * 10**18, 10**7))
    drafting = (poisoned.model,) if by == "draft" else ()
    loop = build_loop(poisoned.model, config, clock_ns=lambda: next(ticks), draft_models=drafting)
    tokens, failed = step_through(loop, [submit(key) for key in PROMPTS])
    assert tokens == healthy | {BAD: healthy[BAD][: bad_token[1] + 1]}
    assert list(failed) == [BAD]
    if by == "draft":
        assert loop.scheduler.output_processor.accepted_tokens_total > 0


def test_blocks_of_a_non_finite_request_are_not_reused(poisoned: Loops, bad_token: tuple[int, int]) -> None:
    loop = poisoned.make(block_size=4)
    long = submit(1, prompt_ids=[*PROMPTS[4], bad_token[0], *PROMPTS[5]])
    pool = loop.scheduler.kv.pool
    for _ in range(2):
        tokens, failed = step_through(loop, [long])
        assert (tokens, list(failed)) == ({1: []}, [1])
        assert pool.num_cached == 0
        assert pool.num_used == 0
    again = submit(2, prompt_ids=PROMPTS[4])
    (found,) = run_all(loop, [again]).values()
    assert found.finish is not None
    assert found.finish.num_cached_tokens == 0


def test_blocks_of_a_non_finite_request_are_not_kept_on_host_or_disk(
    poisoned: Loops, bad_token: tuple[int, int], tmp_path: Path
) -> None:
    few: dict[str, Any] = {"block_size": 4, "kv_memory_bytes": 30 * poisoned.model.kv_bytes_per_block(4)}
    host: dict[str, Any] = {"host_kv_memory_bytes": 100 * poisoned.model.kv_bytes_per_block(4)}
    loop = poisoned.make(disk_cache=str(tmp_path), disk_cache_bytes=1 << 24, max_batch_tokens=8, **few, **host)
    assert loop.intake.disk is not None
    begun = [*PROMPTS[4], bad_token[0], *PROMPTS[5]]
    # it ends before anything is sampled, and its blocks stay behind as if they were valid
    loop.submit(submit(1, prompt_ids=begun))
    while loop.steps_total < 5:  # of the seven that its prompt takes
        loop.step()
    loop.abort(1)
    loop.take_outputs()
    hashes = loop.scheduler.kv.completed_hashes(_probe(begun), 36)
    end_s = time.monotonic() + LIMIT_S
    index, pool = loop.intake.disk.first.index, loop.scheduler.kv.pool
    while index.num_blocks < len(hashes):
        assert time.monotonic() < end_s
        loop.step()
    assert all(
        loop.intake.disk.first.index.find(one) and loop.scheduler.kv.pool.find(one) is not None for one in hashes
    )
    tokens, failed = step_through(loop, [submit(2, prompt_ids=begun)])
    assert (tokens, list(failed)) == ({2: []}, [2])
    assert all(loop.intake.disk.first.index.find(one) is None and pool.find(one) is None for one in hashes)
    assert not any(loop.scheduler.kv.is_on_host(one) for one in hashes)
    while not loop.intake.disk.is_quiet:
        assert time.monotonic() < end_s
        loop.step()
    assert not any(index.find(one) for one in hashes)
    loop.close()


def _probe(prompt_ids: list[int]) -> Sequence:
    return Sequence(submit(4, prompt_ids=prompt_ids), order=0, seed=0)


def test_vectors_and_scores_are_checked(poisoned: Loops, bad_token: tuple[int, int]) -> None:
    embeds: dict[str, Any] = {"embed": True, "max_tokens": 0, "credit_tokens": 0}
    scores: dict[str, Any] = {"sampling": Sampling(temperature=0.0, num_prompt_logprobs=1), "max_tokens": 1}
    bad: dict[str, Any] = {"prompt_ids": [*PROMPTS[2], bad_token[0], 7, 8]}
    submits = [submit(1, **embeds), submit(2, **embeds, **bad), submit(4, **scores), submit(5, **scores, **bad)]
    tokens, failed = step_through(poisoned.make(), submits)
    assert {key: one.code for key, one in failed.items()} == dict.fromkeys((2, 5), FailureCode.NON_FINITE)
    assert len(tokens[4]) == 1


@pytest.mark.parametrize(
    ("changes", "factor", "use_rslora"),
    [
        ({"lora_alpha": 1e308}, 1.0, False),
        ({"lora_alpha": 1e300}, 1.0, True),
        ({}, 3e38, False),
        ({}, 1e30, False),
        ({}, float("nan"), False),
        ({}, float("inf"), False),
        ({"lora_alpha": -1e30}, 1.0, False),
    ],
)
@pytest.mark.parametrize("half", ["lora_A", "lora_B"])
def test_an_adapter_whose_scaled_weights_overflow_is_refused(
    loops: Loops, checkpoint: Path, tmp_path: Path, changes: dict[str, Any], factor: float, use_rslora: bool, half: str
) -> None:
    folder = write_adapter(tmp_path / "odd", checkpoint, use_rslora=use_rslora)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | changes))
    tensors = load_file(folder / "adapter_model.safetensors")
    name = next(name for name in tensors if half in name)
    tensors[name][0, 0] = factor if factor != 1.0 else tensors[name][0, 0]
    save_file(tensors, folder / "adapter_model.safetensors")
    loop = loops.make()
    loop.intake.adapters.learn("odd", folder)
    tokens, failed = step_through(loop, [submit(1), submit(2, adapter="odd")])
    assert len(tokens[1]) == NUM_OUTPUT
    assert failed[2].code is FailureCode.ADAPTER_REFUSED
    assert "finite" in failed[2].message or "multiplies its input" in failed[2].message


def test_minimum_and_maximum_find_whatever_is_not_finite() -> None:
    rows = np.zeros((7, 1001), dtype=np.float32)
    for row, (place, value) in enumerate([(0, np.nan), (1000, np.inf), (500, -np.inf), (3, np.nan), (9, 3e38)]):
        rows[row, place] = value
    rows[3] = np.nan
    assert finite_rows(rows).tolist() == [False, False, False, False, True, True, True]
    assert Best.of(rows).non_finite_rows() == {0, 1, 2, 3}
    assert finite_rows(rows[:0]).tolist() == []


def test_a_ban_is_no_fault_of_the_model() -> None:
    sampler = Sampler(16, torch.device("cpu"))
    rows = [_row(1, logit_bias={3: -100.0}, min_tokens=2, stop=(4,)), _row(2)]
    drawn = sampler.sample(torch.zeros(2, 16), rows)
    assert drawn.non_finite_rows() == frozenset()


def _row(key: int, *, min_tokens: int = 0, stop: tuple[int, ...] = (), **asked: Any) -> Sequence:
    sampling = Sampling(temperature=0.0, **asked)
    made = CoreSubmit(key, "t", STANDARD, [1], sampling, 4, min_tokens, list(stop), 4, b"s", 0)
    return Sequence(made, order=0, seed=0)


def test_a_checkpoint_without_finite_weights_serves_nothing_as_an_answer(checkpoint: Path, tmp_path: Path) -> None:
    folder = with_embedding(checkpoint, tmp_path / "nan", 1, 0.0)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][:] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    loop = load_loop(EngineConfig(model=str(folder), name="tiny"))
    tokens, failed = step_through(loop, [submit(key) for key in PROMPTS])
    assert tokens == {key: [] for key in PROMPTS}
    assert {one.code for one in failed.values()} == {FailureCode.NON_FINITE}
