"""The tiles of the grouped products: what may be chosen fits the GPU, and the choice follows the rows per expert."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moiety_kernels.gpu.targets import GFX942, H200, SM_80, DeviceModel
from moiety_kernels.grouped_gemm.tile_cost_model import (
    LATENCY_S,
    Problem,
    Scales,
    TileConfig,
    Weights,
    bytes_on_their_way,
    candidates,
    choose,
    expected_tiles,
    seconds,
    shared_bytes,
)

A100 = replace(H200, name="an A100", target=SM_80, num_sms=108, memory_bytes_per_s=1.7e12, flops_bf16=250e12)
MI300X = replace(H200, name="an MI300X", target=GFX942, num_sms=304)
DEVICES = (H200, A100, MI300X)
SHAPES = {  # experts, top-k, model width, expert width
    "Mixtral-8x7B": (8, 2, 4096, 14336),
    "OLMoE": (64, 8, 2048, 1024),
    "Qwen3-30B-A3B": (128, 8, 2048, 768),
    "Qwen3-235B": (128, 8, 4096, 1536),
    "GLM-4.5-Air": (128, 8, 4096, 1408),
    "DeepSeek-V3": (256, 8, 7168, 2048),
    "gpt-oss-20b": (32, 4, 2880, 2880),
}
# Of weights.
KINDS: tuple[tuple[Weights, Scales], ...] = (
    ("wide", "none"),
    ("int8", "row"),
    ("fp8", "row"),
    ("fp8", "block"),
    ("int4", "group"),
    ("mxfp4", "group"),
)  # of weights
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 16384, 65536)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    experts = draw(st.integers(1, 512))
    top_k = draw(st.integers(1, min(experts, 16)))
    width, hidden = draw(st.integers(1, 16384)), draw(st.integers(1, 16384))
    size, invariant = draw(st.sampled_from((2, 4))), draw(st.booleans())
    tokens, kinds = draw(st.integers(1, 100_000)), draw(st.sampled_from(KINDS))
    return Problem(experts, top_k, width, hidden, tokens, size, invariant, *kinds)


@given(problem=problems(), device=st.sampled_from(DEVICES))
def test_the_chosen_tile_is_a_candidate_and_candidates_fit_the_device(problem: Problem, device: DeviceModel) -> None:
    allowed = candidates(problem, device)
    assert choose(problem, device) in allowed
    for config in (one for one in allowed if one.BM > 1):
        for block, gated in ((config.up, True), (config.down, False)):
            shared = shared_bytes(config, block, problem, gated=gated)
            assert shared * block.per_sm <= device.target.max_shared_bytes


@given(problem=problems(), device=st.sampled_from(DEVICES))
def test_for_invariant_results_all_candidates_sum_in_the_same_steps(problem: Problem, device: DeviceModel) -> None:
    configs = candidates(replace(problem, invariant=True), device)
    assert len({block.BK for config in configs for block in (config.up, config.down)}) == 1
    assert all(config.BM > 1 for config in configs)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_tiles_grow_with_the_rows_an_expert_has(shape: tuple[int, int, int, int]) -> None:
    chosen = [choose(Problem(*shape, tokens), H200) for tokens in TOKENS]
    assert all(before.BM <= after.BM for before, after in pairwise(chosen))
    assert chosen[0].BM == 1
    assert chosen[-1].BM == 128
    assert chosen[-1].up.BN == 128


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_predicted_times_rise_with_tokens_and_stay_above_the_floor(shape: tuple[int, int, int, int]) -> None:
    def predicted(tokens: int) -> tuple[float, float]:
        problem = Problem(*shape, tokens)
        weights = problem.active_experts * 6 * problem.width * problem.hidden
        floor = max(
            weights / H200.memory_bytes_per_s, 6 * problem.rows * problem.width * problem.hidden / H200.flops_bf16
        )
        return seconds(problem, choose(problem, H200), H200), floor

    times = [predicted(tokens) for tokens in TOKENS]
    assert all(time > floor for time, floor in times)
    assert all(before[0] < after[0] for before, after in pairwise(times))


@pytest.mark.parametrize(
    ("experts", "rows", "height"), [(128, 512, 16), (8, 2048, 128), (64, 64, 16), (128, 32768, 128)]
)
def test_expected_tiles_are_those_of_drawn_rows(experts: int, rows: int, height: int) -> None:
    draws, generator = 40, random.Random(0)
    drawn = 0
    for _ in range(draws):
        counts = [0] * experts
        for _ in range(rows):
            counts[generator.randrange(experts)] += 1
        drawn += sum(-(-count // height) for count in counts)
    assert expected_tiles(Problem(experts, 1, 64, 64, rows), height) == pytest.approx(drawn / draws, rel=0.03)


def test_names_tell_configurations_apart() -> None:
    configs: list[TileConfig] = [
        *candidates(Problem(8, 2, 64, 64, 1), H200),
        *candidates(Problem(8, 2, 64, 64, 1), A100),
    ]
    assert len({config.name for config in configs}) == len(set(configs))


@pytest.mark.parametrize("scales", ["row", "block"])
def test_float8_weights_are_multiplied_as_such_where_an_expert_has_many_rows(scales: Scales) -> None:
    def layer(tokens: int, weights: Weights = "fp8", kind: Scales = scales) -> Problem:
        return Problem(128, 8, 2816, 704, tokens, weights=weights, scales=kind)

    assert not any(config.eight for config in candidates(layer(512), H200))
    assert choose(layer(4096), H200).eight
    assert not any(config.eight for config in candidates(replace(layer(16384), invariant=True), H200))
    assert not any(config.eight for config in candidates(layer(16384, "int8", "row"), H200))
    wide = layer(16384, "wide", "none")
    narrow = layer(16384)
    ours, theirs = (seconds(problem, choose(problem, H200), H200) for problem in (narrow, wide))
    assert 1.4 * ours <= theirs


@given(problem=problems(), device=st.sampled_from(DEVICES))
def test_tiles_for_weights_of_four_bits_know_of_which_kind(problem: Problem, device: DeviceModel) -> None:
    packed = problem.weights if problem.scales == "group" and problem.element_bytes == 2 else ""
    assert {config.four for config in candidates(problem, device)} == {packed}
    tiled = [config for config in candidates(problem, device) if config.BM > 1]
    assert not packed or all(block.BK == 64 for one in tiled for block in (one.up, one.down))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(("weights", "scales"), KINDS)
def test_few_tokens_ask_for_as_much_as_keeps_memory_busy(
    shape: tuple[int, int, int, int], weights: Weights, scales: Scales
) -> None:
    """So that splitting inner dimensions over more programs would gain nothing."""
    for tokens in (1, 2, 4, 8, 16):
        for invariant in (False, True) if scales != "group" else (False,):
            problem = Problem(*shape, tokens, weights=weights, scales=scales, invariant=invariant)
            config = choose(problem, H200)
            for gated in (True, False):
                asked = bytes_on_their_way(problem, config, H200, gated=gated)
                assert asked >= H200.memory_bytes_per_s * LATENCY_S, (tokens, invariant, config.name, gated)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_one_token_goes_by_rows_whatever_scales_float8_weights_have(shape: tuple[int, int, int, int]) -> None:
    by_scales = {}
    ways: tuple[Scales, ...] = ("row", "block")
    for scales in ways:
        problem = Problem(*shape, 1, weights="fp8", scales=scales)
        assert choose(problem, H200).BM == 1
        by_scales[scales] = seconds(problem, choose(problem, H200), H200)
    assert by_scales["row"] <= by_scales["block"] <= 1.15 * by_scales["row"]


@pytest.mark.parametrize(("weights", "gain"), [("int4", 1.8), ("mxfp4", 1.8)])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_one_token_beside_weights_of_four_bits_is_predicted_to_be_faster_by_rows(
    shape: tuple[int, int, int, int], weights: Weights, gain: float
) -> None:
    problem = Problem(*shape, 1, weights=weights, scales="group")
    tiled = min(seconds(problem, one, H200) for one in candidates(problem, H200) if one.BM > 1)
    assert choose(problem, H200).BM == 1
    assert gain * seconds(problem, choose(problem, H200), H200) < tiled
    assert all(one.BM > 1 for one in candidates(replace(problem, tokens=17), H200))
    assert all(one.BM > 1 for one in candidates(replace(problem, invariant=True), H200))
