"""When attention and experts on GPUs of their own pay, and when they do not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moiety_engine.planning.apart import compare, one_way_s, pipelined_s
from moiety_engine.planning.layouts import Demand
from moiety_engine.planning.machines import GPUS, find_network
from moiety_engine.planning.models import find_model

NETWORK = find_network("nvlink,ib400", GPUS["h200"], 8)
DEMAND = Demand(input_tokens=4000, output_tokens=1000, ttft_s=2.0, tpot_s=0.05, gpu_hour_usd=2.0)


def test_micro_batches_hide_all_but_the_slowest_part() -> None:
    assert pipelined_s(3, 2.0, 2.0, 1.0) == 6.0  # each GPU works all the time
    assert pipelined_s(2, 2.0, 2.0, 1.0) == 6.0  # too few: one micro-batch's way is as long
    assert pipelined_s(4, 1.0, 2.0, 1.0) == 8.0


def test_the_busier_side_of_a_hop_sets_its_time() -> None:
    sent = 100 * 2 * (1 - 1 / 4) * 2 * 4096 / 360e9  # 1.5 copies of each row to two ranks with experts
    assert one_way_s(100, 4096, 2, 2, 2, NETWORK) == pytest.approx(sent + 4e-6 * 4 / 3)
    assert one_way_s(100, 4096, 2, 6, 2, NETWORK) == pytest.approx(3 * sent + 4e-6 * 8 / 7)


def test_apart_keeps_the_promise_and_uses_all_gpus() -> None:
    found = compare(find_model("qwen3-30b-a3b"), 4, GPUS["h200"], NETWORK, DEMAND)
    assert found is not None and found.together is not None
    assert found.attention_gpus + found.expert_gpus == 4
    assert 0 < found.tpot_s <= DEMAND.tpot_s
    assert found.tokens_per_s_per_gpu == pytest.approx(found.running / found.tpot_s / 4)


def test_it_pays_only_where_it_is_faster_by_a_twentieth() -> None:
    found = compare(find_model("qwen3-30b-a3b"), 2, GPUS["h200"], NETWORK, DEMAND)
    assert found is not None
    together = found.together_tokens_per_s_per_gpu
    assert not replace(found, tokens_per_s_per_gpu=1.04 * together).pays
    assert replace(found, tokens_per_s_per_gpu=1.06 * together).pays


def test_a_single_gpu_cannot_be_divided() -> None:
    assert compare(find_model("qwen3-30b-a3b"), 1, GPUS["h200"], NETWORK, DEMAND) is None
