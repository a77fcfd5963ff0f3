"""Cases in which attention-FFN disaggregation pays, and in which it does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moiety_engine.config import EngineConfig
from moiety_engine.distribution.layout import RankPosition, layout_of
from moiety_engine.model.tensor_shards import own_spec
from moiety_engine.planning.attention_ffn import AttentionFfnLayout, Sides, compare, divide, one_way_s, pipelined_s
from moiety_engine.planning.cli import attention_ffn_options
from moiety_engine.planning.layouts import TrafficDemand
from moiety_engine.planning.machines import GPUS, find_network
from moiety_engine.planning.models import find_model

NETWORK = find_network("nvlink,ib400", GPUS["h200"], 8)
H200 = Sides(GPUS["h200"], GPUS["h200"], NETWORK)
DEMAND = TrafficDemand(input_tokens=4000, output_tokens=1000, ttft_s=2.0, tpot_s=0.05, gpu_hour_usd=2.0)


def test_micro_batches_hide_all_but_the_slowest_part() -> None:
    assert pipelined_s(3, 2.0, 2.0, 1.0) == 6.0  # each GPU works all the time
    assert pipelined_s(2, 2.0, 2.0, 1.0) == 6.0  # too few: one micro-batch's way is as long
    assert pipelined_s(4, 1.0, 2.0, 1.0) == 8.0


def test_the_busier_side_of_a_hop_sets_its_time() -> None:
    sent = 100 * 2 * (1 - 1 / 4) * 2 * 4096 / 360e9  # 1.5 copies of each row to two ranks with experts
    assert one_way_s(100, 4096, 2, 2, 2, NETWORK) == pytest.approx(sent + 4e-6 * 4 / 3)
    assert one_way_s(100, 4096, 2, 6, 2, NETWORK) == pytest.approx(3 * sent + 4e-6 * 8 / 7)


def test_disaggregated_layouts_attain_the_slo_and_use_all_gpus() -> None:
    found = compare(find_model("qwen3-30b-a3b"), 4, H200, DEMAND)
    for comparison in found.values():
        one = comparison.apart
        assert comparison.together is not None
        assert one.replicas * (one.attention_gpus + one.expert_gpus) == 4
        assert 0 < one.tpot_s <= DEMAND.tpot_s
        assert one.tokens_per_s_per_gpu == pytest.approx(one.running / one.tpot_s / 4)
    assert found["advised"].apart.in_engine


def test_it_pays_only_where_it_is_faster_by_a_twentieth() -> None:
    found = compare(find_model("qwen3-30b-a3b"), 2, H200, DEMAND)
    together = found["advised"].together_tokens_per_s_per_gpu
    slower, faster = (AttentionFfnLayout(tokens_per_s_per_gpu=share * together) for share in (1.04, 1.06))
    assert not replace(found["advised"], apart=slower).pays
    assert replace(found["advised"], apart=faster).pays


def test_planned_attention_ffn_layouts_are_valid_layouts_of_the_engine() -> None:
    served = find_model("gpt-oss-20b")
    found = compare(served, 8, H200, DEMAND)
    advised = found["advised"].apart
    assert advised.running
    words = attention_ffn_options(advised).split()
    given = dict(zip((name.removeprefix("--").replace("-", "_") for name in words[::2]), words[1::2], strict=True))
    config = EngineConfig(model="m", name="n", **{name: int(value) for name, value in given.items()})
    layout = layout_of(config)
    assert layout.num_ranks == advised.attention_gpus + advised.expert_gpus
    assert (
        own_spec(served.spec, RankPosition(layout, layout.num_ranks - 1)).layers[0].ffn.num_held
        == 32 // layout.ffn_ranks
    )


def test_cheaper_gpus_for_experts_buy_as_many_tokens_for_less_and_have_a_slower_link() -> None:
    served = find_model("qwen3-30b-a3b")
    tried = divide(served, 3, 1, 3, H200, DEMAND)
    cheaper = divide(served, 3, 1, 3, replace(H200, price=0.5), DEMAND)
    assert tried is not None and cheaper is not None
    assert cheaper.tokens_per_s_per_gpu == pytest.approx(tried.tokens_per_s_per_gpu * 4 / 3.5)
    other = Sides(GPUS["h200"], GPUS["h100"], NETWORK)
    assert other.between.inside == NETWORK.across and H200.between == NETWORK


def test_a_single_gpu_cannot_be_divided() -> None:
    assert compare(find_model("qwen3-30b-a3b"), 1, H200, DEMAND) == {}
