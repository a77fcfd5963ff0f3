"""A checkpoint in a format that is not read is refused with the format's name and what is read.

Scales of a KV cache are left on disk, with a line in the log.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs

from moiety_engine.model.errors import ConfigError, UnsupportedModelError
from moiety_engine.model.families import spec_from_config
from moiety_engine.model.loading import load_model
from moiety_engine.quantize.writing import write_quantized
from moiety_kernels.quantization import INT4

LLAMA = {"model_type": "llama", "num_hidden_layers": 1}
PROJ = "model.layers.0.self_attn.q_proj"


def compressed(**weights: Any) -> dict[str, Any]:
    usual = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32} | weights
    layout = usual.pop("format", "pack-quantized")
    inputs = usual.pop("inputs", None)
    group = {"weights": usual, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "gptq": (GPTQ | {"bits": 3, "desc_act": True}, r"GPTQ \(3 bits, act-order \(desc_act\)\)"),
    "gptq for marlin": (GPTQ | {"checkpoint_format": "marlin"}, r"GPTQ \(4 bits\) in the layout 'marlin'"),
    "gptq, other layers": (
        GPTQ | {"dynamic": {"+:.*down": {"bits": 8}, "-:.*up": {}}},
        "with other bits in some layers",
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "version": "gemv"}, r"AWQ \(4 bits\) of version 'gemv'"),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, r"bitsandbytes in 8 bits \(LLM\.int8\)"),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, r"NVIDIA ModelOpt \(W4A8_AWQ\)"),
    "modelopt of old": (
        {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "INT4_AWQ"}},
        r"ModelOpt \(INT4_AWQ\)",
    ),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, "FBGEMM fp8"),
    "quark": ({"quant_method": "quark"}, "AMD Quark"),
    "torchao": ({"quant_method": "torchao"}, "torchao"),
    "unheard of": ({"quant_method": "squeeze9"}, "'squeeze9'"),
    "e5m2": ({"quant_method": "fp8", "fmt": "e5m2"}, r"'fp8' \(e5m2\)"),
    "mxfp6": (compressed(type="float", num_bits=6, format="mxfp6-pack-quantized"), "'mxfp6-pack-quantized'"),
    "3 bits": (compressed(num_bits=3), r"3 bits, int, by group"),
    "blocks of integers": (
        compressed(num_bits=8, strategy="block", format="int-quantized", inputs={"num_bits": 8}),
        "'int-quantized'.*activations in 8 bits",
    ),
    "sparse": (compressed() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "'pack-quantized'.*sparse"),
    "no groups": ({"quant_method": "compressed-tensors", "format": "dense"}, "'dense'.*without config_groups"),
    "marlin": (compressed(format="marlin-24"), "'marlin-24'"),
}


@pytest.mark.parametrize("kind", SETTINGS)
def test_a_configuration_in_another_format_is_refused_by_its_name(kind: str) -> None:
    settings, name = SETTINGS[kind]
    for key in ("quantization_config", "compression_config"):
        with pytest.raises(
            UnsupportedModelError, match=rf"quantization .*{name}.*supported are fp8.*unquantized"
        ) as told:
            spec_from_config(LLAMA | {key: settings})
        assert "\n" not in str(told.value)


def test_a_target_that_is_no_pattern_is_refused() -> None:
    settings = compressed()
    settings["config_groups"]["group_0"]["targets"] = ["re:(layers"]
    with pytest.raises(UnsupportedModelError, match=r"a target 're:\(layers' that is not a pattern"):
        spec_from_config(LLAMA | {"quantization_config": settings})


@pytest.mark.parametrize("order", [None, False, "weight", "static"])
def test_orders_that_leave_groups_together_are_read(order: Any) -> None:
    assert spec_from_config(LLAMA | {"quantization_config": compressed(actorder=order)}).weight_format is not None


UNSUPPORTED = r"quantization .*{}.*supported are"
UNDESCRIBED = r"have model\.layers\.0\.self_attn\.q_proj\..*of the quantization {}.*no quantization_config of that kind"
TENSORS: dict[str, tuple[tuple[str, ...], str, str]] = {
    "gptq": (("qweight", "qzeros", "scales", "g_idx"), "GPTQ", UNDESCRIBED),
    "awq": (("qweight", "qzeros", "scales"), "AWQ or GPTQ", UNDESCRIBED),
    "bitsandbytes 4": (("weight", "weight.absmax", "weight.quant_map"), "bitsandbytes", UNDESCRIBED),
    "bitsandbytes 8": (("weight", "SCB", "weight_format"), "bitsandbytes", UNSUPPORTED),
    "aqlm": (("codes", "codebooks", "scales"), "AQLM", UNSUPPORTED),
    "exl2": (("q_weight", "q_scale", "q_invperm"), "ExLlamaV2", UNSUPPORTED),
    "nvfp4": (("weight", "weight_scale", "weight_scale_2", "input_scale"), "NVIDIA ModelOpt NVFP4", UNDESCRIBED),
    "float8": (("weight", "weight_scale", "input_scale"), "float8 or integers", UNDESCRIBED),
}


def write_tensors(folder: Path, *ends: str) -> None:
    """In the place of one matrix."""
    tensors = load_file(folder / "model.safetensors")
    del tensors[f"{PROJ}.weight"]
    tensors |= {f"{PROJ}.{end}": torch.ones(4) for end in ends}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("kind", TENSORS)
def test_tensors_of_another_format_are_known_though_config_json_says_nothing(make_checkpoint: Any, kind: str) -> None:
    ends, name, said = TENSORS[kind]
    folder = make_checkpoint("llama, llama3 rope").folder
    write_tensors(folder, *ends)
    with pytest.raises((ConfigError, UnsupportedModelError), match=said.format(name)):
        load_model(folder, device="cpu", dtype="auto")


def test_a_packed_checkpoint_with_ordered_inputs_is_refused_by_name(make_checkpoint: Any, tmp_path: Path) -> None:
    folder = tmp_path / "narrow"
    write_quantized(make_checkpoint("llama, llama3 rope").folder, folder, INT4, lambda *_: None)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {f"{PROJ}.weight_g_idx": torch.arange(64)}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"activation ordering \(actorder 'group': weight_g_idx\)"):
        load_model(folder, device="cpu", dtype="auto")


def test_the_file_of_old_modelopts_must_be_json(make_checkpoint: Any) -> None:
    folder = make_checkpoint("llama, llama3 rope").folder
    (folder / "hf_quant_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"hf_quant_config\.json cannot be read"):
        load_model(folder, device="cpu", dtype="auto")


KV_NAMES = {
    "compressed-tensors": ("self_attn.k_scale", "self_attn.v_scale", "self_attn.q_scale"),
    "modelopt": ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
    "AutoFP8": ("self_attn.kv_scale",),
    "compressed-tensors of old": ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
}


@pytest.mark.parametrize("kind", KV_NAMES)
@pytest.mark.parametrize("quantized", [False, True])
def test_scales_of_a_kv_cache_are_left_on_disk_with_a_line(
    make_checkpoint: Any, make_driver: Any, make_sequence: Any, kind: str, quantized: bool, tmp_path: Path
) -> None:
    folder = make_checkpoint("llama, llama3 rope").folder
    if quantized:
        write_quantized(folder, tmp_path / "narrow", INT4, lambda *_: None)
        folder = tmp_path / "narrow"
    expected = make_driver(folder).prefill(make_sequence(list(range(3, 40))), 64)
    tensors = load_file(folder / "model.safetensors")
    names = [f"model.layers.{layer}.{name}" for layer in range(3) for name in KV_NAMES[kind]]
    save_file(tensors | {name: torch.tensor(0.03) for name in names}, folder / "model.safetensors")
    with capture_logs() as logs:
        driver = make_driver(folder)
    (line,) = (one for one in logs if one["event"] == "kv_scales_ignored")
    assert (line["first"], line["num_tensors"]) == (
        names[0] if kind != "compressed-tensors" else sorted(names)[0],
        len(names),
    )
    assert torch.equal(driver.prefill(make_sequence(list(range(3, 40))), 64), expected)


def test_a_cache_that_is_asked_for_without_scales_is_told_too(make_checkpoint: Any, tmp_path: Path) -> None:
    folder = tmp_path / "narrow"
    write_quantized(make_checkpoint("llama, llama3 rope").folder, folder, INT4, lambda *_: None)
    config = json.loads((folder / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    config["quantization_config"]["kv_cache_scheme"] = scheme
    (folder / "config.json").write_text(json.dumps(config))
    with capture_logs() as logs:
        load_model(folder, device="cpu", dtype="auto")
    assert [one["scheme"] for one in logs if one["event"] == "kv_scales_ignored"] == [scheme]
