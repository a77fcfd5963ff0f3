"""The encoder's step loop: budgets, fairness, aborts, values that are not finite, and refused options."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from tests.core_submits import core_submit

from moiety_engine.config import EngineConfig
from moiety_engine.encoder.input_queue import EncoderQueue
from moiety_engine.encoder.loop import EncoderLoop
from moiety_engine.encoder.startup import load_encoder_loop
from moiety_engine.errors import InvalidConfig
from moiety_engine.messages import CoreSubmit
from moiety_wire.classes import ServiceClass
from moiety_wire.messages import FailureCode, FinishReason, Sampling
from moiety_wire.trace_events import Reason

from .conftest import SaveEncoder

STANDARD = ServiceClass("standard", 1, ttft_s=1.0)


def submit(key: int, num_tokens: int = 4, **changes: Any) -> CoreSubmit:
    made = core_submit(
        key, [key % 90 + 1] * num_tokens, 0, service=STANDARD, sampling=Sampling(), cache_salt=b"", embed=True
    )
    return msgspec.structs.replace(made, **changes)


@pytest.fixture
def new_loop(save_encoder: SaveEncoder) -> Callable[..., EncoderLoop]:
    folder, _ = save_encoder()

    def new(**options: Any) -> EncoderLoop:
        return load_encoder_loop(EngineConfig(model=str(folder), name="bert", device="cpu", **options))

    return new


def ended_keys(loop: EncoderLoop) -> list[int]:
    step = loop.take_outputs()
    return [] if step is None else [output.key for output in step.outputs]


def test_a_step_takes_whole_inputs_up_to_the_token_budget_and_each_ends_once(
    new_loop: Callable[..., EncoderLoop],
) -> None:
    loop = new_loop(max_batch_tokens=10)
    for key, size in enumerate((4, 4, 4, 20, 1)):
        loop.submit(submit(key, size))
    steps = []
    while loop.step():
        steps.append(ended_keys(loop))
    assert steps == [[0, 1], [2], [3], [4]]
    load = loop.load()
    assert (load.num_waiting, load.prompt_tokens_total, load.steps_total, load.requests_total) == (0, 33, 4, 5)


def test_an_end_has_a_unit_vector_and_the_admission_comes_first(new_loop: Callable[..., EncoderLoop]) -> None:
    loop = new_loop()
    loop.submit(submit(7))
    assert loop.step()
    step = loop.take_outputs()
    assert step is not None and [admission.key for admission in step.admissions] == [7]
    (output,) = step.outputs
    assert output.finish is not None and output.finish.reason is FinishReason.STOP
    vector = struct.unpack("<32f", output.finish.embedding)
    assert sum(one * one for one in vector) == pytest.approx(1.0, abs=1e-5)


def test_a_waiting_input_can_be_aborted_and_a_generation_is_refused(new_loop: Callable[..., EncoderLoop]) -> None:
    loop = new_loop()
    loop.submit(submit(1))
    loop.abort(1, FinishReason.ABORT)
    loop.submit(submit(2, embed=False, max_tokens=5))
    assert not loop.step()
    step = loop.take_outputs()
    assert step is not None
    assert [(one.key, one.finish and one.finish.reason) for one in step.outputs] == [(1, FinishReason.ABORT)]
    assert [(one.key, one.code) for one in step.failures] == [(2, FailureCode.INVALID_REQUEST)]


def test_values_that_are_not_finite_fail_only_their_own_input(new_loop: Callable[..., EncoderLoop]) -> None:
    loop = new_loop()
    loop.network._weights["embeddings.word_embeddings.weight"][50] = float("nan")
    loop.submit(submit(1))
    loop.submit(submit(2, prompt_ids=[50, 50]))
    loop.step()
    step = loop.take_outputs()
    assert step is not None
    assert [one.key for one in step.outputs] == [1]
    assert [(one.key, one.code) for one in step.failures] == [(2, FailureCode.NON_FINITE)]


def test_tenants_share_steps_by_their_weights_and_better_classes_come_first() -> None:
    queue = EncoderQueue()
    urgent = ServiceClass("urgent", 0, ttft_s=1.0)
    for key in range(6):
        queue.append(submit(key, tenant_id="many"))
    queue.append(submit(10, tenant_id="few", tenant_weight=2.0))
    queue.append(submit(11, tenant_id="few", tenant_weight=2.0))
    queue.append(submit(20, service=urgent))
    taken = [queue.take(4, 1, 0)[0].key for _ in range(9)]
    assert taken[0] == 20
    assert {10, 11} <= set(taken[1:5])  # the tenant with many inputs waits for its turns
    assert taken[5:] == [2, 3, 4, 5]
    assert not len(queue)


def test_an_input_that_has_waited_its_classes_longest_wait_is_next() -> None:
    queue = EncoderQueue()
    queue.append(submit(1, service=ServiceClass("slow", 5, ttft_s=1.0, max_queue_s=10.0)))
    queue.append(submit(2, tenant_id="other", arrival_unix_ns=11 * 10**9))
    assert queue.take(4, 1, 5 * 10**9)[0].key == 2
    queue.append(submit(3, tenant_id="other", arrival_unix_ns=11 * 10**9))
    assert queue.take(4, 1, 11 * 10**9)[0].key == 1


def test_a_full_queue_refuses_inputs_and_leaves_room_for_other_tenants(new_loop: Callable[..., EncoderLoop]) -> None:
    loop = EncoderLoop(new_loop().network, queue=EncoderQueue(max_waiting=12))
    tenants = {key: f"tenant {key % 5 if key >= 20 else 0}" for key in range(40)}
    for key, tenant in tenants.items():
        loop.submit(submit(key, tenant_id=tenant))
    assert loop.load().num_waiting == 12
    step = loop.take_outputs()
    assert step is not None
    assert {one.code for one in step.failures} == {FailureCode.OVERLOADED}
    assert {one.reason for one in step.failures} == {Reason.TENANT_QUEUE_FULL, Reason.QUEUE_FULL}
    refused = {one.key for one in step.failures}
    assert {tenants[key] for key in tenants.keys() - refused} == set(tenants.values())
    (load,) = loop.load().classes
    assert sum(load.rejected_total.values()) == len(refused) == 40 - 12
    while loop.step():
        pass
    assert set(ended_keys(loop)) == tenants.keys() - refused
    loop.submit(submit(50))
    assert loop.load().num_waiting == 1


def test_the_tokens_of_waiting_inputs_are_bounded_but_one_input_always_fits() -> None:
    queue = EncoderQueue(max_tokens=100)
    long = submit(1, 400)
    assert queue.find_refusal(long) is None
    queue.append(long)
    assert queue.find_refusal(submit(2, 4)) is Reason.TENANT_QUEUE_FULL
    assert queue.find_refusal(submit(3, 4, tenant_id="other")) is Reason.QUEUE_FULL
    assert queue.take(4, 1, 0) == [long]
    assert queue.find_refusal(submit(2, 4)) is None


def test_a_more_critical_input_displaces_the_newest_of_the_least_critical(
    new_loop: Callable[..., EncoderLoop],
) -> None:
    loop = EncoderLoop(new_loop().network, queue=EncoderQueue(max_waiting=3))
    slow = ServiceClass("slow", 5, ttft_s=1.0)
    for key, (tenant, service) in enumerate([("a", slow), ("b", slow), ("c", STANDARD), ("d", slow), ("e", STANDARD)]):
        loop.submit(submit(key, tenant_id=tenant, service=service))
    step = loop.take_outputs()
    assert step is not None
    assert [(one.key, one.reason) for one in step.failures] == [(3, Reason.QUEUE_FULL), (0, Reason.SHED)]
    while loop.step():
        pass
    assert sorted(ended_keys(loop)) == [1, 2, 4]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"tp": 2}, "--tp"),
        ({"batch_invariant": True}, "--batch-invariant"),
        ({"quantization": "int8"}, "--quantization"),
        ({"disk_cache": "x"}, "--disk-cache"),
        ({"adapters": {"a": "b"}}, "--adapter"),
    ],
)
def test_options_that_encoders_lack_are_refused_at_the_start(
    new_loop: Callable[..., EncoderLoop], options: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidConfig, match=f"{named}.*not available for encoder models"):
        new_loop(**options)
