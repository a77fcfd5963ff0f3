"""Division of decodes and prompts among the steps that are in a pipeline at once."""

from __future__ import annotations

from collections import deque

from hypothesis import given
from hypothesis import strategies as st
from tests.core_submits import core_submit

from moiety_engine.scheduling.limits import SchedulerLimits
from moiety_engine.scheduling.pipeline_division import PipelineDivision
from moiety_engine.scheduling.plan import Chunk
from moiety_engine.scheduling.queues.request_queues import RequestQueues
from moiety_engine.scheduling.step_time.step_time_model import StepTimeModel
from moiety_engine.sequence import Sequence
from moiety_wire.classes import BATCH, PRIORITY

BY_ROWS = StepTimeModel((0.01, 0.1, 0.0, 0.0, 0.0, 0.0, 0.0))
BY_CONTEXT = StepTimeModel((0.01, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0))


def division_of(steps_in_flight: int, step_time: StepTimeModel = BY_ROWS) -> PipelineDivision:
    limits = SchedulerLimits(1024, 64, steps_in_flight=steps_in_flight, min_chunk_tokens=128)
    return PipelineDivision(RequestQueues(), step_time, limits)


def decoding(queues: RequestQueues, contexts: list[int]) -> list[Sequence]:
    """Return running sequences that lack only their newest token."""
    sequences = []
    for key, context in enumerate(contexts):
        service = PRIORITY if key % 5 == 0 else BATCH
        submit = core_submit(key, [1] * context, 1000, service=service)
        sequence = Sequence(submit, order=key, seed=0)
        queues.add(sequence)
        sequence.tokens.append(2)
        sequence.kv.num_computed = context
        queues.run(sequence)
        sequences.append(sequence)
    return sequences


@given(st.integers(2, 4), st.integers(1, 40))
def test_equal_decodes_are_divided_evenly_and_all_are_in_flight(num_steps: int, count: int) -> None:
    division = division_of(num_steps)
    queues = division._queues
    decoding(queues, [10] * count)
    sizes = []
    for _ in range(num_steps):
        chosen = division.decodes_of_step(list(queues.decoding.values()))
        sizes.append(len(chosen))
        for chunk in chosen:
            queues.verify(chunk.sequence)
    assert sum(sizes) == count
    assert max(sizes) <= -(-count // num_steps) + 1e-9
    assert not queues.decoding


@given(st.integers(2, 4), st.lists(st.integers(1, 500), min_size=1, max_size=30), st.booleans())
def test_no_decode_waits_for_more_steps_than_are_in_flight(num_steps: int, contexts: list[int], rows: bool) -> None:
    division = division_of(num_steps, BY_ROWS if rows else BY_CONTEXT)
    queues = division._queues
    decoding(queues, contexts)
    flights: deque[list[Chunk]] = deque()
    last_planned = dict.fromkeys(queues.decoding, 0)
    for number in range(1, 6 * num_steps):
        if len(flights) == num_steps:
            for chunk in flights.popleft():
                queues.verified(chunk.sequence)
                last_planned[chunk.sequence] = number - 1  # free again from this step on
        chosen = division.decodes_of_step(list(queues.decoding.values()))
        for chunk in chosen:
            queues.verify(chunk.sequence)
        flights.append(chosen)
        assert all(number - last_planned[sequence] < num_steps for sequence in queues.decoding)


def test_work_counts_contexts_where_they_take_the_time() -> None:
    division = division_of(2, BY_CONTEXT)
    queues = division._queues
    long, *short = decoding(queues, [400, 100, 100, 100, 100])
    first = [chunk.sequence for chunk in division.decodes_of_step(list(queues.decoding.values()))]
    assert first == [long]
    queues.verify(long)
    assert [chunk.sequence for chunk in division.decodes_of_step(list(queues.decoding.values()))] == short


def test_a_better_class_comes_first() -> None:
    division = division_of(3)
    queues = division._queues
    sequences = decoding(queues, [10] * 6)  # the first and the last are of the better class
    chosen = [chunk.sequence for chunk in division.decodes_of_step(list(queues.decoding.values()))]
    assert chosen == [sequences[0], sequences[5]]


def test_a_prompt_is_cut_into_parts_for_all_stages_but_not_into_small_ones() -> None:
    division = division_of(2)
    submits = [core_submit(0, [1] * 1200, 4), core_submit(1, [1] * 100, 4)]
    for order, submit in enumerate(submits):
        division._queues.add(Sequence(submit, order=order, seed=0))
    assert division.max_prefill_rows() == 1300 // 4
    few, many, alone = division_of(2), division_of(2), division_of(1)
    few._queues.add(Sequence(core_submit(0, [1] * 40, 4), order=0, seed=0))
    assert few.max_prefill_rows() == 128
    many._queues.add(Sequence(core_submit(0, [1] * 9000, 4), order=0, seed=0))
    assert many.max_prefill_rows() == alone.max_prefill_rows() == 1024
