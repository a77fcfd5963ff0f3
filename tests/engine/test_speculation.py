"""Speculative decoding changes how fast tokens are generated, and no request's output."""

from __future__ import annotations

import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tests.core_submits import core_submit

from moiety_engine.config import EngineConfig, Overlap, PolicyName, Speculate
from moiety_engine.errors import InvalidConfig
from moiety_engine.messages import CoreSubmit
from moiety_engine.offline import Result, run_all
from moiety_engine.scheduling.speculative_decoding.costs import RowCosts
from moiety_engine.scheduling.speculative_decoding.history import AcceptanceHistory
from moiety_engine.scheduling.speculative_decoding.ngrams import NgramIndex, continuation
from moiety_engine.scheduling.step_time.step_time_model import StepShape, StepTimeModel
from moiety_engine.sequence import Sequence
from moiety_wire.classes import BATCH
from moiety_wire.engine_choices import Batching
from moiety_wire.messages import FinishReason, Sampling, TokenRules

BLOCK_BYTES_8 = 2 * 2 * 2 * 16 * 8 * 4  # layers · (K, V) · heads · width · tokens · float32
WORDS = [17, 230, 41]
FEW_WORDS = dict.fromkeys(WORDS, 30.0)  # a bias that leaves the model only these words, so that it repeats some
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7, "seed": 11},
    {"temperature": 0.6, "top_p": 0.9, "seed": 12},
    {"temperature": 0.0, "repetition_penalty": 1.05},
    {"temperature": 0.6, "top_k": 2, "presence_penalty": 0.3, "frequency_penalty": 0.1, "seed": 13},
    {"temperature": 0.0, "num_logprobs": 2},
    {"temperature": 0.8, "seed": 14, "token_rules": TokenRules((*WORDS, 5), ((17, 230, 41, 17), (5, 5)))},
]


def make_submit(key: int, *, max_tokens: int = 60, **more: Any) -> CoreSubmit:
    submit = core_submit(
        key,
        (WORDS[key % 3 :] + WORDS[: key % 3]) * 6,
        max_tokens,
        service=BATCH,
        sampling=Sampling(**{"logit_bias": FEW_WORDS} | KINDS[key % len(KINDS)]),
    )
    return msgspec.structs.replace(submit, **more)


def told(results: dict[int, Result]) -> dict[int, tuple[list[int], list[Any], FinishReason, str]]:
    return {key: (r.token_ids, r.logprobs, r.finish.reason, r.finish.detail) for key, r in results.items() if r.finish}


@pytest.mark.parametrize("overlap", [Overlap.OFF, Overlap.ON])
@pytest.mark.parametrize("batching", [Batching.CONTINUOUS, Batching.STATIC])
def test_every_kind_of_sampling_gives_the_same_tokens_and_logprobs(
    loops: Any, drafting: Any, batching: Batching, overlap: Overlap
) -> None:
    submits = [make_submit(key) for key in range(7)]
    expected = told(run_all(loops.make(batching=batching), submits))
    loop = drafting(batching=batching, overlap=overlap)
    results = run_all(loop, submits)
    assert told(results) == expected
    load = loop.load()
    assert 0 < load.accepted_tokens_total < load.drafted_tokens_total
    finishes = [r.finish for r in results.values() if r.finish]
    assert sum(f.num_drafted_tokens for f in finishes) == load.drafted_tokens_total
    assert sum(f.num_accepted_tokens for f in finishes) == load.accepted_tokens_total
    assert loop.scheduler.kv.pool.num_used == 0
    assert loop.load().output_tokens_total == 7 * 60
    kept = [value for value in vars(loop.scheduler.speculator._proposer).values() if isinstance(value, dict)]
    assert kept == [{}], "the proposer keeps records of requests that have ended"


def test_fewer_steps_are_taken(drafting: Any) -> None:
    loop = drafting()
    run_all(loop, [make_submit(0)])
    assert loop.steps_total < 60 - 10


def test_steps_that_are_looked_at_tell_all_the_tokens_that_came_of_them(drafting: Any) -> None:
    loop = drafting(traced_steps_per_s=1000)
    for key in range(4):
        loop.submit(make_submit(key))
    steps = []
    while not loop.scheduler.idle:
        loop.step()
        found = loop.take_outputs()
        steps += [] if found is None else [traced.step for traced in found.traced]
    assert len(steps) == loop.steps_total
    assert loop.scheduler.output_processor.accepted_tokens_total > 0
    assert sum(step.num_output_tokens for step in steps) == loop.scheduler.output_tokens_total == 4 * 60


