"""Checkpoints quantized by other tools are the models of the weights that their numbers stand for.

Where a kernel reads the numbers, they are kept from the file to the product; else they are widened, with a log entry.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from structlog.testing import capture_logs
from tests import packed_checkpoints as written

from moiety_engine.config import Offload, OffloadConfig
from moiety_engine.distribution.collectives import SINGLE_RANK_GROUPS
from moiety_engine.distribution.layout import Layout, RankPosition
from moiety_engine.model.checkpoint import load
from moiety_engine.model.errors import UnsupportedModelError, WeightsError
from moiety_engine.model.families import read_spec
from moiety_engine.model.loading import load_model, load_share
from moiety_engine.model.weight_offload import named_tensors
from moiety_engine.model.weights import products_of
from moiety_kernels.quantization import DENSE_MXFP4, NVFP4, QuantizedWeight, WeightFormat, dequantize

PROMPT = list(range(3, 60))
VARIANT = "mixtral, sliding window"


def groups(*each: dict[str, Any], layout: str) -> dict[str, Any]:
    found = {f"group_{index}": {"targets": ["Linear"]} | one for index, one in enumerate(each)}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": found}


def weights(kind: str = "int", bits: int = 4, strategy: str = "group", **more: Any) -> dict[str, Any]:
    return {"weights": {"type": kind, "num_bits": bits, "strategy": strategy, "group_size": 32, **more}}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
OFFSETS = WeightFormat("int4", 4, 32, offsets=True)
ORDERED = replace(OFFSETS, ordered=True)
# name: (quantization_config, writer, format of the products or None)
KINDS: dict[str, tuple[dict[str, Any], written.Writer, WeightFormat | None]] = {
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, written.awq, OFFSETS),
    "gptq": (GPTQ | {"sym": True}, partial(written.gptq, symmetric=True), WeightFormat("int4", 4, 32)),
    "gptq asymmetric": (GPTQ | {"sym": False, "desc_act": False}, written.gptq, OFFSETS),
    "gptq v2": (GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"}, partial(written.gptq, less=0), OFFSETS),
    "gptq 8 bits": (
        GPTQ | {"bits": 8, "sym": True},
        partial(written.gptq, bits=8, symmetric=True),
        WeightFormat("int8", 8, 32),
    ),
    "gptq 8 bits asymmetric": (GPTQ | {"bits": 8, "sym": False}, partial(written.gptq, bits=8), None),
    "gptq 2 bits": (GPTQ | {"bits": 2, "sym": False}, partial(written.gptq, bits=2), None),
    "gptq desc_act": (GPTQ | {"sym": False, "desc_act": True}, written.act_ordered, ORDERED),
    "compressed, asymmetric": (
        groups(weights(symmetric=False), layout="pack-quantized"),
        written.compressed,
        OFFSETS,
    ),
    "compressed, ordered": (
        groups(weights(symmetric=False, actorder="group"), layout="pack-quantized"),
        written.compressed_ordered,
        ORDERED,
    ),
    "compressed W8A8": (
        groups(weights(bits=8, strategy="channel", symmetric=True), layout="int-quantized"),
        written.whole,
        WeightFormat("int8", 8, None),
    ),
    "compressed W8A8, asymmetric": (
        groups(weights(bits=8, strategy="channel", symmetric=False), layout="int-quantized"),
        partial(written.whole, symmetric=False),
        None,
    ),
    "compressed NVFP4": (
        groups(weights("float", strategy="tensor_group", group_size=16), layout="nvfp4-pack-quantized"),
        partial(written.nvfp4, modelopt=False),
        NVFP4,
    ),
    "modelopt NVFP4": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        partial(written.nvfp4, modelopt=True),
        NVFP4,
    ),
    "compressed MXFP4": (groups(weights("float"), layout="mxfp4-pack-quantized"), written.mxfp4, DENSE_MXFP4),
    "compressed MXFP8": (
        groups(weights("float", 8), layout="mxfp8-quantized"),
        written.mxfp8,
        WeightFormat("fp8", 8, 32, floating=True),
    ),
    "modelopt MXFP8": (
        {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "MXFP8"}},
        written.mxfp8,
        WeightFormat("fp8", 8, 32, floating=True),
    ),
    "bitsandbytes nf4": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        written.nf4,
        None,
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(folder as written by transformers, copies of it in a quantization beside the weights that it stands for)."""
    from tests.model.conftest import write_checkpoint

    source = tmp_path_factory.mktemp("source")
    write_checkpoint(source, VARIANT)

    def make(settings: dict[str, Any], writer_of: Any, source: Path = source) -> tuple[Path, Path]:
        both = []
        for name in ("narrow", "plain"):
            both.append(tmp_path_factory.mktemp(name))
            for path in source.iterdir():
                (both[-1] / path.name).write_bytes(path.read_bytes())
        plain = written.write(both[0], settings, writer_of)
        save_file(plain, both[1] / "model.safetensors", metadata={"format": "pt"})
        return both[0], both[1]

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_is_the_model_of_the_weights_that_its_numbers_stand_for(
    folders: Any, make_driver: Any, make_sequence: Any, kind: str
) -> None:
    settings, writer, form = KINDS[kind]
    narrow, plain = folders(settings, lambda name: writer)
    wide = make_driver(plain)
    expected, ours = (one.prefill(make_sequence(PROMPT), 64).log_softmax(-1) for one in (wide, make_driver(narrow)))
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)
    with capture_logs() as logs:
        kept = make_driver(narrow, dtype="bfloat16")
    assert read_spec(narrow).weight_format == form
    assert any(one["event"] == "checkpoint_widened" for one in logs) is (form is None)
    for one, product in zip(products_of(kept.model._weights), products_of(wide.model._weights), strict=True):
        if form is None:
            torch.testing.assert_close(one, product.bfloat16())
        else:
            assert isinstance(one, QuantizedWeight)
            torch.testing.assert_close(dequantize(one), product, rtol=1e-5, atol=1e-6)
    in_few_bits = kept.prefill(make_sequence(PROMPT), 64).log_softmax(-1)
    assert (in_few_bits - expected).abs().median() < 0.05
    if kind.endswith("modelopt MXFP8"):  # older versions say so in another file
        config = json.loads((narrow / "config.json").read_text())
        (narrow / "hf_quant_config.json").write_text(json.dumps(config.pop("quantization_config")))
        (narrow / "config.json").write_text(json.dumps(config))
        assert read_spec(narrow).weight_format == form


