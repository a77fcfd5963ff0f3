"""From a checkpoint's folder to a Transformer that can run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moiety_engine.model.checkpoint import load
from moiety_engine.model.errors import UnsupportedModelError
from moiety_engine.model.families import read_spec
from moiety_engine.model.spec import LatentAttentionSpec
from moiety_engine.model.transformer import Transformer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from moiety_engine.model.spec import ModelSpec

FP8_CAPABILITY = (8, 9)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_model(
    folder: Path,
    *,
    device: str,
    dtype: str,
    kv_dtype: str = "auto",
    num_threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Transformer:
    """Read the checkpoint in `folder` and return the model on `device` ("cpu", "cuda", "cuda:1").

    `dtype` is "float32", "bfloat16", or "auto": bfloat16 for a checkpoint in 16 bits, else float32. On a CPU bfloat16
    means that the weights are kept so; activations and the cache are float32. `kv_dtype` is "auto", the activations',
    or "fp8", on a GPU only. `num_threads` sets the compute threads of the process. `progress` is called with
    (bytes read, bytes in all). Raises ModelError.
    """
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    spec = read_spec(folder)
    if dtype == "auto":
        dtype = "float32" if spec.checkpoint_dtype == "float32" else "bfloat16"
    if dtype not in DTYPES:
        raise UnsupportedModelError(f"dtype {dtype!r} is not supported; choose one of auto, {', '.join(DTYPES)}")
    cached_in = None if kv_dtype == "auto" else _fp8(spec, torch.device(device))
    weights = load(folder, spec, device=torch.device(device), dtype=DTYPES[dtype], progress=progress)
    return Transformer(spec, weights, kv_dtype=cached_in)


def _fp8(spec: ModelSpec, device: torch.device) -> torch.dtype:
    """The type of a cache in fp8. Raises UnsupportedModelError where there cannot be one."""
    if any(isinstance(layer.attention, LatentAttentionSpec) for layer in spec.layers):
        raise UnsupportedModelError("latent attention's cache cannot be fp8: leave --kv-dtype out")
    if device.type != "cuda":
        raise UnsupportedModelError("a cache in fp8 needs a GPU: leave --kv-dtype out, or run with --device cuda")
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        raise UnsupportedModelError("this GPU has no fp8, which came with compute capability 8.9: leave --kv-dtype out")
    return torch.float8_e4m3fn
