"""Reader of a GGUF file's tensors as those of a Hugging Face checkpoint: names, order of rows, and blocks."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from moiety_engine.gguf.header import GgufHeader, read_header
from moiety_engine.gguf.kept_types import KEPT
from moiety_engine.gguf.names import GPT_OSS, UNUSED, GgufTensor, tensors_by_name
from moiety_engine.model.checkpoint_formats.gguf_blocks import dequantized, numbers_of
from moiety_engine.model.checkpoint_formats.gguf_file import gguf_file
from moiety_engine.model.checkpoint_formats.tensor_source import StoredQuantization, TensorSource
from moiety_kernels.quantization import MXFP4, WeightFormat

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

GROUP = 32
_FLOATS = ("F32", "F16", "BF16")
_TURNED = (".self_attn.q_proj.", ".self_attn.k_proj.")  # llama.cpp has the two rows of a rotated pair side by side
Read = tuple[str, ...]


def gguf(settings: dict[str, Any], folder: Path | None) -> StoredQuantization:
    """Return the quantization of the GGUF file in `folder`; without one, only the format of its products."""
    kept = settings.get("kept")
    form = None if kept is None else _format(**KEPT[str(kept)][0])
    return StoredQuantization("GGUF", form, partial(_sources, folder=folder, kept=kept, form=form), UNUSED)


def _format(bits: int, *, offsets: bool = False, floating: bool = False) -> WeightFormat:
    return MXFP4 if floating else WeightFormat(f"int{bits}", bits, GROUP, offsets=offsets)


def _sources(
    _present: set[str], folder: Path | None, kept: str | None, form: WeightFormat | None
) -> dict[str, TensorSource]:
    assert folder is not None, "sources are those of a file"
    header = read_header(gguf_file(folder))
    exact = frozenset[str]() if kept is None else KEPT[kept][1]
    return {
        name: _source(name, tensors, header, exact, form)
        for name, tensors in tensors_by_name(header).items()
        if name not in UNUSED
    }


def _source(
    name: str, tensors: tuple[GgufTensor, ...], header: GgufHeader, exact: frozenset[str], form: WeightFormat | None
) -> TensorSource:
    keys = tuple(one.key for one in tensors)
    kinds = tuple(header.tensors[one.name].type.name if one.name in header.tensors else "F32" for one in tensors)
    arrange = _arrangement(name, header)
    make = partial(_made, kinds=kinds, arrange=arrange)
    if len(tensors) > 1 and header.architecture == GPT_OSS:
        make = partial(_gate_up, kinds=kinds)
    elif len(tensors) > 1:
        make = partial(_keys_and_values, kinds=kinds)
    elif header.architecture == GPT_OSS and name.endswith("experts.down_proj"):
        make = partial(_transposed, kinds=kinds)
    if all(kind in _FLOATS for kind in kinds):
        return TensorSource(keys, make)
    if form is not None and all(kind in exact for kind in kinds):
        keep = None if form.floating or len(tensors) > 1 else partial(_kept, kind=kinds[0], arrange=arrange, form=form)
        return TensorSource(keys, make, keep, is_narrow=True)
    return TensorSource(keys, make, widened=f"GGUF's {kinds[0]}")


def _arrangement(name: str, header: GgufHeader) -> Callable[[Tensor], Tensor] | None:
    """Return the function that puts rows in the order of Hugging Face checkpoints; None where they are in it."""
    if header.architecture == "llama" and any(part in name for part in _TURNED):
        key = "attention.head_count" if ".q_proj." in name else "attention.head_count_kv"
        return partial(_halves_of_heads, num_heads=int(header.value(key, header.value("attention.head_count"))))
    return _as_row if name.endswith("shared_expert_gate.weight") else None


def _halves_of_heads(rows: Tensor, num_heads: int) -> Tensor:
    """Return the rows with the first of each pair before the second ones in each head."""
    pairs = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def _as_row(vector: Tensor) -> Tensor:
    return vector.view(1, -1)


def _values(raw: Tensor, kind: str) -> Tensor:
    return raw if kind in _FLOATS else dequantized(raw, kind)


def _made(raw: Tensor, kinds: Read, arrange: Callable[[Tensor], Tensor] | None) -> Tensor:
    return _values(raw if arrange is None else arrange(raw), kinds[0])


def _kept(
    raw: Tensor, kind: str, arrange: Callable[[Tensor], Tensor] | None, form: WeightFormat
) -> tuple[Tensor, Tensor]:
    """Return (bytes [N, K], scales of groups, each followed by an offset if `form` has them)."""
    numbers, scales, offsets = numbers_of(raw if arrange is None else arrange(raw), kind)
    signed = numbers.dtype is torch.int8
    unsigned = (numbers.short() + form.half).to(torch.uint8) if signed else numbers
    if not form.offsets:
        return unsigned, scales
    if offsets is None:
        offsets = torch.zeros_like(scales)
    elif not signed:  # the kernels subtract half the range
        offsets = offsets + form.half * scales
    return unsigned, torch.stack((scales, offsets), dim=-1).flatten(-2)


def _transposed(raw: Tensor, kinds: Read) -> Tensor:
    return _values(raw, kinds[0]).mT


def _gate_up(gate: Tensor, up: Tensor, kinds: Read) -> Tensor:
    """Return gpt-oss's gate and up, [E, D, 2F] or a bias [E, 2F], with their outputs alternating."""
    both = torch.stack([_values(raw, kind) for raw, kind in zip((gate, up), kinds, strict=True)], dim=2)
    joined = both.flatten(1, 2)
    return joined.mT if joined.dim() > 2 else joined


def _keys_and_values(key: Tensor, value: Tensor, kinds: Read) -> Tensor:
    """Return latent attention's kv_b_proj [H · (nope + value), latent] of keys [H, latent, nope] and values."""
    keys, values = (_values(raw, kind) for raw, kind in zip((key, value), kinds, strict=True))
    return torch.cat((keys.float().mT, values.float()), dim=1).flatten(0, 1)