def test_a_stop_token_a_bound_and_a_floor_hold_in_the_middle_of_a_draft(loops: Any, drafting: Any) -> None:
    plain = run_all(loops.make(), [make_submit(0)])[0].token_ids
    often = max(set(plain), key=plain.count)
    for min_tokens in (0, 5, 23):
        for max_tokens in (1, 2, 30):
            stopping = make_submit(0, max_tokens=max_tokens, min_tokens=min_tokens, stop_token_ids=[often])
            assert told(run_all(drafting(), [stopping])) == told(run_all(loops.make(), [stopping]))


def test_credit_is_never_exceeded_and_all_of_it_is_used(loops: Any, drafting: Any) -> None:
    loop = drafting()
    loop.submit(make_submit(0, credit_tokens=3))
    expected = run_all(loops.make(), [make_submit(0)])[0].token_ids
    tokens: list[int] = []
    for credit in (3, 4, 9, 31, 60):
        loop.extend(0, credit, last=False)
        while loop.step():
            pass
        step = loop.take_outputs()
        tokens += [token for output in (step.outputs if step else []) for token in output.token_ids]
        assert tokens == expected[:credit]
    assert loop.load().accepted_tokens_total > 0


@pytest.mark.parametrize("overlap", [Overlap.OFF, Overlap.ON])
@pytest.mark.parametrize("host_bytes", [0, 80 * BLOCK_BYTES_8])
def test_preempted_and_swapped_requests_get_the_tokens_of_an_undisturbed_run(
    loops: Any, drafting: Any, overlap: Overlap, host_bytes: int
) -> None:
    submits = [make_submit(key, max_tokens=40) for key in range(7)]
    expected = told(run_all(loops.make(), submits))
    loop = drafting(
        overlap=overlap,
        kv_memory_bytes=24 * BLOCK_BYTES_8,
        host_kv_memory_bytes=host_bytes,
        max_context_tokens=100,
        policy=PolicyName.FCFS,
    )
    results = run_all(loop, submits)
    assert told(results) == expected
    assert loop.load().accepted_tokens_total > 0
    events = [event for r in results.values() if r.finish for event in r.finish.events]
    assert any(event.kind == "preempted" for event in events)


def test_a_request_that_another_engine_began_goes_on_with_drafts(loops: Any, drafting: Any) -> None:
    whole = run_all(loops.make(), [make_submit(key) for key in range(7)])
    submits = [make_submit(key, resumed_ids=whole[key].token_ids[:25]) for key in range(7)]
    loop = drafting()
    results = run_all(loop, submits)
    assert {k: r.token_ids for k, r in results.items()} == {k: r.token_ids[25:] for k, r in whole.items()}
    assert loop.load().accepted_tokens_total > 0


def test_an_abort_while_a_draft_runs_leaves_the_others_alone(loops: Any, drafting: Any) -> None:
    expected = run_all(loops.make(), [make_submit(1)])[1].token_ids
    loop = drafting(overlap=Overlap.ON)
    for key in (0, 1):
        loop.submit(make_submit(key))
    while 0 not in {s.key for s in loop.scheduler.queues.verifying}:
        assert loop.step(), "nothing was drafted"
    loop.abort(0)
    while loop.step():
        pass
    step = loop.take_outputs()
    assert [token for o in (step.outputs if step else []) if o.key == 1 for token in o.token_ids] == expected
    assert loop.scheduler.kv.pool.num_used == 0


def test_the_prefix_cache_holds_no_guess(loops: Any, drafting: Any) -> None:
    loop = drafting(block_size=2)
    first = run_all(loop, [make_submit(key) for key in range(4)])
    assert loop.load().accepted_tokens_total < loop.load().drafted_tokens_total
    longer = [
        make_submit(key, prompt_ids=make_submit(key).prompt_ids + first[key].token_ids[:50], max_tokens=9)
        for key in range(4)
    ]
    fresh = run_all(loops.make(prefix_caching=False), longer)
    again = run_all(loop, longer)
    assert {k: r.token_ids for k, r in again.items()} == {k: r.token_ids for k, r in fresh.items()}
    assert all(r.finish is not None and r.finish.num_cached_tokens >= 60 for r in again.values())


