"""Choice of the tensors of a GGUF file that keep their few bits. Handles no tensors.

The kernels read one format for all products of a model: the one in which most of the file's weights can be kept.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moiety_engine.gguf.header import GgufHeader

# Formats of products, as config.json describes them, and the types that they represent exactly.
KEPT: dict[str, tuple[dict[str, Any], frozenset[str]]] = {
    "int4": ({"bits": 4}, frozenset({"Q4_0"})),
    "int4 with offsets": ({"bits": 4, "offsets": True}, frozenset({"Q4_0", "Q4_1", "Q4_K"})),
    "int8": ({"bits": 8}, frozenset({"Q4_0", "Q5_0", "Q8_0"})),
    "mxfp4": ({"bits": 4, "floating": True}, frozenset({"MXFP4"})),
}
_PRODUCTS = ("attn_q", "attn_k", "attn_v", "attn_output", "attn_q_a", "attn_q_b", "attn_kv_a_mqa", "ffn_")


def kept_format(header: GgufHeader) -> str | None:
    """Return the format of `KEPT` that represents most of the products' weights; None if none represents any."""
    weights: dict[str, int] = {}
    for name, entry in header.tensors.items():
        part = name.split(".")[2:3]
        if len(entry.shape) > 1 and part and part[0].startswith(_PRODUCTS):
            weights[entry.type.name] = weights.get(entry.type.name, 0) + math.prod(entry.shape)
    sums = {name: sum(weights.get(one, 0) for one in types) for name, (_, types) in KEPT.items()}
    best = max(sums, key=sums.__getitem__)
    return best if sums[best] else None


def quantization_of(header: GgufHeader) -> dict[str, Any]:
    """Return the quantization_config of the file's model."""
    counts: dict[str, int] = {}
    for entry in header.tensors.values():
        counts[entry.type.name] = counts.get(entry.type.name, 0) + 1
    return {"quant_method": "gguf", "kept": kept_format(header), "tensor_types": dict(sorted(counts.items()))}
