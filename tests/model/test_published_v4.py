"""DeepSeek-V4 as it is published: float8 blocks whose scales are powers of two, and experts in mxfp4 or float8."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs
from torch import Tensor

from moiety_engine.distribution.layout import Layout, RankPosition
from moiety_engine.model.checkpoint import load
from moiety_engine.model.checkpoint_formats.four_bit_floats import VALUES
from moiety_engine.model.errors import UnsupportedModelError, WeightsError
from moiety_engine.model.families import read_spec, spec_from_config
from moiety_engine.model.weights import MoeWeights, products_of
from moiety_kernels.quantization import MXFP4, QuantizedWeight, dequantize

PROMPT = list(range(3, 120))
BLOCK, GROUP = 32, 32
IN_FLOAT8 = re.compile(r"attn\.(wq_a|wq_b|wkv|wo_a|wo_b|indexer\.wq_b)\.weight$|shared_experts\.\w+\.weight$")
OF_EXPERT = re.compile(r"\.experts\.\d+\.\w+\.weight$")
SETTINGS = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [BLOCK, BLOCK]}


def powers(largest: Tensor, limit: float) -> Tensor:
    """The powers of two by which numbers of these magnitudes are at most the limit."""
    return torch.exp2((largest / limit).log2().ceil())


def float8(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(numbers, scales, the weight that they stand for)."""
    rows, columns = weight.shape
    blocks = weight.view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    scale = powers(blocks.abs().amax((1, 3), keepdim=True), 448.0)
    numbers = (blocks / scale).to(torch.float8_e4m3fn)
    plain = (numbers.float() * scale).view(rows, columns)
    return numbers.view(rows, columns), scale.squeeze(3).squeeze(1).to(torch.float8_e8m0fnu), plain


def float4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = weight.shape
    groups = weight.view(rows, columns // GROUP, GROUP)
    scale = powers(groups.abs().amax(2, keepdim=True), 6.0)
    values = torch.tensor(VALUES)
    codes = ((groups / scale)[..., None] - values).abs().argmin(-1)
    plain = (values[codes] * scale).view(rows, columns)
    low, high = codes.view(rows, columns // 2, 2).to(torch.uint8).unbind(-1)
    return (low | high << 4).view(torch.int8), scale.squeeze(2).to(torch.float8_e8m0fnu), plain


def published(folder: Path, experts: str) -> Path:
    """Publish the checkpoint in `folder`, and return a copy with the weights that its numbers stand for."""
    copy = folder.parent / "plain"
    shutil.copytree(folder, copy)
    tensors = load_file(folder / "model.safetensors")
    plain = dict(tensors)
    for name, weight in tensors.copy().items():
        of_expert = OF_EXPERT.search(name) is not None
        if of_expert or IN_FLOAT8.search(name):
            numbers, scale, stood_for = (float4 if of_expert and experts == "fp4" else float8)(weight.float())
            tensors |= {name: numbers, name.replace(".weight", ".scale"): scale}
            plain[name] = stood_for
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(plain, copy / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": SETTINGS, "expert_dtype": experts}))
    return copy


@pytest.fixture(params=["fp4", "fp8"])
def both(request: pytest.FixtureRequest, make_checkpoint: Any, tmp_path: Path) -> tuple[Path, Path, str]:
    folder = make_checkpoint("deepseek_v4, as wide as blocks").folder
    moved = tmp_path / "published" / "folder"
    moved.mkdir(parents=True)
    for path in list(folder.iterdir()):
        if path.is_file():
            path.rename(moved / path.name)
    return moved, published(moved, request.param), request.param


def test_the_published_checkpoint_is_the_model_of_the_weights_that_its_numbers_stand_for(
    both: tuple[Path, Path, str], make_driver: Any, make_sequence: Any
) -> None:
    narrow, plain, experts = both
    expected, ours = (make_driver(one).prefill(make_sequence(PROMPT), 64).log_softmax(-1) for one in (plain, narrow))
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)
    with capture_logs() as logs:
        kept = make_driver(narrow, dtype="bfloat16")
    wide = make_driver(plain, dtype="bfloat16")
    for one, other in zip(kept.model._weights.layers, wide.model._weights.layers, strict=True):
        assert isinstance(one.ffn, MoeWeights)
        pair = (products_of(weights, experts_only=True) for weights in (one.ffn, other.ffn))
        for product, stood_for in zip(*pair, strict=True):
            assert isinstance(product, QuantizedWeight) and product.format.is_float8 == (experts == "fp8")
            torch.testing.assert_close(dequantize(product), stood_for.float(), rtol=1e-2, atol=0)
        assert isinstance(one.attention.output_DC, QuantizedWeight) == (experts == "fp8")
    assert any(one["event"] == "checkpoint_widened" for one in logs) == (experts == "fp4")
    answers = [one.prefill(make_sequence(PROMPT), 64).log_softmax(-1) for one in (kept, wide)]
    assert (answers[0] - answers[1]).abs().median() < 0.05


@pytest.mark.parametrize("both", ["fp4"], indirect=True)
def test_ranks_read_their_parts_of_experts_in_four_bits(both: tuple[Path, Path, str]) -> None:
    narrow, plain, _ = both
    cpu, layout = torch.device("cpu"), Layout(tp=2, ep=2)
    spec = read_spec(narrow)
    assert spec.weight_format == MXFP4
    for rank in range(2):
        own = RankPosition(layout, rank)
        kept = load(narrow, spec, device=cpu, dtype=torch.float32, form=MXFP4, rank_position=own)
        wide = load(plain, read_spec(plain), device=cpu, dtype=torch.float32, rank_position=own)
        for one, other in zip(products_of(kept), products_of(wide), strict=True):
            torch.testing.assert_close(dequantize(one) if isinstance(one, QuantizedWeight) else one, other)


@pytest.mark.parametrize("both", ["fp4"], indirect=True)
def test_experts_that_are_not_what_the_configuration_says_are_refused(
    both: tuple[Path, Path, str], make_driver: Any
) -> None:
    folder = both[0]
    config = json.loads((folder / "config.json").read_text())
    with pytest.raises(UnsupportedModelError, match="'fp8' with expert_dtype 'fp6' is not supported"):
        spec_from_config(config | {"expert_dtype": "fp6"})
    (folder / "config.json").write_text(json.dumps(config | {"expert_dtype": "fp8"}))
    with pytest.raises(WeightsError, match=r"experts\.\d+\.w\d\.weight .* are torch.int8, not float8_e4m3fn"):
        make_driver(folder)
