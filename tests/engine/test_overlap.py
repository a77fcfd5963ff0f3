"""Overlapped scheduling plans a step while another one runs, and changes no output.

On a CPU the device has always finished. These tests check that the tokens of the running step are not read too
early."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.core_submits import core_submit

from moiety_engine.cache.block_pool import BlockPool
from moiety_engine.config import EngineConfig, Overlap, PolicyName
from moiety_engine.loop import EngineLoop
from moiety_engine.messages import CoreFinish, CoreOutput, CoreSubmit
from moiety_engine.scheduling.kv.kv_groups import KvGroups
from moiety_engine.scheduling.kv.kv_ledger import KvLedger
from moiety_engine.scheduling.kv.prefix_search import NO_HITS
from moiety_engine.scheduling.step_planner import StepPlanner
from moiety_engine.scheduling.step_time.step_time_model import StepTimeModel
from moiety_engine.sequence import PENDING, Sequence, SequenceState
from moiety_engine.startup import load_loop
from moiety_wire.engine_choices import Batching, LoadFormat
from moiety_wire.messages import FinishReason, Sampling, TokenRules

BLOCK_BYTES_8 = 2 * 2 * 2 * 16 * 8 * 4  # layers · (K, V) · heads · width · tokens · float32
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 11},
    {"temperature": 0.8, "top_p": 0.9, "seed": 12},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 1.1, "top_k": 20, "presence_penalty": 0.7, "frequency_penalty": 0.4, "seed": 13},
    {"temperature": 0.0, "num_logprobs": 2},
    {
        "temperature": 0.9,
        "logit_bias": {7: 6.0, 8: 6.0},
        "min_p": 0.02,
        "seed": 14,
        "token_rules": TokenRules(banned_runs=((7, 7), (8, 7, 8), (7, 8, 8))),
    },
]


def make_submit(key: int, *, length: int = 9, max_tokens: int = 20, **more: Any) -> CoreSubmit:
    submit = core_submit(
        key,
        [3 + (key * 31 + i * 7) % 300 for i in range(length)],
        max_tokens,
        sampling=Sampling(**KINDS[key % len(KINDS)]),
    )
    return msgspec.structs.replace(submit, **more)


class Answers:
    """The result of each request, in order of arrival."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[Any]] = {}
        self.finishes: dict[int, CoreFinish] = {}

    def take(self) -> list[CoreOutput]:
        step = self._loop.take_outputs()
        for output in step.outputs if step else []:
            assert output.key not in self.finishes, "news of a request that had ended"
            self.tokens.setdefault(output.key, []).extend(output.token_ids)
            self.logprobs.setdefault(output.key, []).extend(output.logprobs or [])
            if output.finish is not None:
                self.finishes[output.key] = output.finish
                assert output.finish.num_output_tokens == len(self.tokens[output.key])
        return step.outputs if step else []

    def steps(self, count: int) -> None:
        for _ in range(count):
            self._loop.step()
            self.take()

    def to_the_end(self) -> None:
        while self._loop.step():
            self.take()
        self.take()

    @property
    def result(self) -> dict[int, tuple[list[int], list[Any], FinishReason, str]]:
        return {
            key: (self.tokens[key], self.logprobs[key], finish.reason, finish.detail)
            for key, finish in self.finishes.items()
        }


def both(loops: Any, drive: Callable[[EngineLoop, Answers], None], **settings: Any) -> list[Answers]:
    """Return the loop's answers without overlap and with it."""
    answers = []
    for overlap in (Overlap.OFF, Overlap.ON):
        loop = loops.make(overlap=overlap, **settings)
        one = Answers(loop)
        drive(loop, one)
        one.to_the_end()
        assert loop.scheduler.idle
        assert loop.scheduler.kv.pool.num_used == 0
        answers.append(one)
    return answers


def stops_of(loops: Any, submits: list[CoreSubmit], at: int) -> list[CoreSubmit]:
    """Return the requests with a stop at each one's token number `at`, which a first run determines."""
    loop = loops.make()
    answers = Answers(loop)
    for submit in submits:
        loop.submit(submit)
    answers.to_the_end()
    return [msgspec.structs.replace(s, stop_token_ids=[answers.tokens[s.key][at]]) for s in submits]


@pytest.mark.parametrize("batching", list(Batching))
def test_every_kind_of_sampling_gives_the_same_tokens_and_logprobs(loops: Any, batching: Batching) -> None:
    def drive(loop: EngineLoop, answers: Answers) -> None:
        for key in range(8):
            loop.submit(make_submit(key, length=5 + 3 * key, max_tokens=6 + key))

    plain, overlapped = both(
        loops, drive, batching=batching, static_batch_size=3, max_batch_tokens=32, max_running=8, batch_timeout_ms=0.0
    )
    assert len(plain.result) == 8
    assert overlapped.result == plain.result