def test_gated_delta_layers_are_read_from_an_awq_checkpoint(
    folders: Any, make_driver: Any, make_sequence: Any, make_checkpoint: Any
) -> None:
    source = make_checkpoint("qwen3_5_moe, as wide as blocks").folder
    small = "linear_attn.in_proj_a", "linear_attn.in_proj_b"  # unquantized in published checkpoints
    settings = KINDS["awq"][0]
    narrow, plain = folders(settings, lambda name: None if any(one in name for one in small) else written.awq, source)
    expected, ours = (make_driver(one).prefill(make_sequence(PROMPT), 64).log_softmax(-1) for one in (plain, narrow))
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)
    kept = make_driver(narrow, dtype="bfloat16").model._weights.layers
    for product in (kept[0].attention.input_CD, kept[0].attention.output_DC, kept[1].attention.gate_CD):
        assert isinstance(product, QuantizedWeight)


def test_groups_of_layers_in_several_formats_are_read_by_name_pattern_and_class(
    folders: Any, make_driver: Any, make_sequence: Any
) -> None:
    of_layer = "re:.*layers.1.self_attn.*"
    settings = groups(
        weights() | {"targets": ["Linear"], "format": "pack-quantized"},
        weights(bits=8, strategy="channel") | {"targets": [of_layer], "format": "int-quantized"},
        weights("float", 8) | {"targets": ["model.layers.0.self_attn.o_proj"], "format": "mxfp8-quantized"},
        layout="mixed-precision",
    )

    def writer_of(name: str) -> written.Writer:
        if "layers.1.self_attn" in name:
            return written.whole
        return written.mxfp8 if "layers.0.self_attn.o_proj" in name else partial(written.compressed, symmetric=True)

    narrow, plain = folders(settings, writer_of)
    expected, ours = (make_driver(one).prefill(make_sequence(PROMPT), 64) for one in (plain, narrow))
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)
    with capture_logs() as logs:
        kept = load_model(narrow, device="cpu", dtype="bfloat16")
    said = {one["stored_as"]: one["num_tensors"] for one in logs if one["event"] == "checkpoint_widened"}
    assert said == {
        "'int-quantized' (8 bits, int, by channel)": 4,
        "'mxfp8-quantized' (8 bits, float, by group)": 1,
    }
    narrow_layers = [isinstance(one.attention.output_DC, QuantizedWeight) for one in kept._weights.layers]
    assert narrow_layers == [False, False, True]


