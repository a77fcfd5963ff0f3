"""From a checkpoint's folder to a Transformer that can run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog
import torch

from moiety_engine.model.checkpoint import load
from moiety_engine.model.errors import UnsupportedModelError
from moiety_engine.model.families import read_spec
from moiety_engine.model.transformer import Transformer
from moiety_kernels.moe import MOE_KERNELS, unavailable

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from moiety_engine.model.spec import ModelSpec

log = structlog.get_logger()

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_model(
    folder: Path,
    *,
    device: str,
    dtype: str,
    moe_kernel: str = "auto",
    num_threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Transformer:
    """Read the checkpoint in `folder` and return the model on `device` ("cpu", "cuda", "cuda:1").

    `dtype` is "float32", "bfloat16", or "auto": bfloat16 for a checkpoint in 16 bits, else float32. On a CPU bfloat16
    means that the weights are kept so; activations and the cache are float32. `moe_kernel` computes the experts; "auto"
    takes the fastest that can. `num_threads` sets the compute threads of the process. `progress` is called with (bytes
    read, bytes in all). Raises ModelError.
    """
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    spec = read_spec(folder)
    if dtype == "auto":
        dtype = "float32" if spec.checkpoint_dtype == "float32" else "bfloat16"
    if dtype not in DTYPES:
        raise UnsupportedModelError(f"dtype {dtype!r} is not supported; choose one of auto, {', '.join(DTYPES)}")
    _check_moe_kernel(moe_kernel, spec, torch.device(device), DTYPES[dtype])
    weights = load(folder, spec, device=torch.device(device), dtype=DTYPES[dtype], progress=progress)
    return Transformer(spec, weights, moe_kernel)


def _check_moe_kernel(asked: str, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> None:
    """Raise if experts are to be computed by what cannot; warn if the best for a GPU cannot be taken."""
    activations = torch.float32 if device.type == "cpu" else dtype
    if asked not in MOE_KERNELS:
        raise UnsupportedModelError(f"moe_kernel {asked!r} is not known; choose one of {', '.join(MOE_KERNELS)}")
    if not spec.moe_layers:
        return
    if asked != "auto":
        reason = unavailable(asked, device, activations)
        if reason is not None:
            raise UnsupportedModelError(f"--moe-kernel {asked} cannot be had: {reason}; choose auto or reference")
    elif device.type == "cuda":
        reason = unavailable("triton", device, activations)
        if reason is not None:
            fallback = "reference" if unavailable("grouped", device, activations) else "grouped"
            log.warning("moe_kernel_unavailable", kernel="triton", reason=reason, instead=fallback)