def test_steps_do_overlap_and_the_tokens_of_the_running_one_are_not_known(loops: Any) -> None:
    loop = loops.make(overlap=Overlap.ON)
    loop.submit(make_submit(0))
    answers = Answers(loop)
    answers.steps(1)
    (sequence,) = loop.scheduler.queues.by_key.values()
    assert answers.tokens == {}
    assert sequence.tokens[-1] == PENDING
    answers.steps(3)
    assert len(answers.tokens[0]) == 3
    assert sequence.tokens[-1] == PENDING
    assert sequence.num_output == 4


def test_the_extra_step_after_a_stop_token_is_neither_emitted_nor_billed(loops: Any) -> None:
    submits = stops_of(loops, [make_submit(key) for key in range(6)], at=4)

    def drive(loop: EngineLoop, answers: Answers) -> None:
        for submit in submits:
            loop.submit(submit)

    plain, overlapped = both(loops, drive)
    assert {finish.detail for finish in plain.finishes.values()} == {"stop_token"}
    assert overlapped.result == plain.result
    loop = loops.make(overlap=Overlap.ON)
    answers = Answers(loop)
    drive(loop, answers)
    answers.to_the_end()
    assert 0 < loop.scheduler.output_processor.tokens_past_stop_total <= len(submits)
    assert loop.scheduler.output_tokens_total == sum(map(len, answers.tokens.values()))
    assert loop.load().tokens_past_stop_total == loop.scheduler.output_processor.tokens_past_stop_total


def test_a_request_that_ends_by_length_has_no_extra_step_and_frees_its_blocks_early(
    loops: Any,
) -> None:
    loop = loops.make(overlap=Overlap.ON)
    answers = Answers(loop)
    loop.submit(make_submit(0, max_tokens=4))
    answers.steps(4)
    (sequence,) = loop.scheduler.queues.by_key.values()
    assert sequence.state is SequenceState.FINISHING
    assert loop.load().kv_blocks_used == 0
    loop.extend(0, 50, last=False)  # too late to matter
    answers.to_the_end()
    assert (answers.finishes[0].detail, len(answers.tokens[0])) == ("max_tokens", 4)
    assert (loop.steps_total, loop.scheduler.output_processor.tokens_past_stop_total) == (4, 0)


def test_nothing_is_computed_or_emitted_beyond_the_credit_however_it_comes(loops: Any) -> None:
    def drive(loop: EngineLoop, answers: Answers) -> None:
        for key in range(4):
            loop.submit(make_submit(key, credit_tokens=3))
        answers.steps(8)
        assert {len(tokens) for tokens in answers.tokens.values()} == {3}
        loop.extend(0, 20, last=False)
        loop.extend(1, 5, last=True)
        loop.extend(2, 3, last=True)
        answers.steps(1)
        loop.extend(3, 20, last=False)
        answers.steps(20)

    plain, overlapped = both(loops, drive)
    assert plain.finishes[1].detail == plain.finishes[2].detail == "credit_refused"
    assert [len(plain.tokens[key]) for key in range(4)] == [20, 5, 3, 20]
    assert overlapped.result == plain.result


def test_a_last_credit_that_comes_while_the_last_token_is_on_its_way_does_not_lose_it(loops: Any) -> None:
    loop = loops.make(overlap=Overlap.ON)
    answers = Answers(loop)
    loop.submit(make_submit(0, credit_tokens=3))
    answers.steps(3)
    assert len(answers.tokens[0]) == 2
    loop.extend(0, 3, last=True)
    answers.to_the_end()
    assert (answers.finishes[0].detail, len(answers.tokens[0])) == ("credit_refused", 3)


def test_an_abort_in_mid_flight_frees_the_blocks_at_once_and_counts_what_was_emitted(loops: Any) -> None:
    loop = loops.make(overlap=Overlap.ON)
    answers = Answers(loop)
    loop.submit(make_submit(0))
    loop.submit(make_submit(1))
    answers.steps(5)
    loop.abort(0)
    assert loop.load().kv_blocks_used == len(loop.scheduler.queues.by_key[1].kv.blocks)
    answers.take()
    assert answers.finishes[0].num_output_tokens == 4
    answers.to_the_end()
    alone = loops.make()
    expected = Answers(alone)
    alone.submit(make_submit(1))
    expected.to_the_end()
    assert answers.tokens[1] == expected.tokens[1]


def test_preempted_requests_get_the_tokens_of_an_undisturbed_run(loops: Any) -> None:
    submits = [make_submit(key, length=20 + 9 * key, max_tokens=24) for key in range(5)]
    expected: dict[Any, Any] = {}
    for submit in submits:
        loop = loops.make(prefix_caching=False)
        answers = Answers(loop)
        loop.submit(submit)
        answers.to_the_end()
        expected |= answers.result
    preempted = []

    def drive(loop: EngineLoop, answers: Answers) -> None:
        for submit in submits:
            loop.submit(submit)
        while not loop.scheduler.idle:
            answers.steps(1)
            preempted.append(sum(s.timeline.num_preemptions for s in loop.scheduler.queues.by_key.values()))

    for host_bytes in (0, 40 * BLOCK_BYTES_8):
        for answers in both(
            loops,
            drive,
            kv_memory_bytes=15 * BLOCK_BYTES_8,
            host_kv_memory_bytes=host_bytes,
            max_batch_tokens=64,
            max_context_tokens=100,
            policy=PolicyName.FCFS,
        ):
            assert answers.result == expected
        assert max(preempted) > 0


