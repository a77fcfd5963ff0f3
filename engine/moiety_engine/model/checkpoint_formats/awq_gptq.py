"""Reader of AWQ and GPTQ checkpoints: integers packed into int32 words, with scales and zero points of groups.

Both store a matrix with its inputs as rows. GPTQ packs a column's numbers one after the other; AWQ (GEMM layout) packs
eight neighbouring outputs in an interleaved order. K inputs, N outputs, G groups.

AWQ: Lin et al., "AWQ: Activation-aware Weight Quantization", 2023. GPTQ: Frantar et al., 2022.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from moiety_engine.model.checkpoint_formats.integers import from_integers, kept_integers, unpacked
from moiety_engine.model.checkpoint_formats.tensor_source import StoredQuantization, TensorSource
from moiety_engine.model.quantization_formats import method_name, refused
from moiety_kernels.quantization import WeightFormat

if TYPE_CHECKING:
    from torch import Tensor

NUMBERS, ZEROS, SCALES, ORDER = ".qweight", ".qzeros", ".scales", ".g_idx"
_AWQ_BITS = 4
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # place in a word of each of eight neighbouring outputs


def awq(settings: dict[str, Any]) -> StoredQuantization:
    """Return the quantization of an AWQ checkpoint. Raises UnsupportedModelError."""
    bits = settings.get("bits", settings.get("w_bit"))
    version = str(settings.get("version", "gemm")).lower()
    if bits != _AWQ_BITS or version != "gemm" or settings.get("zero_point", True) is not True:
        raise refused(f"{method_name(settings)} of version {version!r}, other than 4 bits with zero points in 'gemm'")
    group = _group(settings.get("group_size", settings.get("q_group_size")))
    form = WeightFormat("int4", _AWQ_BITS, group, offsets=True)
    return _quantization("AWQ", form, partial(_sources, make=partial(_made_awq, group=group), form=form))


def gptq(settings: dict[str, Any]) -> StoredQuantization:
    """Return the quantization of a GPTQ checkpoint. Raises UnsupportedModelError.

    With `desc_act` the inputs of a group lie apart; kept weights have them sorted. 2 bits, and 8 bits with zero points,
    are dequantized.
    """
    bits, layout = settings.get("bits"), str(settings.get("checkpoint_format") or "gptq")
    others = [name for name in settings.get("dynamic") or {} if not str(name).startswith("-:")]
    if bits not in (2, 4, 8) or layout not in ("gptq", "gptq_v2") or others:
        raise refused(
            f"{method_name(settings)} in the layout {layout!r}{', with other bits in some layers' * any(others)}"
        )
    group, symmetric = _group(settings.get("group_size")), bool(settings.get("sym", True))
    in_order = not settings.get("desc_act") or bool(settings.get("static_groups")) or group is None
    kept = bits == 4 or (bits == 8 and symmetric)
    form = WeightFormat(f"int{bits}", bits, group, offsets=not symmetric, ordered=not in_order) if kept else None
    read: dict[str, Any] = {"bits": bits, "group": group, "stored_less": int(layout == "gptq")}
    find = partial(_sources, make=partial(_made_gptq, **read), form=form, **read)
    return _quantization(method_name(settings), form, find)


def _group(size: Any) -> int | None:
    """Return the inputs of a group; None for -1, one group a row."""
    if not isinstance(size, int) or not (size == -1 or size > 0):
        raise ValueError(f"group_size {size!r}")
    return None if size == -1 else size


def _quantization(name: str, form: WeightFormat | None, find: Any) -> StoredQuantization:
    return StoredQuantization(name, form, find, unused=())


def _sources(present: set[str], make: Any, form: WeightFormat | None, **read: Any) -> dict[str, TensorSource]:
    found = {}
    for name in present:
        module = name.removesuffix(NUMBERS)
        if module == name:
            continue
        ends = (NUMBERS, ZEROS, SCALES, *([ORDER] if module + ORDER in present else []))
        names = tuple(module + end for end in ends)
        if form is None:
            found[f"{module}.weight"] = TensorSource(names, make, widened=f"{read['bits']} bits")
        else:
            keep = partial(_kept_gptq, form=form, **read) if read else partial(_kept_awq, form=form)
            order = module + ORDER if form.ordered and module + ORDER in present else ""
            found[f"{module}.weight"] = TensorSource(names, make, keep, is_narrow=True, order=order)
    return found


def _made_awq(packed: Tensor, zeros: Tensor, scales: Tensor, group: int | None) -> Tensor:
    return from_integers(_awq_numbers(packed), scales.T, _awq_numbers(zeros), _AWQ_BITS, group)


def _kept_awq(packed: Tensor, zeros: Tensor, scales: Tensor, form: WeightFormat) -> tuple[Tensor, Tensor]:
    return kept_integers(_awq_numbers(packed), scales.T, _awq_numbers(zeros), form)


def _awq_numbers(words: Tensor) -> Tensor:
    """Return the numbers, uint8 [N, K], of words int32 [K, N / 8]."""
    numbers = unpacked(words, _AWQ_BITS).view(len(words), -1, len(_AWQ_PLACES))
    return numbers[..., list(_AWQ_PLACES)].flatten(-2).T.contiguous()


def _made_gptq(
    packed: Tensor, zeros: Tensor, scales: Tensor, order: Tensor | None = None, *,
    bits: int, group: int | None, stored_less: int,
) -> Tensor:  # fmt: skip
    numbers = unpacked(packed.T, bits)
    return from_integers(numbers, scales.T, _gptq_zeros(zeros, bits, stored_less), bits, group, order)


def _kept_gptq(
    packed: Tensor, zeros: Tensor, scales: Tensor, order: Tensor | None = None, *,
    bits: int, group: int | None, stored_less: int, form: WeightFormat,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    numbers = unpacked(packed.T, bits)
    if order is not None and not form.ordered:
        width = numbers.shape[-1]
        if not torch.equal(order, torch.arange(width, dtype=order.dtype) // (group or width)):
            raise ValueError("config.json does not say desc_act, but g_idx has groups whose inputs lie apart")
        order = None
    return kept_integers(numbers, scales.T, _gptq_zeros(zeros, bits, stored_less), form, order)


def _gptq_zeros(zeros: Tensor, bits: int, stored_less: int) -> Tensor:
    """Return the zero points [N, G] of words int32 [G, N · bits / 32]; the first layout stores them less 1."""
    return (unpacked(zeros, bits) + stored_less & (1 << bits) - 1).T