def test_ranks_read_their_parts_of_numbers_scales_and_offsets(folders: Any) -> None:
    narrow, plain = folders(KINDS["awq"][0], lambda name: written.awq)
    cpu = torch.device("cpu")
    for layout in (Layout(tp=2), Layout(tp=2, ep=2)):
        for rank in range(layout.num_ranks):
            both = []
            for folder, form in ((narrow, OFFSETS), (plain, None)):
                spec = read_spec(folder)
                rank_position = RankPosition(layout, rank)
                both.append(
                    products_of(
                        load(folder, spec, device=cpu, dtype=torch.float32, form=form, rank_position=rank_position)
                    )
                )
            for kept, wide in zip(*both, strict=True):
                torch.testing.assert_close(dequantize(kept), wide, rtol=1e-5, atol=1e-6)


@pytest.mark.thorough
def test_experts_with_offsets_are_offloaded(folders: Any, make_driver: Any, make_sequence: Any, tmp_path: Path) -> None:
    narrow, _ = folders(KINDS["awq"][0], lambda name: written.awq)
    expected = make_driver(narrow, dtype="bfloat16").prefill(make_sequence(PROMPT), 16)
    offload = OffloadConfig(what=Offload.EXPERTS, folder=str(tmp_path), memory_bytes=100_000)
    ours = make_driver(narrow, dtype="bfloat16", offload=offload).prefill(make_sequence(PROMPT), 16)
    torch.testing.assert_close(ours, expected)


def of_an_order(name: str, *, joined: bool = True) -> written.Writer:
    """Return the writer of a matrix whose inputs are in an order of its product's, or else of its own."""
    joins = {"k_proj": "q_proj", "v_proj": "q_proj", "w3": "w1"} if joined else {}
    for part, of in joins.items():
        name = name.replace(part, of)
    return partial(written.act_ordered, seed=sum(name.encode()))


def test_experts_with_inputs_in_orders_of_their_own_stay_in_four_bits(
    folders: Any, make_driver: Any, make_sequence: Any, tmp_path: Path
) -> None:
    narrow, plain = folders(KINDS["gptq desc_act"][0], of_an_order)
    expected = make_driver(plain).prefill(make_sequence(PROMPT), 64).log_softmax(-1)
    kept = make_driver(narrow, dtype="bfloat16")
    wide = load_model(plain, device="cpu", dtype="float32")._weights
    for one, product in zip(products_of(kept.model._weights), products_of(wide), strict=True):
        assert isinstance(one, QuantizedWeight)
        assert one.order_K is not None
        assert one.order_K.dim() == 1 or not torch.equal(one.order_K[0], one.order_K[1])
        torch.testing.assert_close(dequantize(one), product, rtol=1e-5, atol=1e-6)
    found = kept.prefill(make_sequence(PROMPT), 64).log_softmax(-1)
    assert (found - expected).abs().median() < 0.05
    read = make_sequence(PROMPT)
    kept.step([(read, 50)])
    decoded = torch.stack([kept.step([(read, 1)])[0][-1] for _ in range(4)]).log_softmax(-1)
    assert kept.model.only_kernels, "decode steps are recorded"
    torch.testing.assert_close(decoded, found[50:54], rtol=0, atol=1e-3)
    offload = OffloadConfig(what=Offload.EXPERTS, folder=str(tmp_path), memory_bytes=100_000)
    for _ in range(2):  # the second start reads the file of the first
        offloaded = make_driver(narrow, dtype="bfloat16", offload=offload)
        torch.testing.assert_close(offloaded.prefill(make_sequence(PROMPT), 64).log_softmax(-1), found)


