"""Choice of kernels for a model's products, and batch invariance: equal bits regardless of the rest of the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from moiety_engine.model.spec import AttentionSpec, LatentAttentionSpec, MoeSpec
from moiety_kernels.moe import unavailable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moiety_engine.model.recurrent_specs import RecurrentSpec
    from moiety_engine.model.spec import LayerSpec, ModelSpec
    from moiety_kernels.quantization import WeightFormat

_LANES = 16  # SIMD lanes of the CPU kernels, which require row widths that are multiples of this


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Settings of a model's computation.

    `moe_kernel`: kernel that computes experts. `invariant`: a request gets the same bits alone and in any batch.
    """

    moe_kernel: str = "auto"
    invariant: bool = False


def cannot_be_invariant(
    spec: ModelSpec, device: torch.device, dtype: torch.dtype, form: WeightFormat | None, moe_kernel: str
) -> str | None:
    """Return why the model's bits would depend on the rest of the batch, and what to do; None if they do not."""
    if spec.moe_layers and moe_kernel not in ("auto", "triton" if device.type == "cuda" else "auto"):
        return f"the results of --moe-kernel {moe_kernel} depend on the batch: leave --moe-kernel out"
    if device.type == "cpu":
        odd = sorted({width for layer in spec.layers for width in _widths(spec, layer) if width % _LANES})
        return (
            f"the kernels for a CPU need widths that are multiples of {_LANES}, and this model has {odd[0]}"
            if odd
            else None
        )
    if dtype is torch.float32:
        return "attention on a GPU needs 16 bits: use --dtype bfloat16"
    reason = unavailable("triton", device, dtype)
    if reason is None and spec.moe_layers:
        reason = unavailable("triton", device, dtype, form)
    if reason is not None:
        return f"the Triton kernels are required: {reason}"
    return _not_taken(spec)


def _widths(spec: ModelSpec, layer: LayerSpec) -> Iterator[int]:
    """Yield the widths of the rows that a layer multiplies, and of its heads."""
    attention, ffn = layer.attention, layer.ffn
    if layer.embedded and spec.layer_embeddings is not None:
        yield spec.layer_embeddings.width
    yield from (spec.hidden_size, layer.attention_gate_rank, layer.ffn_gate_rank)
    if ffn is not None:
        yield ffn.width
    if isinstance(attention, LatentAttentionSpec):
        yield from (attention.nope_width, attention.latent_width, attention.num_heads * attention.value_width)
        yield from (attention.cached_values, attention.query_rank or 0, attention.index_key_width)
    elif isinstance(attention, AttentionSpec):
        yield attention.head_dim
    else:
        yield from attention.row_widths
    if isinstance(ffn, MoeSpec):
        yield from (ffn.latent_width or 0, 0 if ffn.shared is None else ffn.shared.dense.width)


def _not_taken(spec: ModelSpec) -> str | None:
    """Return which dimension of the model exceeds the limits of the GPU kernels, so that torch would compute it.

    Returns None if none does.
    """
    from moiety_kernels.attention_input.kernel import MAX_VALUES  # noqa: PLC0415 - Triton, as all of these
    from moiety_kernels.rms_norm.kernel import MAX_WIDTH  # noqa: PLC0415
    from moiety_kernels.route.kernels.grouping import MAX_EXPERTS  # noqa: PLC0415
    from moiety_kernels.sample.kernel import MAX_TOKENS  # noqa: PLC0415

    if spec.vocab_size > MAX_TOKENS:
        return f"the sampling kernel supports at most {MAX_TOKENS} tokens, not {spec.vocab_size}"
    if spec.hidden_size > MAX_WIDTH:
        return f"the normalization kernel supports rows of at most {MAX_WIDTH}, not {spec.hidden_size}"
    for layer in spec.layers:
        if isinstance(layer.ffn, MoeSpec) and layer.ffn.routing.num_experts > MAX_EXPERTS:
            return f"the routing kernel supports at most {MAX_EXPERTS} experts"
        if not _attends(layer.attention, MAX_VALUES):
            return "the attention kernels do not support these head widths"
    return None


def _attends(attention: AttentionSpec | LatentAttentionSpec | RecurrentSpec, most_values: int) -> bool:
    from moiety_kernels.gated_delta.kernel import fits_widths  # noqa: PLC0415 - Triton
    from moiety_kernels.lightning_indexer.kernel import fits_widths as fits_index  # noqa: PLC0415 - Triton
    from moiety_kernels.mla_attention.kernel import MAX_WIDTH as MAX_ROW  # noqa: PLC0415 - Triton
    from moiety_kernels.paged_attention.tiles import MAX_WIDTH, parts  # noqa: PLC0415

    if isinstance(attention, LatentAttentionSpec):
        row, indexer = attention.cached_values, attention.indexer
        if indexer is not None and not fits_index(indexer.num_heads, indexer.head_dim):
            return False
        return torch.version.hip is None and row <= MAX_ROW and parts(row)[0] == attention.latent_width
    if isinstance(attention, AttentionSpec):
        return attention.head_dim <= MAX_WIDTH and 2 * attention.q_width <= most_values
    return all(fits_widths(*part.shape[1:]) for part in attention.state_parts if len(part.shape) == 3)
