"""Profiles of experts that an engine reports: of each request's decoded tokens and of its recent steps."""

from __future__ import annotations

from typing import Any

import pytest

from moiety_engine.config import EngineConfig, Overlap
from moiety_engine.errors import InvalidConfig
from moiety_engine.expert_profiler import SKETCH_BITS, STEPS_PER_SAMPLE, sketch_layers
from moiety_engine.loop import EngineLoop
from moiety_engine.loop_setup import build_loop
from moiety_engine.messages import CoreSubmit
from moiety_engine.offline import run_all
from moiety_wire.classes import STANDARD
from moiety_wire.expert_profile import ExpertProfile
from moiety_wire.messages import Sampling

NUM_OUTPUT = 4 * STEPS_PER_SAMPLE + 2


def submit(key: int, num_prompt: int = 8, output: int = NUM_OUTPUT) -> CoreSubmit:
    prompt = [(key * 31 + i * 7) % 300 + 1 for i in range(num_prompt)]
    return CoreSubmit(key, "a", STANDARD, prompt, Sampling(temperature=0.0), output, 0, [], output, b"s", 0)


def loop_of(loops: Any, *, profiles: bool = True, batching: bool = False) -> EngineLoop:
    config = EngineConfig(
        model=str(loops.folder), name="tiny", expert_profiles=profiles, expert_batching=batching, overlap=Overlap.OFF
    )
    return build_loop(loops.model, config)


@pytest.mark.parametrize(
    ("num_layers", "num_words", "expected"),
    [(4, 1, [0, 1, 2, 3]), (48, 2, [3, 9, 15, 21, 27, 33, 39, 45]), (58, 4, [7, 21, 36, 50]), (3, 40, [1])],
)
def test_as_many_layers_count_as_fit_a_sketch(num_layers: int, num_words: int, expected: list[int]) -> None:
    assert sketch_layers(num_layers, num_words) == expected
    assert len(expected) * num_words * 64 <= SKETCH_BITS or len(expected) == 1


def test_a_request_reports_the_experts_of_its_decoded_tokens(loops: Any) -> None:
    finish = run_all(loop_of(loops), [submit(0)])[0].finish
    assert finish is not None
    profile = ExpertProfile.unpack(finish.expert_profile)
    shape = loops.model.experts
    counts = profile.counts(64 * len(shape.layers))
    assert profile.num_samples == (NUM_OUTPUT - 1) // STEPS_PER_SAMPLE
    assert sum(counts) == profile.num_samples * shape.top_k * len(shape.layers)
    for layer in range(len(shape.layers)):
        of_layer = counts[64 * layer : 64 * (layer + 1)]
        assert sum(of_layer) == profile.num_samples * shape.top_k
        assert not any(of_layer[shape.num_experts :])


def test_the_profile_of_recent_steps_is_the_union_of_their_requests(loops: Any) -> None:
    loop = loop_of(loops, batching=True)
    for key in (0, 1):
        loop.submit(submit(key, output=50))
    while not loop.load().active_experts:
        loop.step()
    active = ExpertProfile.unpack(loop.load().active_experts)
    union = 0
    for sequence in loop.scheduler.queues.by_key.values():
        union |= sequence.experts.predicted  # of the newest token, as the sample has just been taken
    assert active.num_samples == 1
    assert active.planes[0] == union
    assert len(loop.load().active_experts) < 700


def test_an_idle_engine_reports_no_active_experts(loops: Any) -> None:
    loop = loop_of(loops)
    run_all(loop, [submit(0)])
    assert loop.load().active_experts == b""


def test_nothing_is_reported_without_the_option(loops: Any) -> None:
    loop = loop_of(loops, profiles=False, batching=True)
    loop.submit(submit(0))
    for _ in range(2 * STEPS_PER_SAMPLE):
        loop.step()
    assert loop.load().active_experts == b""
    (sequence,) = loop.scheduler.queues.by_key.values()
    assert sequence.experts.predicted and sequence.experts.profile is None


def test_a_model_without_experts_refuses_the_option(sketch_loops: Any) -> None:
    config = EngineConfig(model=str(sketch_loops.folder), name="dense", expert_profiles=True)
    with pytest.raises(InvalidConfig, match="--expert-profiles"):
        build_loop(sketch_loops.model, config)
