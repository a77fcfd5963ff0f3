"""Batch invariance: a request has the same tokens and log-probabilities, bit for bit, alone and in any batch.

Prompts are chunked and requests preempted. On a CPU this holds with `--batch-invariant` and without; the path of the
option through scheduler and runner is the same as on a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

from moiety_engine.cache.block_pool import BlockPool
from moiety_engine.config import EngineConfig, PolicyName
from moiety_engine.errors import InvalidConfig
from moiety_engine.loop import EngineLoop
from moiety_engine.messages import CoreSubmit
from moiety_engine.model.arithmetic import cannot_be_invariant
from moiety_engine.model.errors import UnsupportedModelError
from moiety_engine.model.loading import load_model
from moiety_engine.offline import run_all
from moiety_engine.runner.inputs import BatchBuilder
from moiety_engine.scheduling.admission.batching_strategies import STRATEGIES
from moiety_engine.scheduling.kv.kv_ledger import KvLedger
from moiety_engine.scheduling.limits import SchedulerLimits
from moiety_engine.scheduling.plan import Chunk, Plan
from moiety_engine.scheduling.scheduler import Scheduler
from moiety_engine.sequence import Sequence
from moiety_wire.classes import STANDARD
from moiety_wire.engine_choices import Batching
from moiety_wire.messages import Sampling

GPU = pytest.param(("cuda", True), marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))
FEW_BLOCKS = 40  # for all requests: too few, so that some are recomputed


def make_submit(key: int, length: int, max_tokens: int = 24, **sampling: Any) -> CoreSubmit:
    prompt = [3 + (key * 31 + i * 7) % 300 for i in range(length)]
    asked = Sampling(**({"temperature": 0.0, "num_logprobs": 2} | sampling))
    return CoreSubmit(key, "t", STANDARD, prompt, asked, max_tokens, 0, [], max_tokens, b"s", 0)


SUBMITS = [make_submit(key, 5 + 13 * key) for key in range(5)]
SUBMITS += [make_submit(key, 20 + key, temperature=0.9, top_p=0.9, seed=key) for key in range(5, 8)]


@pytest.fixture(scope="module", params=[("cpu", False), ("cpu", True), GPU], ids=["cpu", "cpu, flag", "cuda, flag"])
def invariant_loops(request: Any, checkpoint: Any, loops: Any) -> Iterator[Any]:
    device, flag = request.param
    dtype = "float32" if device == "cpu" else "bfloat16"
    yield type(loops)(checkpoint, device, dtype, batch_invariant=flag)


def answers(loop: EngineLoop, submits: list[CoreSubmit]) -> tuple[dict[int, Any], int]:
    """Return tokens and log-probabilities of each request, bit for bit, and the number of recomputed tokens."""
    results = run_all(loop, submits)
    again = sum(one.finish.num_recomputed_tokens for one in results.values() if one.finish)
    found = {
        key: (one.token_ids, [(p.logprob, p.top_ids, p.top_logprobs) for p in one.logprobs])
        for key, one in results.items()
    }
    return found, again


def test_the_same_bits_alone_in_a_batch_cut_otherwise_and_after_a_preemption(invariant_loops: Any) -> None:
    alone: dict[Any, Any] = {}
    for submit in SUBMITS:
        alone |= answers(invariant_loops.make(prefix_caching=False), [submit])[0]
    assert all(len(tokens) == len(logprobs) == 24 for tokens, logprobs in alone.values())
    together, _ = answers(invariant_loops.make(), SUBMITS)
    assert together == alone
    cut, _ = answers(invariant_loops.make(max_batch_tokens=11, max_running=5), SUBMITS)
    assert cut == alone
    block_bytes = invariant_loops.model.kv_bytes_per_block(4)
    few, recomputed = answers(
        invariant_loops.make(
            kv_memory_bytes=FEW_BLOCKS * block_bytes, block_size=4, max_batch_tokens=32, max_running=6,
            policy=PolicyName.FCFS, prefix_caching=False,
        ),
        SUBMITS,
    )  # fmt: skip
    assert few == alone
    assert recomputed > 0


def test_a_request_that_continues_elsewhere_gets_the_bits_of_an_undisturbed_run(invariant_loops: Any) -> None:
    submit = SUBMITS[3]
    whole, _ = answers(invariant_loops.make(), [submit])
    begun = whole[submit.key][0][:9]
    rest, _ = answers(
        invariant_loops.make(), [msgspec.structs.replace(submit, resumed_ids=begun), SUBMITS[5], SUBMITS[6]]
    )
    assert rest[submit.key] == tuple(part[9:] for part in whole[submit.key])


def test_an_answer_is_a_cached_prefix_of_the_next_prompt_only_where_bits_may_depend_on_it(loops: Any) -> None:
    first = make_submit(0, 10)
    for flag, hits in ((False, 6), (True, 2)):
        loop = type(loops)(loops.folder, batch_invariant=flag).make(block_size=4)
        tokens = answers(loop, [first])[0][0][0]
        follow_up = msgspec.structs.replace(first, key=1, prompt_ids=first.prompt_ids + tokens[:16])
        answers(loop, [follow_up])
        assert loop.load().cached_tokens_total == 4 * hits
        again = msgspec.structs.replace(first, key=2)
        assert answers(loop, [again])[0][2][0] == tokens


def sequence_of(num_prompt: int, num_answer: int, num_computed: int, first_block: int) -> Sequence:
    sequence = Sequence(make_submit(0, num_prompt), order=0, seed=0)
    sequence.tokens += range(100, 100 + num_answer)
    sequence.kv.num_computed = num_computed
    sequence.kv.blocks = list(range(first_block, first_block + -(-(num_prompt + num_answer) // 4)))
    return sequence


def test_tokens_of_answers_attend_as_decodes_do_and_those_of_prompts_as_chunks() -> None:
    decoding, again = sequence_of(3, 2, 4, 0), sequence_of(5, 3, 2, 10)
    prompt, last = sequence_of(9, 0, 0, 20), sequence_of(6, 0, 5, 30)
    chunks = [Chunk(decoding, 1, True), Chunk(again, 6, True), Chunk(prompt, 7, False), Chunk(last, 1, True)]
    host = BatchBuilder(4, torch.device("cpu"), answers_apart=True).arrange(Plan(chunks, 1, 15, []))
    assert host.num_decode == 4  # one decodes, three of an answer are computed again
    assert host.positions_T.tolist() == [4, 5, 6, 7, 2, 3, 4, *range(7), 5]
    assert host.token_ids_T[:4].tolist() == [101, 100, 101, 102]
    assert host.context_len_S.tolist() == [5, 6, 7, 8, 5, 7, 6]
    assert host.query_start_S1.tolist() == [0, 1, 2, 3, 4, 7, 14, 15]
    assert host.wanted_rows_L.tolist() == [0, 3, 14]
    assert host.slots_T[:7].tolist() == [4, 45, 46, 47, 42, 43, 44]


def test_no_step_takes_more_tokens_of_answers_than_the_largest_that_was_measured() -> None:
    ledger = KvLedger(BlockPool(26), 4, prefix_caching=False, answers_apart=True)
    scheduler = Scheduler(ledger, SchedulerLimits(64, 4), STRATEGIES[Batching.CONTINUOUS])
    for key in range(4):
        scheduler.add(make_submit(key, 4, 60), seed=0, now_ns=0)
    most = recomputed = 0
    for step in range(2000):
        plan = scheduler.plan(step)
        if scheduler.idle:
            break
        answers_of = [
            max(
                0,
                c.sequence.kv.num_computed
                + c.num_tokens
                - max(c.sequence.kv.num_computed, c.sequence.request.num_prompt),
            )
            for c in plan.chunks
        ]
        most = max(most, sum(answers_of))
        recomputed += sum(answers_of[plan.num_decode :])
        count = sum(chunk.samples for chunk in plan.chunks)
        scheduler.commit(plan, [7] * count, [None] * count, step)
    assert scheduler.idle
    assert recomputed > 0
    assert most <= 4


def test_settings_without_invariant_kernels_are_refused_with_advice(checkpoint: Any, loops: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=r"--moe-kernel reference depend .* leave --moe-kernel out"):
        load_model(checkpoint, device="cpu", dtype="float32", moe_kernel="reference", batch_invariant=True)
    with pytest.raises(InvalidConfig, match="batch_invariant is not available with padded batching"):
        EngineConfig(model="m", name="m", batching=Batching.PADDED, batch_invariant=True)
    spec, cuda = loops.model.spec, torch.device("cuda")
    assert "--dtype bfloat16" in str(cannot_be_invariant(spec, cuda, torch.float32, None, "auto"))
    assert "--moe-kernel grouped" in str(cannot_be_invariant(spec, cuda, torch.bfloat16, None, "grouped"))
    odd = dataclasses.replace(spec, hidden_size=40)
    assert "widths that are multiples of 16" in str(
        cannot_be_invariant(odd, torch.device("cpu"), torch.float32, None, "auto")
    )
