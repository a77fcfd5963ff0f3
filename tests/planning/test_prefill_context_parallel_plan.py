"""`moiety plan` accounts for prefill context parallelism, and proposes it where the TTFT is missed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moiety_engine.distribution.layout import Layout, RankPosition
from moiety_engine.model.tensor_shards import own_spec
from moiety_engine.planning.cli import make_table, options
from moiety_engine.planning.layouts import LATE, TrafficDemand, evaluate, evaluate_layouts, shared_cache_bytes
from moiety_engine.planning.models import find_model
from moiety_engine.planning.steps import (
    PlannedBatch,
    Shape,
    attention_s,
    busiest_step_times,
    end_parts,
    shared_cache_s,
    step_times,
)

from .test_layouts import H200, NETWORK

LONG = TrafficDemand(input_tokens=30_000, output_tokens=500, ttft_s=2.0, tpot_s=10.0, gpu_hour_usd=2.0)


def test_groups_that_divide_tokens_are_tried_where_the_ttft_is_missed() -> None:
    served = find_model("qwen3-30b-a3b")
    patient = {one.layout: one for one in evaluate_layouts(served, 8, H200, NETWORK, replace(LONG, ttft_s=1000.0))}
    assert all(layout.pcp == 1 for layout in patient)
    plain = patient[Layout(1, 8, 8)]
    assert plain.problem is None
    divided = evaluate(served, Layout(1, 8, 8, pcp=8), 8, H200, NETWORK, replace(LONG, ttft_s=1000.0))
    assert divided.ttft_s < plain.ttft_s
    between = replace(LONG, ttft_s=(divided.ttft_s + plain.ttft_s) / 2)
    found = {one.layout: one for one in evaluate_layouts(served, 8, H200, NETWORK, between)}
    late = found[plain.layout].problem
    assert late is not None and late.startswith(LATE)
    assert found[divided.layout].problem is None
    assert options(divided) == "--prefill-context-parallel 8 --ep 8"
    assert options(evaluate(served, Layout(2, 4, 8, pcp=4), 8, H200, NETWORK, LONG)) == (
        "--tp 2 --prefill-context-parallel 4 --ep 8"
    )
    columns = {column.header: list(column.cells) for column in make_table([found[divided.layout]]).columns}
    assert (columns["pcp"], columns["dp"]) == (["8"], ["1"])


def test_a_model_without_experts_is_planned_with_several_groups_of_its_ranks() -> None:
    served = find_model("qwen3-30b-a3b")
    dense = replace(served.spec.layers[0], ffn=find_model("deepseek-v3").spec.layers[0].ffn)
    served = replace(served, spec=replace(served.spec, layers=tuple(dense for _ in served.spec.layers)))
    assert not served.spec.moe_layers
    found = [one.layout for one in evaluate_layouts(served, 4, H200, NETWORK, replace(LONG, ttft_s=1e-6))]
    divided = {layout for layout in found if layout.pcp > 1}
    assert {(one.tp, one.dp, one.pcp, one.ep) for one in divided} == {(1, 2, 2, 1), (1, 4, 4, 1), (2, 2, 2, 1)}


@pytest.mark.parametrize("name", ["qwen3-next-80b-a3b", "deepseek-v3.2"])
def test_a_model_whose_cache_cannot_be_shared_is_not_planned_with_it(name: str) -> None:
    served = find_model(name, "fp8")
    found = list(evaluate_layouts(served, 8, H200, NETWORK, replace(LONG, ttft_s=1e-6)))
    assert any((one.problem or "").startswith(LATE) for one in found)
    assert all(one.layout.pcp == 1 for one in found)


def test_each_group_has_a_copy_of_the_cache_and_a_part_of_the_activations() -> None:
    served, layout = find_model("qwen3-30b-a3b"), Layout(1, 4, 4)
    demand = replace(LONG, ttft_s=1000.0)
    own = evaluate(served, layout, 4, H200, NETWORK, demand)
    copied = evaluate(served, replace(layout, pcp=4), 4, H200, NETWORK, demand)
    assert copied.weight_bytes == own.weight_bytes
    assert copied.kv_bytes_per_token == own.kv_bytes_per_token == 2 * 4 * 128 * 48 * 2
    pairs = 8 * (768 + 2048)
    activations = 8192 * 2 * (8 * 2048 + pairs)
    exchanged = 8192 * 2 * 4 * 128 * 2  # of one layer
    gained = (activations - activations // 4 - exchanged) / own.kv_bytes_per_token
    assert copied.kv_tokens - own.kv_tokens == pytest.approx(gained, abs=1.5)
    assert own.most_running == 4 * int(own.kv_tokens // demand.mean_context)
    assert copied.most_running == int(copied.kv_tokens // demand.mean_context)
    assert shared_cache_bytes(served, own_spec(served.spec, RankPosition(layout)), layout, demand) == 0


@given(decoding=st.integers(0, 500), prompts=st.integers(0, 8192), pcp=st.integers(2, 16), groups=st.integers(1, 3))
def test_the_first_and_the_last_part_have_equal_rows_and_decodes_come_first(
    decoding: int, prompts: int, pcp: int, groups: int
) -> None:
    batch = PlannedBatch(decoding, 1000, prompts, 2000, 1.0, groups, min(prompts, 512))
    first, last = end_parts(batch, pcp)
    for part in (first, last):
        assert part.rows == pytest.approx(batch.rows / pcp)
        assert part.rows * part.groups == pytest.approx(batch.rows * batch.groups)
        assert min(part.decoding, part.prompt_rows) >= 0
    assert first.decoding == pytest.approx(min(decoding, batch.rows / pcp))
    assert last.decoding == pytest.approx(max(0.0, batch.rows / pcp - prompts))
    assert first.prompt_seen <= last.prompt_seen
    assert end_parts(batch, 1) == [batch]


def test_the_last_part_of_a_prompt_sees_the_most() -> None:
    served = find_model("qwen3-30b-a3b")
    (attention,) = {layer.attention for layer in served.spec.layers}
    whole = PlannedBatch(prompt_rows=8000, prompt_seen=4000, prompt_chunk=8000)
    last = end_parts(whole, 4)[-1]
    assert last.prompt_seen == 7000
    times = [attention_s(attention, H200, one, 1024.0) for one in (whole, last)]
    assert times[1] / times[0] == pytest.approx(1 / 4 * 7 / 4)


def test_groups_exchange_the_keys_and_values_of_a_step_in_each_layer() -> None:
    assert shared_cache_s(1024.0, 100, Shape(1, 4), NETWORK) == 0
    assert shared_cache_s(1024.0, 100, Shape(2, 4, pcp=4), NETWORK) == pytest.approx(3 * 100 * 1024 / 360e9 + 4e-6)
    assert shared_cache_s(1024.0, 100, Shape(1, 16, pcp=16), NETWORK) == pytest.approx(8 * 100 * 1024 / 40e9 + 10e-6)
    served = find_model("qwen3-30b-a3b")
    own = own_spec(served.spec, RankPosition(Layout(1, 4, 4)))
    batch = PlannedBatch(prompt_rows=1000, prompt_seen=500)
    plain, divided = (step_times(served, own, Shape(1, 4, 4, pcp=pcp), H200, NETWORK, batch) for pcp in (1, 4))
    assert divided.exchanges_s - plain.exchanges_s == pytest.approx(48 * (3 * 1000 * 2 * 4 * 128 * 2 / 360e9 + 4e-6))


def test_the_slower_part_is_the_time_of_a_step() -> None:
    served = find_model("qwen3-30b-a3b")
    own = own_spec(served.spec, RankPosition(Layout(1, 4, 4)))
    batch = PlannedBatch(64, 20_000, 4000, 15_000, 1.0, 1, 4000)
    shape = Shape(1, 4, 4, pcp=4)
    parts = [step_times(served, own, shape, H200, NETWORK, part).total_s for part in end_parts(batch, 4)]
    assert busiest_step_times(served, own, shape, H200, NETWORK, batch).total_s == max(parts)
