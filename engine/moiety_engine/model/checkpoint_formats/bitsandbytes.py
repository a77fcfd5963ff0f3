"""Reader of matrices that bitsandbytes stores in 4 bits: NF4 and FP4, also with quantized scales.

Every number indexes a table of 16 values; each block of (usually 64) consecutive numbers of the flattened matrix has a
scale, its largest absolute value. With double quantization the scales are bytes that index a second table, in blocks
with scales of their own, and have a common offset. Dettmers et al., "QLoRA", 2023.
"""

from __future__ import annotations

import json
import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from moiety_engine.model.checkpoint_formats.tensor_source import StoredQuantization, TensorSource
from moiety_engine.model.quantization_formats import method_name, refused

if TYPE_CHECKING:
    from torch import Tensor

_STATE = ".quant_state.bitsandbytes__"
_NESTED = (".nested_absmax", ".nested_quant_map")
_MAX_STATE_BYTES = 10_000


def bitsandbytes(settings: dict[str, Any]) -> StoredQuantization:
    """Return the quantization of a bitsandbytes checkpoint. Raises UnsupportedModelError."""
    if not settings.get("load_in_4bit", settings.get("_load_in_4bit")):
        raise refused(f"{method_name(settings)} in 8 bits (LLM.int8)")
    kind = str(settings.get("bnb_4bit_quant_type", "fp4"))
    return StoredQuantization(f"bitsandbytes {kind}", None, partial(_sources, kind=kind), unused=())


def _sources(present: set[str], kind: str) -> dict[str, TensorSource]:
    found = {}
    for name in present:
        plain = name.removesuffix(".absmax")
        state = plain + _STATE + kind
        if plain == name or state not in present:
            continue
        nested = [plain + end for end in _NESTED] if plain + _NESTED[0] in present else []
        names = (plain, name, f"{plain}.quant_map", state, *nested)
        found[plain] = TensorSource(names, from_4_bits, widened=f"bitsandbytes {kind}")
    return found


def from_4_bits(
    packed: Tensor,
    scales: Tensor,
    table: Tensor,
    state: Tensor,
    nested_scales: Tensor | None = None,
    nested_table: Tensor | None = None,
) -> Tensor:
    """Return the weights, float32 of the shape in `state` (JSON as bytes); a byte's upper half comes first.

    Raises ValueError.
    """
    if packed.dtype is not torch.uint8 or state.numel() > _MAX_STATE_BYTES:
        raise ValueError(f"the values are packed into {packed.dtype}, described by {state.numel()} bytes")
    said = json.loads(state.contiguous().numpy().tobytes())
    shape, block = [int(one) for one in said["shape"]], int(said["blocksize"])
    flat = packed.flatten()
    numbers = torch.stack((flat >> 4, flat & 15), dim=-1).flatten()[: math.prod(shape)]
    if nested_scales is not None and nested_table is not None:
        parts = torch.split(nested_table.float()[scales.int()], int(said["nested_blocksize"]))
        scales = torch.cat([part * scale for part, scale in zip(parts, nested_scales.float(), strict=True)])
        scales += float(said["nested_offset"])
    values = table.float()[numbers.int()]
    spread = scales.float().repeat_interleave(block)[: len(values)]
    return (values * spread).view(shape)