def test_sampled_tokens_follow_the_models_distribution(drafting: Any, checkpoint: Path) -> None:
    """Compare the frequencies of three verified tokens over many seeds with the probabilities of transformers."""
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    prompt, temperature = random.Random(0).choices(WORDS, k=40), 2.0
    sampling = Sampling(temperature=temperature, logit_bias=FEW_WORDS)
    loop = drafting(max_running=1)
    asked = [
        make_submit(seed, prompt_ids=prompt, max_tokens=4, sampling=msgspec.structs.replace(sampling, seed=seed))
        for seed in range(400)
    ]
    seen = Counter(tuple(result.token_ids[1:]) for result in run_all(loop, asked).values())
    drafted, accepted = loop.load().drafted_tokens_total, loop.load().accepted_tokens_total
    assert accepted > 50, "few guesses were right"
    assert drafted - accepted > 50, "few guesses were wrong"

    likely: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(4):
        logits = oracle(torch.tensor([[*prompt, *said] for said in likely])).logits[:, -1].detach()
        logits[:, WORDS] += 30.0
        following = (logits / temperature).softmax(-1)[:, WORDS].tolist()
        likely = {
            (*said, word): before * chance
            for (said, before), chances in zip(likely.items(), following, strict=True)
            for word, chance in zip(WORDS, chances, strict=True)
        }
    expected: Counter[tuple[int, ...]] = Counter()
    for said, chance in likely.items():
        expected[said[1:]] += chance * len(asked)  # type: ignore[assignment]
    frequent = {said: number for said, number in expected.items() if number >= 5}
    cells = [(seen[said], number) for said, number in frequent.items()]
    cells.append((len(asked) - sum(n for n, _ in cells), len(asked) - sum(frequent.values())))
    statistic = sum((number - mean) ** 2 / mean for number, mean in cells)
    freedom = len(cells) - 1
    assert freedom >= 5
    assert statistic < _quantile(freedom)


def _quantile(freedom: int) -> float:
    """Return the 0.999 quantile of the χ² distribution (Wilson and Hilferty)."""
    part = 2 / (9 * freedom)
    return freedom * (1 - part + 3.09 * math.sqrt(part)) ** 3


# ── what is guessed, and whether it pays ──


def test_ngram_drafts_continue_the_latest_earlier_occurrence() -> None:
    index, tokens = NgramIndex(), [1, 2, 3, 4, 5, 1, 2]
    assert index.find(tokens, 7) == (2, False)
    assert continuation(tokens, 7, 2, 8) == [3, 4, 5, 1, 2, 3, 4, 5]
    tokens += [3, 4]
    assert index.find(tokens, 9) == (4, True)
    tokens.append(9)
    assert index.find(tokens, 10) is None


def test_a_very_long_prompt_is_indexed_piece_by_piece() -> None:
    index, tokens = NgramIndex(), [*range(5000), 7, 8]
    assert index.find(tokens, 5002) is None
    assert index.find(tokens, 5002) == (9, False)


def test_chances_are_learned_from_what_came_also_without_a_draft() -> None:
    history = AcceptanceHistory()
    sequence = Sequence(make_submit(0, prompt_ids=[1, 2, 3] * 4), order=0, seed=0)
    for token in [1, 2, 3] * 6:
        assert history.propose(sequence, 4)[0] == token
        sequence.tokens.append(token)
    assert history.acceptance > 0.9
    for token in range(40, 60):
        sequence.tokens += [1, 2, 3, 1, token]
        history.propose(sequence, 4)
        sequence.tokens += [2, 3, 1, 2]
        history.propose(sequence, 4)
        sequence.tokens.append(token)
    assert history.acceptance < 0.7


def test_rows_cost_what_was_measured_until_steps_say_otherwise() -> None:
    model = StepTimeModel((0.01, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0))
    costs = RowCosts(model)
    costs.measured([0.1, 0.2, 0.3, 0.4])
    assert costs.sizes == (1, 2, 4, 8)
    assert costs.seconds(StepShape(1), 0) == pytest.approx(0.01)
    assert costs.seconds(StepShape(1), 7) == pytest.approx(0.04)
    assert costs.seconds(StepShape(3), 5) == pytest.approx(0.01 * 0.4 / 0.25)
    for _ in range(60):
        costs.observe(StepShape(8), 7, 0.12)
    assert costs.seconds(StepShape(1), 7) > 0.1
    assert costs.seconds(StepShape(1), 3) == pytest.approx(0.03, rel=0.01)


def test_nothing_is_drafted_where_rows_cost_as_much_as_they_bring(loops: Any, drafting: Any) -> None:
    loop = drafting()
    assert loop.scheduler.speculator is not None
    loop.scheduler.speculator.costs.measured([0.01 * size for size in (1, 2, 4, 8)])
    results = run_all(loop, [make_submit(0)])
    assert results[0].token_ids == run_all(loops.make(), [make_submit(0)])[0].token_ids
    assert loop.load().drafted_tokens_total == 0


def test_drafts_are_measured_before_the_first_request_and_leave_nothing_behind(loops: Any, drafting: Any) -> None:
    loop = drafting()
    loop.warm_up()
    assert loop.scheduler.speculator is not None
    assert loop.scheduler.speculator.costs.sizes[:4] == (1, 2, 4, 8)
    assert loop.scheduler.kv.pool.num_used == 0
    assert told(run_all(loop, [make_submit(0)])) == told(run_all(loops.make(), [make_submit(0)]))


def test_a_padded_batch_cannot_have_drafts() -> None:
    with pytest.raises(InvalidConfig, match="--speculate off"):
        EngineConfig(model="m", name="m", batching=Batching.PADDED, speculate=Speculate.NGRAM)
