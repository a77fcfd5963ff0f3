"""`moiety plan` agrees with numbers that were computed by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from moiety_engine.distribution.layout import Layout, RankPosition
from moiety_engine.model.tensor_shards import own_spec
from moiety_engine.planning.cli import options
from moiety_engine.planning.layouts import (
    NO_ROOM,
    TrafficDemand,
    evaluate,
    evaluate_layouts,
    list_layouts,
    usd_per_million,
    with_replicated_experts,
)
from moiety_engine.planning.machines import GPUS, LINKS, GpuNetwork, find_network
from moiety_engine.planning.models import PRESETS, Served, find_model
from moiety_engine.planning.steps import PlannedBatch, Shape, attention_s, dispatch_s, product_s, step_times, sum_s
from moiety_platform.cli.main import main

H200 = GPUS["h200"]
NETWORK = find_network("nvlink,ib400", H200, 8)
DEMAND = TrafficDemand(input_tokens=4000, output_tokens=1000, ttft_s=2.0, tpot_s=0.05, gpu_hour_usd=2.0)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("deepseek-v3", 671.0),  # without the layer that drafts
        ("qwen3-235b-a22b", 235.1),
        ("qwen3-30b-a3b", 30.53),
        ("mixtral-8x7b", 46.7),
        ("gpt-oss-120b", 116.8),
        ("gpt-oss-20b", 20.91),
        ("glm-4.5-air", 106.9),
        ("glm-5", 744.0),
    ],
)
def test_a_preset_has_as_many_parameters_as_the_release(name: str, billions: float) -> None:
    served = find_model(name, "bf16")
    assert served.weight_bytes(served.spec) / 2e9 == pytest.approx(billions, rel=1e-3)


def test_the_latent_cache_of_deepseek_v3_takes_512_and_64_values_a_layer() -> None:
    served = find_model("deepseek-v3")
    assert served.kv_bytes_per_token(served.spec, 1000) == 576 * 61 * 2
    assert find_model("deepseek-v3", kv_dtype="fp8").kv_bytes_per_token(served.spec, 1000) == 576 * 61
    assert find_model("deepseek-v3", kv_dtype="int8").kv_bytes_per_token(served.spec, 1000) == (576 + 8) * 61


def test_the_weights_of_deepseek_v3_take_a_byte_each_but_for_the_few_that_stay_wide() -> None:
    served = find_model("deepseek-v3", "fp8")
    wide = 2 * 129280 * 7168 + 61 * 128 * 512 * (128 + 128)  # embedding and head, latent rows to heads: a byte more
    routers = 58 * 256 * 7168 * 3  # float32
    scales = (671.03e9 - wide - routers / 3) / 128 * 4  # a float32 for each 128 of a row of what is not wide
    assert served.weight_bytes(served.spec) == pytest.approx(671.03e9 + wide + routers + scales, rel=1e-4)


def test_a_layout_that_cuts_between_numbers_that_share_a_scale_will_not_do() -> None:
    served = find_model("gpt-oss-20b")
    cut = evaluate(served, Layout(tp=2), 2, H200, NETWORK, DEMAND).problem
    assert cut is not None and "= 2 cuts the model's 2880 columns of an expert into pieces of 1440" in cut
    assert evaluate(served, Layout(tp=2, ep=2), 2, H200, NETWORK, DEMAND).problem is None
    assert evaluate(find_model("gpt-oss-20b", "bf16"), Layout(tp=2), 2, H200, NETWORK, DEMAND).problem is None


def test_a_rank_has_its_share_of_weights_and_of_grouped_heads() -> None:
    served = find_model("qwen3-30b-a3b")
    one = evaluate(served, Layout(), 1, H200, NETWORK, DEMAND)
    two = evaluate(served, Layout(tp=2, ep=2), 2, H200, NETWORK, DEMAND)
    assert two.weight_bytes == pytest.approx(one.weight_bytes / 2, rel=0.01)
    assert (one.kv_bytes_per_token, two.kv_bytes_per_token) == (2 * 4 * 128 * 48 * 2, 2 * 2 * 128 * 48 * 2)


def test_more_parts_than_divide_the_experts_hold_copies() -> None:
    spec = with_replicated_experts(find_model("deepseek-v3").spec, 144)
    assert {spec.layers[index].ffn.routing.num_experts for index in spec.moe_layers} == {288}


def test_a_sum_over_eight_ranks_moves_twice_seven_eighths() -> None:
    assert sum_s(1e9, 8, NETWORK) == pytest.approx(2 * (7 / 8 * 1e9 / 360e9 + 4e-6))
    assert sum_s(1e9, 1, NETWORK) == 0
    across = 2 * (1 / 2 * 1e9 / 8 / 40e9 + 10e-6)
    assert sum_s(1e9, 16, NETWORK) == pytest.approx(sum_s(1e9, 8, NETWORK) + across)


@pytest.mark.parametrize(("ranks", "dispatch_us", "combine_us"), [(32, 155, 273), (64, 173, 314), (128, 192, 369)])
def test_an_exchange_takes_what_deepep_measured(ranks: int, dispatch_us: float, combine_us: float) -> None:
    """Its low-latency kernels: 128 tokens of 7168, top 8, fp8 there and bf16 back, all by one port of 400 Gb/s."""
    by_port_alone = GpuNetwork(LINKS["nvlink4"], LINKS["ib400"], 1)
    assert dispatch_s(128, 7168, 8, ranks, by_port_alone) == pytest.approx(dispatch_us * 1e-6, rel=0.25)
    assert dispatch_s(128, 2 * 7168, 8, ranks, by_port_alone) == pytest.approx(combine_us * 1e-6, rel=0.25)


def test_a_product_takes_the_larger_of_its_bytes_and_its_operations() -> None:
    few = product_s((4096, 4096), 2, H200, 1)
    many = product_s((4096, 4096), 2, H200, 65536)
    assert few == pytest.approx((4096 * 4096 * 2 + 2 * 4096 * 2) / (0.85 * 4.3e12))
    assert many == pytest.approx(2 * 65536 * 4096 * 4096 / (0.85 * 790e12))


def test_a_decode_step_reads_the_cache_of_every_request() -> None:
    served = find_model("qwen3-30b-a3b")
    batch = PlannedBatch(decoding=64, context=1000)
    more = replace(batch, context=5000)
    times = [step_times(served, served.spec, Shape(), H200, NETWORK, one) for one in (batch, more)]
    assert times[1].attention_s - times[0].attention_s == pytest.approx(64 * 4000 * 98_304 / (0.85 * 4.3e12))
    assert times[0].experts_s == times[1].experts_s


def test_a_context_that_no_rank_holds_is_divided_by_position() -> None:
    served = find_model("deepseek-v3", "fp8")
    demand = replace(DEMAND, input_tokens=160_000, output_tokens=1000, ttft_s=1000.0, tpot_s=10.0)
    small = replace(H200, memory_bytes=100e9)  # beside the weights, room for two thirds of a request
    found = {one.layout: one for one in evaluate_layouts(served, 8, small, NETWORK, demand)}
    plain, divided = (found[Layout(tp=8, ep=8, dcp=dcp)] for dcp in (1, 8))
    assert plain.problem == NO_ROOM and divided.problem is None
    assert divided.kv_bytes_per_token == -(-plain.kv_bytes_per_token // 8)
    assert 7.9 < divided.kv_tokens / plain.kv_tokens < 8.1
    assert options(divided) == "--tp 8 --decode-context-parallel 8 --ep 8"
    assert all(one.tp % one.dcp == 0 for one in found)


def test_ranks_that_divide_positions_read_less_and_exchange_partial_results() -> None:
    served = find_model("deepseek-v3", "fp8")
    batch = PlannedBatch(decoding=8, context=100_000)
    own = own_spec(served.spec, RankPosition(Layout(tp=8, ep=8)))
    whole, divided = (step_times(served, own, Shape(8, ep=8, dcp=dcp), H200, NETWORK, batch) for dcp in (1, 8))
    assert divided.attention_s < whole.attention_s
    assert divided.exchanges_s - whole.exchanges_s == pytest.approx(
        61 * (8 * 7 * 16 * (576 * 2 + 513 * 4) / NETWORK.inside.bytes_per_s + 2 * NETWORK.inside.latency_s)
    )


def test_planned_concurrency_is_the_largest_that_attains_the_slo() -> None:
    served = find_model("deepseek-v3")
    layout = Layout(tp=8, ep=8)
    found = evaluate(served, layout, 8, H200, NETWORK, DEMAND)
    tighter = evaluate(served, layout, 8, H200, NETWORK, replace(DEMAND, tpot_s=found.tpot_s * 0.999))
    assert found.tpot_s <= DEMAND.tpot_s
    assert 0 < tighter.running < found.running < found.most_running


def test_cost_is_the_price_of_an_hour_by_the_tokens_of_an_hour() -> None:
    assert usd_per_million(1000.0, 3.6) == pytest.approx(1.0)


def test_every_preset_fits_on_some_layout_of_eight() -> None:
    for name in PRESETS:
        served = find_model(name, "fp8" if name in ("deepseek-v3", "glm-5") else "auto")
        found = (evaluate(served, layout, 8, H200, NETWORK, DEMAND) for layout in list_layouts(8, served.spec))
        assert any(one.problem is None and one.in_engine for one in found), name


def test_sparse_attention_takes_the_time_of_its_selection_and_of_the_index_keys() -> None:
    dense, sparse = find_model("deepseek-v3"), find_model("deepseek-v3.2")

    def decode_s(served: Served, context: float) -> float:
        attention = served.spec.layers[0].attention
        return attention_s(attention, H200, PlannedBatch(decoding=8.0, context=context), served.kv_bytes(attention))

    assert decode_s(sparse, 1024.0) == pytest.approx(decode_s(dense, 1024.0))
    assert decode_s(sparse, 8192.0) < decode_s(dense, 8192.0)
    assert decode_s(sparse, 65536.0) < decode_s(dense, 65536.0) / 5
    assert sparse.kv_bytes_per_token(sparse.spec, 1024.0) - dense.kv_bytes_per_token(dense.spec, 1024.0) == 61 * 256


def test_layouts_that_do_not_fit_are_rejected_with_the_reason() -> None:
    served = find_model("deepseek-v3")
    assert (
        evaluate(served, Layout(), 1, H200, NETWORK, DEMAND).problem == "the weights leave no memory for the KV cache"
    )
    uneven = evaluate(served, Layout(tp=3), 3, H200, NETWORK, DEMAND).problem
    assert uneven is not None and "cannot be divided by --tp 3" in uneven
    hasty = evaluate(served, Layout(tp=8), 8, H200, NETWORK, replace(DEMAND, tpot_s=0.005)).problem
    assert hasty is not None and hasty.startswith("one request takes")


def test_the_command_advises_a_layout_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["plan", "--model", "qwen3-30b-a3b", "--gpus", "2", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert done.value.code == 0
    assert report["advised"]["in_engine"] and report["advised"]["problem"] is None
    assert report["advised"]["tokens_per_s_per_gpu"] > 0
    assert len(report["layouts"]) == len(list(list_layouts(2, find_model("qwen3-30b-a3b").spec)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "tpu"], "is not a known GPU"),
        (["--link", "nvlink"], "must be two of"),
        (["--model", "deepsek"], "is not a folder with config.json"),
        (["--weights", "fp3"], "--weights 'fp3' must be"),
        (["--model", "mixtral-8x7b", "--input-tokens", "40000"], "use smaller values"),
    ],
)
def test_bad_input_says_what_to_do(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["plan", *arguments])
    assert done.value.code == 1
    assert message in " ".join(capsys.readouterr().err.split())


def test_no_gpus_are_planned_for_a_model_that_is_served_on_a_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v4"}))
    with pytest.raises(SystemExit) as done:
        main(["plan", "--model", str(tmp_path)])
    assert done.value.code == 1
    assert "deepseek_v4 model is served on a CPU only" in " ".join(capsys.readouterr().err.split())


def test_a_sequence_of_gpt_oss_takes_hardly_more_than_half_of_a_cache_without_windows() -> None:
    served = find_model("gpt-oss-20b")
    whole = 24 * 2 * 8 * 64 * 2  # keys and values of 8 heads in all layers
    assert served.kv_bytes_per_token(served.spec, 100) == whole
    assert served.kv_bytes_per_token(served.spec, 32768) <= 0.55 * whole