def test_joined_matrices_of_different_orders_are_dequantized(
    folders: Any, make_driver: Any, make_sequence: Any
) -> None:
    narrow, plain = folders(KINDS["gptq desc_act"][0], partial(of_an_order, joined=False))
    expected = make_driver(plain).prefill(make_sequence(PROMPT), 64).log_softmax(-1)
    with capture_logs() as logs:
        kept = make_driver(narrow, dtype="bfloat16")
    said = [one for one in logs if one["event"] == "checkpoint_widened"]
    assert ["different orders" in one["reason"] for one in said] == [True]
    layer = kept.model._weights.layers[0]
    products = layer.attention.qkv_CD, layer.attention.output_DC, layer.ffn.gate_up_E2FD, layer.ffn.down_EDF
    assert [isinstance(one, QuantizedWeight) for one in products] == [False, True, False, True]
    assert (kept.prefill(make_sequence(PROMPT), 64).log_softmax(-1) - expected).abs().median() < 0.05


DIVIDED = [(Layout(tp=2), False), (Layout(dp=2), False)]
UNDIVIDED = [(Layout(tp=2, ep=2), True), (Layout(dp=2, ep=2), True), (Layout(pp=2), True)]


@pytest.mark.parametrize(("layout", "is_kept"), [*DIVIDED, *UNDIVIDED])
def test_ranks_keep_ordered_inputs_in_four_bits_unless_experts_are_divided(
    folders: Any, layout: Layout, is_kept: bool
) -> None:
    narrow, plain = folders(KINDS["gptq desc_act"][0], of_an_order)
    for rank in range(layout.num_ranks):
        ranks = replace(SINGLE_RANK_GROUPS, rank_position=RankPosition(layout, rank))
        with capture_logs() as logs:
            both = [load_share(one, device="cpu", dtype="bfloat16", ranks=ranks).weights for one in (narrow, plain)]
        said = [one["reason"] for one in logs if one["event"] == "checkpoint_widened"]
        assert ["each rank has some of those of each expert" in reason for reason in said] == [True] * (not is_kept)
        for kept, wide in zip(*map(products_of, both), strict=True):
            assert isinstance(kept, QuantizedWeight) is is_kept
            found = dequantize(kept) if isinstance(kept, QuantizedWeight) else kept.float()
            torch.testing.assert_close(found, wide.float(), rtol=0.01, atol=1e-3)
        num_bytes = [sum(one.nbytes for _, one in named_tensors(tuple(products_of(share)))) for share in both]
        assert not is_kept or num_bytes[0] < 0.75 * num_bytes[1]
        if not is_kept:
            with pytest.raises(UnsupportedModelError, match="--ep equal to the number of ranks"):
                load_share(narrow, device="cpu", dtype="bfloat16", ranks=ranks, quantization="int4")


def test_groups_of_other_sizes_than_config_json_says_are_refused(folders: Any) -> None:
    def uneven(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        parts, stands_for = written.act_ordered(weight)
        return parts | {"g_idx": parts["g_idx"].clamp(max=0)}, stands_for

    narrow, _ = folders(KINDS["gptq desc_act"][0], lambda name: uneven if "layers.0" in name else written.act_ordered)
    with pytest.raises(WeightsError, match=r"layers\.0\..*cannot be read in groups.* does not have 32 in each"):
        load_model(narrow, device="cpu", dtype="bfloat16")


def test_tensors_that_contradict_config_json_are_refused_by_name(folders: Any) -> None:
    wrong = {
        "symmetric, but": ("gptq", written.gptq),
        "g_idx has groups whose inputs lie apart": ("gptq asymmetric", written.act_ordered),
        "do not match groups of 32": ("awq", lambda weight: cut(written.awq(weight), "scales")),
        "packed into torch.float32, not int32": ("awq", lambda weight: cut(written.awq(weight), "qweight")),
    }
    for message, (kind, writer) in wrong.items():
        narrow, _ = folders(KINDS[kind][0], lambda name, writer=writer: writer if "layers.0" in name else None)
        with pytest.raises(WeightsError, match=message):
            load_model(narrow, device="cpu", dtype="bfloat16")


def cut(made: tuple[dict[str, Any], Any], end: str) -> tuple[dict[str, Any], Any]:
    parts, stands_for = made
    short = parts[end][:-1] if end == "scales" else parts[end].float()
    return parts | {end: short}, stands_for
