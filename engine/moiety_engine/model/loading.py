"""From a checkpoint's folder to a Transformer that can run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moiety_engine.config import LoadFormat
from moiety_engine.memory import device_memory
from moiety_engine.model.checkpoint import load
from moiety_engine.model.dummy import fill_at_random
from moiety_engine.model.errors import UnsupportedModelError
from moiety_engine.model.families import read_spec
from moiety_engine.model.residence import require_fit, weight_bytes
from moiety_engine.model.transformer import Transformer
from moiety_engine.model.weights import allocate

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_model(
    folder: Path,
    *,
    device: str,
    dtype: str,
    num_threads: int | None = None,
    load_format: LoadFormat = LoadFormat.AUTO,
    progress: Callable[[int, int], None] | None = None,
) -> Transformer:
    """Read the checkpoint in `folder` and return the model on `device` ("cpu", "cuda", "cuda:1"). With dummy weights
    only its config.json is read.

    `dtype` is "float32", "bfloat16", or "auto": bfloat16 for a checkpoint in 16 bits, else float32. On a CPU bfloat16
    means that the weights are kept so; activations and the cache are float32. `num_threads` sets the compute threads of
    the process. `progress` is called with (bytes read, bytes in all). Raises ModelError, and OutOfMemory with the
    figures where the weights do not fit.
    """
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    spec = read_spec(folder)
    if dtype == "auto":
        dtype = "float32" if spec.checkpoint_dtype == "float32" else "bfloat16"
    if dtype not in DTYPES:
        raise UnsupportedModelError(f"dtype {dtype!r} is not supported; choose one of auto, {', '.join(DTYPES)}")
    where = torch.device(device)
    require_fit(weight_bytes(spec, DTYPES[dtype]), device_memory(where), where)
    if load_format is LoadFormat.DUMMY:
        weights = allocate(spec, device=where, dtype=DTYPES[dtype])
        fill_at_random(weights)
    else:
        weights = load(folder, spec, device=where, dtype=DTYPES[dtype], progress=progress)
    return Transformer(spec, weights)
