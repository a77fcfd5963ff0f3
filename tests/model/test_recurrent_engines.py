"""Engines with recurrent layers of real families answer as transformers does, after prefix hits and preemption too.

`tests/engine/test_recurrent_states.py` shows the same, and more, with the smallest recurrent layer.
"""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
from tests.poisoned_engine import PoisonedEngine
from tests.preemption import preempt

from moiety_engine.config import EngineConfig, Speculate
from moiety_engine.loop_setup import build_loop
from moiety_engine.model.loading import load_model

from .test_parity import TOLERANCE, tokens

VARIANTS = ["falcon_h1", "granitemoehybrid", "jamba", "lfm2_moe", "nemotron_h", "nemotron_h, latent experts", "zaya"]
LINEAR_ATTENTION = ["bailing_hybrid", "kimi_linear", "minimax", "qwen3_5_moe", "qwen3_next"]
KINDS = ["jamba", "kimi_linear", "lfm2_moe", "minimax", "nemotron_h"]  # one of each kind of recurrent layer
FURTHER = ["bailing_hybrid", "falcon_h1", "granitemoehybrid", "nemotron_h, dense"]
UNSUPPORTED_SIZES = ["falcon_h1", "nemotron_h", "nemotron_h, latent experts"]  # heads too narrow for CPU kernels
BLOCK_SIZE, NUM_BLOCKS, MAX_RUNNING, NUM_SNAPSHOTS = 4, 400, 4, 12


class Engine(PoisonedEngine):
    """A poisoned loop over a checkpoint, with the prompts of its requests."""

    def __init__(self, checkpoint: Any, *, swaps: bool = False, **settings: Any) -> None:
        model = load_model(checkpoint.folder, device="cpu", dtype="float32")
        memory = NUM_BLOCKS * model.kv_bytes_per_block(BLOCK_SIZE) + (MAX_RUNNING + NUM_SNAPSHOTS) * model.state_bytes
        settings |= {"host_kv_memory_bytes": 1 << 22} if swaps else {}
        config = EngineConfig(
            model=str(checkpoint.folder),
            name="tiny",
            block_size=BLOCK_SIZE,
            max_batch_tokens=64,
            max_running=MAX_RUNNING,
            kv_memory_bytes=memory,
            **settings,
        )
        ticks = count(10**18, 10**7)
        super().__init__(build_loop(model, config, clock_ns=lambda: next(ticks)))
        self.prompts: dict[int, list[int]] = {}

    def submit(self, key: int, prompt: list[int], num_output: int = 12, **sampling: Any) -> None:
        self.prompts[key] = prompt
        super().submit(key, prompt, num_output, **sampling)


def run_with_a_preemption(checkpoint: Any, *, swaps: bool) -> Engine:
    """Return an engine that has answered two prompts, of which the second was preempted meanwhile."""
    engine = Engine(checkpoint, swaps=swaps)
    for key, length in enumerate((70, 41)):
        engine.submit(key, tokens(checkpoint.vocab_size, length, seed=key), num_output=24)
    while len(engine.answers[1]) < 5:
        engine.step()
    victim = preempt(engine.loop, 1)
    assert bool(victim.kv.host_blocks) == swaps
    engine.run()
    return engine


def assert_answers_are_the_oracles(engine: Engine, checkpoint: Any) -> None:
    """Each token is the most likely one, or nearly as likely."""
    for key, prompt in engine.prompts.items():
        answer = engine.answers[key]
        assert answer
        rows = checkpoint.logprobs(prompt + answer)[len(prompt) - 1 : -1]
        for row, token in zip(rows, answer, strict=True):
            assert row.max() - row[token] < TOLERANCE


@pytest.mark.parametrize("variant", [*VARIANTS, *LINEAR_ATTENTION])
def test_the_next_turn_continues_from_a_snapshot(make_checkpoint: Any, variant: str) -> None:
    checkpoint = make_checkpoint(variant)
    engine = Engine(checkpoint)
    for key, length in enumerate((90, 37, 6)):
        engine.submit(key, tokens(checkpoint.vocab_size, length, seed=key))
    engine.run()
    engine.submit(9, engine.prompts[0] + engine.answers[0] + tokens(checkpoint.vocab_size, 20, seed=9))
    engine.run()
    assert engine.finishes[9].num_cached_tokens == 88
    assert_answers_are_the_oracles(engine, checkpoint)


@pytest.mark.parametrize("variant", VARIANTS)
def test_recorded_steps_change_no_answer(make_checkpoint: Any, variant: str) -> None:
    checkpoint = make_checkpoint(variant)
    recording, plain = Engine(checkpoint), Engine(checkpoint)
    plain.loop.executor.model._programs = None
    for engine in (recording, plain):
        for key, length in enumerate((31, 8, 17)):
            engine.submit(key, tokens(checkpoint.vocab_size, length, seed=key), num_output=8 + 4 * key)
        engine.run()
    programs = recording.loop.executor.model._programs
    recordable = variant not in UNSUPPORTED_SIZES
    assert {rows for rows, _ in programs._recorded if programs._recorded[rows, False].whole} == (
        {1, 2, 3} if recordable else set()
    )
    assert recording.answers == plain.answers


@pytest.mark.parametrize("swaps", [True, False])
@pytest.mark.parametrize("variant", [*VARIANTS, *LINEAR_ATTENTION])
def test_a_preempted_sequence_continues_or_is_computed_anew(make_checkpoint: Any, variant: str, swaps: bool) -> None:
    checkpoint = make_checkpoint(variant)
    engine = run_with_a_preemption(checkpoint, swaps=swaps)
    assert (engine.finishes[1].num_recomputed_tokens == 0) == swaps
    assert_answers_are_the_oracles(engine, checkpoint)


@pytest.mark.parametrize("variant", [*KINDS, *(pytest.param(one, marks=pytest.mark.thorough) for one in FURTHER)])
def test_rejected_drafts_leave_no_trace_in_states(make_checkpoint: Any, variant: str) -> None:
    checkpoint = make_checkpoint(variant)
    engines = [Engine(checkpoint, speculate=speculate) for speculate in (Speculate.OFF, Speculate.NGRAM)]
    few_words = {"logit_bias": dict.fromkeys((17, 230, 41), 30.0)}  # so that the answers repeat themselves in part
    for engine in engines:
        for key in range(4):
            prompt = tokens(checkpoint.vocab_size, 20 + key, seed=key) + [17, 230, 41] * 4
            # falcon_h1 draws, since its likeliest word is always the same one, and no draft is wrong then
            temperature = float(variant == "falcon_h1")
            engine.submit(key, prompt, num_output=40, temperature=temperature, seed=key, **few_words)
        engine.run()
    load = engines[1].loop.load()
    assert 0 < load.accepted_tokens_total < load.drafted_tokens_total
    assert engines[0].answers == engines[1].answers
