"""Choice of the reader of a checkpoint's quantization from its configuration."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from moiety_engine.model.checkpoint_formats.awq_gptq import awq, gptq
from moiety_engine.model.checkpoint_formats.bitsandbytes import bitsandbytes
from moiety_engine.model.checkpoint_formats.compressed_tensors import METHOD, compressed_tensors
from moiety_engine.model.checkpoint_formats.float8 import float8_format, float8_sources
from moiety_engine.model.checkpoint_formats.float8_experts import float8_with_experts
from moiety_engine.model.checkpoint_formats.four_bit_floats import expert_sources
from moiety_engine.model.checkpoint_formats.gguf import gguf
from moiety_engine.model.checkpoint_formats.modelopt import modelopt
from moiety_engine.model.checkpoint_formats.tensor_source import StoredQuantization
from moiety_engine.model.quantization_formats import method_name, refused
from moiety_kernels.quantization import MXFP4

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import Any

_READERS: dict[str, Callable[[dict[str, Any]], StoredQuantization]] = {
    METHOD: compressed_tensors,
    "awq": awq,
    "bitsandbytes": bitsandbytes,
    "gptq": gptq,
    "modelopt": modelopt,
    "modelopt_fp4": modelopt,
}


def read_quantization(settings: dict[str, Any], folder: Path | None = None) -> StoredQuantization | None:
    """Return the quantization that config.json's quantization_config describes; None if it is empty.

    `folder` is that of the checkpoint; without it, sources of a GGUF file's tensors are not available.
    Raises UnsupportedModelError for unsupported formats.
    """
    if not settings:
        return None
    method = settings.get("quant_method")
    if method is None and ("quant_algo" in settings or "producer" in settings):
        method = "modelopt"
    if method == "gguf":
        return gguf(settings, folder)
    if method == "mxfp4":
        return StoredQuantization(MXFP4.name, MXFP4, expert_sources)
    if method == "fp8" and settings.get("fmt", "e4m3") in ("e4m3", "float8_e4m3fn"):
        form = float8_format(settings.get("weight_block_size"))
        if settings.get("expert_dtype", "fp8") != "fp8":
            return float8_with_experts(settings, form)
        return StoredQuantization(form.name, form, partial(float8_sources, form=form))
    if method in _READERS:
        return _READERS[method](settings)
    raise refused(method_name(settings))
