"""The step-time model, its presets, and what comes from a file."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from moiety_engine.errors import InvalidConfig
from moiety_engine.scheduling.step_time.step_time_model import StepShape, StepTimeModel
from moiety_engine.simulator.devices import (
    A10G_LLAMA2_7B,
    A100_LLAMA3_8B,
    A100_LLAMA3_8B_QOSERVE,
    H200_QWEN3_30B_A3B,
    PRESETS,
    SimulatedDevice,
    find_device,
)


@pytest.mark.parametrize("device", PRESETS.values(), ids=lambda device: device.name)
def test_a_step_takes_longer_the_more_there_is_to_do(device: SimulatedDevice) -> None:
    base = device.step_s(64, 64, 10_000, 0)
    assert device.step_s(65, 65, 10_000, 0) > base
    assert device.step_s(64, 64, 11_000, 0) > base
    assert device.step_s(64, 64, 10_000, 1000) > base
    assert device.step_s(64, 64, 10_000, 0, copied_blocks=1) == pytest.approx(
        base + device.block_size * device.kv_token_bytes / device.copy_bytes_per_s
    )


def test_the_vtc_setting_has_its_pool_and_the_step_times_of_its_artefact() -> None:
    assert A10G_LLAMA2_7B.kv_tokens == 10_000
    assert A10G_LLAMA2_7B.step_s(19, 19, 19 * 384, 0) == pytest.approx(0.0372, rel=0.15)
    prompts = 38  # of 256 tokens at once: 55 ms each
    assert A10G_LLAMA2_7B.step_s(prompts * 256, prompts, 0, prompts * 256 * 128) == pytest.approx(
        prompts * 0.0547, rel=0.15
    )


def test_the_a100_alone_is_a_quarter_faster_than_the_published_chunk() -> None:
    assert 0.033 < A100_LLAMA3_8B.step_s(256 + 30, 31, 30 * 2000, 256 * 1000) < 0.042
    assert 9_500 < 2048 / A100_LLAMA3_8B.step_s(2048, 1, 0, 2048 * 1024) < 12_000


def test_the_qoserve_setting_has_the_published_profile_of_steps() -> None:
    chunk, large = (A100_LLAMA3_8B_QOSERVE.step_s(rows, 1, 0, rows * 500) for rows in (256, 2500))
    assert 0.043 < chunk < 0.05
    assert (2500 / large) / (256 / chunk) == pytest.approx(2.0, rel=0.1)


@pytest.mark.parametrize(("tokens", "layer_us"), [(1, 18), (64, 278), (1024, 302), (16384, 1566)])
def test_the_moe_preset_repeats_the_measured_floors_of_a_layer(tokens: int, layer_us: float) -> None:
    experts_only = msgspec.structs.replace(
        H200_QWEN3_30B_A3B, overhead_s=0.0, dense_s=0.0, experts_s=48 * 1.208e9 / 4.3e12, token_s=48 * 1566e-6 / 16384
    )
    assert experts_only.step_s(tokens, 0, 0, 0) / 48 * 1e6 == pytest.approx(layer_us, rel=0.05)


def test_a_device_is_read_back_from_the_file_it_was_written_to(tmp_path: Path, small: SimulatedDevice) -> None:
    path = tmp_path / "device.json"
    path.write_bytes(msgspec.json.encode(small))
    assert find_device(str(path)) == small
    assert find_device("a10g-llama2-7b") is A10G_LLAMA2_7B


def test_step_times_reported_by_an_engine_are_its_predictions() -> None:
    model = StepTimeModel((0.01, 0.02, 0.03, 0.04, 0.005, 0.006, 0.007))
    assert model.costs() is None  # nothing was seen yet
    shape = StepShape(300, 200, 40_000, 2_000_000)
    for _ in range(200):
        model.observe(shape, 0.25)
    costs = model.costs()
    assert costs is not None
    device = SimulatedDevice(
        name="learned", overhead_s=costs.step_s, token_s=costs.row_s, bends=costs.bends, exponent=1.0,
        kv_token_s=costs.context_token_s, pair_s=costs.pair_s, kv_tokens=100, kv_token_bytes=0,
        prefill_step_s=costs.prefill_step_s,
    )  # fmt: skip
    assert device.step_s(500, 300, 40_000, 2_000_000) == pytest.approx(model.predict_s(shape))
    assert device.step_s(50, 50, 0, 0) == pytest.approx(model.predict_s(StepShape(50)))


def test_a_device_that_is_none_is_refused_with_what_would_do(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"neither a preset .*a10g-llama2-7b.* nor a file"):
        find_device("b200")
    (tmp_path / "device.json").write_text('{"name": "x"}')
    with pytest.raises(InvalidConfig, match=r"does not describe a device: .*overhead_s"):
        find_device(str(tmp_path / "device.json"))
