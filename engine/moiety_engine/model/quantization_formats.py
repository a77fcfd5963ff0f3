"""Detection of a checkpoint's quantization format from its configuration and tensor names, for error messages.

Handles no tensors; `checkpoint_formats` reads the supported formats.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from moiety_engine.model.errors import ConfigError, UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

SUPPORTED = (
    "supported are fp8 (float8_e4m3fn with scales for blocks, rows, groups or matrices), mxfp4 experts, GGUF, AWQ (4 "
    "bits, GEMM), GPTQ (2, 4 or 8 bits), bitsandbytes in 4 bits, ModelOpt's FP8, MXFP8 and NVFP4, and "
    "compressed-tensors (pack-quantized in 2, 4 or 8 bits, int-quantized, float-quantized, NVFP4, MXFP4, MXFP8); "
    "convert it to one of those, for example with llm-compressor, or use the unquantized checkpoint, which "
    "--quantization can quantize"
)
MODELOPT_FILE = "hf_quant_config.json"  # next to config.json, which older versions of modelopt do not extend
_METHODS = {
    "aqlm": "AQLM",
    "auto-round": "AutoRound",
    "awq": "AWQ",
    "bitnet": "BitNet",
    "bitsandbytes": "bitsandbytes",
    "bitsandbytes_4bit": "bitsandbytes (4 bits)",
    "bitsandbytes_8bit": "bitsandbytes (8 bits)",
    "eetq": "EETQ",
    "exl2": "ExLlamaV2 (EXL2)",
    "fbgemm_fp8": "FBGEMM fp8",
    "fp_quant": "FP-Quant",
    "gptq": "GPTQ",
    "gguf": "GGUF",
    "higgs": "HIGGS",
    "hqq": "HQQ",
    "modelopt": "NVIDIA ModelOpt",
    "quanto": "Quanto",
    "quark": "AMD Quark",
    "spqr": "SpQR",
    "torchao": "torchao",
    "vptq": "VPTQ",
}
# Suffixes of tensor names that identify a format: the first entry whose suffixes all occur decides.
_UNSUPPORTED_TENSORS: tuple[tuple[tuple[str, ...], str], ...] = (
    ((".q_weight", ".q_scale"), "ExLlamaV2 (EXL2)"),
    ((".SCB",), "bitsandbytes (8 bits: SCB)"),
    ((".codebooks",), "AQLM (codebooks)"),
)
_SUPPORTED_TENSORS: tuple[tuple[tuple[str, ...], str], ...] = (
    ((".weight_g_idx",), "compressed-tensors with activation ordering (actorder 'group': weight_g_idx)"),
    ((".qweight", ".g_idx"), "GPTQ (qweight, qzeros, g_idx)"),
    ((".qweight", ".qzeros"), "AWQ or GPTQ (qweight, qzeros)"),
    ((".absmax",), "bitsandbytes (4 bits: absmax)"),
    ((".weight_scale_2",), "NVIDIA ModelOpt NVFP4 (weight_scale_2)"),
    ((".weight_global_scale",), "compressed-tensors NVFP4 (weight_global_scale)"),
    ((".weight_zero_point",), "asymmetric integers (weight_zero_point)"),
    ((".weight_packed",), "compressed-tensors (weight_packed)"),
    ((".weight_scale",), "float8 or integers (weight_scale)"),
    ((".weight_scale_inv",), "float8 in blocks (weight_scale_inv)"),
)
# Suffixes of scales for an fp8 KV cache and fp8 attention: of keys, values, queries and softmax outputs.
KV_SCALES = tuple(
    f".{name}" for name in (
        "k_scale", "v_scale", "kv_scale", "q_scale", "prob_scale", "k_zero_point", "v_zero_point",
        "k_proj.output_scale", "v_proj.output_scale", "q_proj.output_scale",
    )
)  # fmt: skip


def refused(what: str) -> UnsupportedModelError:
    """Return the error for a checkpoint in an unsupported format."""
    return UnsupportedModelError(f"the checkpoint's quantization {what} is not supported; {SUPPORTED}")


def method_name(settings: Mapping[str, Any]) -> str:
    """Return a readable name for the format of a quantization_config."""
    method = settings.get("quant_method")
    if method is None and ("quant_algo" in settings or "producer" in settings):
        method = "modelopt"
    name = _METHODS.get(str(method).lower(), repr(method))
    bits = settings.get("bits", settings.get("w_bit"))
    details = [f"{bits} bits"] if isinstance(bits, int) else []
    if settings.get("fmt"):
        details.append(str(settings["fmt"]))
    if settings.get("desc_act"):
        details.append("act-order (desc_act)")
    algorithm = settings.get("quant_algo") or (settings.get("quantization") or {}).get("quant_algo")
    if algorithm:
        details.append(str(algorithm))
    return f"{name} ({', '.join(details)})" if details else name


def refuse_by_tensors(folder: Path, names: Collection[str]) -> None:
    """Raise if tensors that config.json's quantization does not explain belong to a quantized format.

    Raises UnsupportedModelError for unsupported formats, and ConfigError if config.json should describe the format.
    """
    for ends, what in _UNSUPPORTED_TENSORS:
        if all(any(name.endswith(end) for name in names) for end in ends):
            raise refused(what)
    for ends, what in _SUPPORTED_TENSORS:
        if all(any(name.endswith(end) for name in names) for end in ends):
            first = min(name for name in names if name.endswith(ends))
            raise ConfigError(
                f"the files in {folder} have {first}, of the quantization {what}, but config.json has no "
                "quantization_config of that kind: download config.json as it was published, or the unquantized "
                "checkpoint"
            )


def modelopt_settings(folder: Path) -> dict[str, Any]:
    """Return the settings in the file of older versions of ModelOpt; {} if there is none. Raises ConfigError."""
    path = folder / MODELOPT_FILE
    if not path.is_file():
        return {}
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{path} cannot be read as JSON: {exc}") from exc
    return {"quant_method": "modelopt", **said} if isinstance(said, dict) else {}