@given(
    arrivals=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40), st.integers(1, 12)), min_size=1, max_size=7),
    abort_at=st.lists(st.integers(0, 20), max_size=3),
    budget=st.integers(8, 48),
)
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_each_answer_in_a_changing_batch_is_a_prefix_of_the_answer_alone(
    loops: Any, arrivals: list[tuple[int, int, int]], abort_at: list[int], budget: int
) -> None:
    submits = [make_submit(k, length=n, max_tokens=m) for k, (_, n, m) in enumerate(arrivals)]
    alone = Answers(loops.make())
    for submit in submits:
        alone._loop.submit(submit)
    alone.to_the_end()
    loop = loops.make(overlap=Overlap.ON, max_batch_tokens=budget, max_running=4)
    answers = Answers(loop)
    for at, (delay, _, _) in enumerate(arrivals):
        loop.submit(submits[at])
        answers.steps(delay)
        if at in abort_at:
            loop.abort(at)
    answers.to_the_end()
    assert set(answers.finishes) == set(alone.finishes)
    for key, finish in answers.finishes.items():
        if finish.reason is FinishReason.ABORT:
            assert answers.tokens.get(key, []) == alone.tokens[key][: len(answers.tokens.get(key, []))]
        else:
            assert answers.result[key] == alone.result[key]


def test_embeddings_come_one_step_later_and_are_the_same(loops: Any) -> None:
    def drive(loop: EngineLoop, answers: Answers) -> None:
        for key in range(3):
            loop.submit(make_submit(key, length=5 + key, max_tokens=0, credit_tokens=0, embed=True))
        loop.submit(make_submit(3))

    plain, overlapped = both(loops, drive)
    vectors = [[a.finishes[key].embedding for key in range(3)] for a in (plain, overlapped)]
    assert vectors[0] == vectors[1]
    assert all(vectors[0])
    assert overlapped.result == plain.result


def test_a_block_is_not_hashed_before_all_of_its_tokens_are_known() -> None:
    kv = KvLedger(BlockPool(8), 4, prefix_caching=True)
    sequence = Sequence(make_submit(0, length=7), order=0, seed=0)
    assert kv.start(sequence, NO_HITS, 8)
    sequence.expect_token(0)
    planner = StepPlanner(KvGroups([kv]), 64, StepTimeModel())
    assert planner.add_prefill(sequence, 8)  # as after a preemption: it is recomputed
    assert not planner.will_compute(b"what another sequence has there", 0)
    assert not planner.will_compute(b"what another sequence has there", 1)
    sequence.fill_token(5, 0.0)
    fresh = Sequence(make_submit(0, length=7), order=0, seed=0)
    fresh.tokens.append(5)
    assert sequence.block_hashes.at(1, 4) == fresh.block_hashes.at(1, 4)


def test_a_step_fills_the_blocks_of_its_prefills_in_their_group_alone() -> None:
    groups = KvGroups([KvLedger(BlockPool(8), 4, prefix_caching=True) for _ in range(2)])
    planner = StepPlanner(groups, 64, StepTimeModel())
    first, second = (Sequence(make_submit(key, length=11), order=key, seed=0) for key in range(2))
    hashes = [first.block_hashes.at(index, 4) for index in range(2)]
    assert groups.first.start(first, NO_HITS, 11)
    assert not planner.will_compute(hashes[0], 0), "nothing is planned yet"
    assert planner.add_prefill(first, 11)
    assert [planner.will_compute(block_hash, index) for index, block_hash in enumerate(hashes)] == [True, True]
    assert not planner.will_compute(hashes[0], 0, group=1)
    other = second.block_hashes.at(0, 4)
    assert not planner.will_compute(other, 0), "the second sequence is not in the step"
    assert groups.first.start(second, NO_HITS, 11)
    assert planner.add_prefill(second, 11)
    assert planner.will_compute(other, 0)
    assert not planner.will_compute(first.block_hashes.at(1, 4), 2)


def test_a_dummy_model_needs_no_weights_and_serves_the_same_with_overlap(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    results = []
    for overlap in (Overlap.OFF, Overlap.ON):
        config = EngineConfig(
            model=str(tmp_path), name="d", device="cpu", load_format=LoadFormat.DUMMY, overlap=overlap
        )
        loop = load_loop(config)
        answers = Answers(loop)
        for key in range(5):
            loop.submit(make_submit(key))
        answers.to_the_end()
        results.append(answers.result)
    assert results[0] == results[1]
    assert len({tuple(tokens) for tokens, *_ in results[0].values()}) == 5, "the weights say nothing"
