"""Readers of quantized checkpoints: quantized matrices with their scales, as stored or dequantized.

Independent of model families. Supported formats: float8 with a scale per block of rows and columns (DeepSeek's
`…_scale_inv`), per row or per matrix (`float-quantized` of compressed-tensors, and others' `fp8`); mxfp4 (OCP
microscaling: 4 bits, and an exponent for every 32 values of a row), used by the experts of gpt-oss; and integers of 4
or 8 bits packed into int32, lowest bits first (`pack-quantized` of compressed-tensors).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from moiety_engine.model.quantization_formats import method_name, refused
from moiety_kernels.quantization import FP8, MXFP4, QuantizedWeight, WeightFormat, dequantize

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from torch import Tensor

INVERSE = "_scale_inv"  # suffix to the weight's name, like the following ones
BLOCKS, EXPONENTS = "_blocks", "_scales"
MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # indexed by the three bits below the sign bit
EXPONENT_BIAS = 127
COMPRESSED, PACKED_FORMAT, FLOAT_FORMAT = "compressed-tensors", "pack-quantized", "float-quantized"
PACKED, SCALES, SHAPE = "_packed", "_scale", "_shape"
_IN_ORDER = (None, False, "weight", "static")  # groups of adjacent inputs; otherwise `_g_idx` assigns inputs to groups
INPUT_SCALE = ".input_scale"  # static scale of activations; not used, since each row is quantized with its own scales


@dataclass(frozen=True, slots=True)
class TensorSource:
    """Tensors on disk that form one tensor, and the functions that combine them.

    `make` returns the dequantized tensor. `keep` returns it quantized, as (bytes of its shape, scales of its rows and
    groups); None if it can only be dequantized.
    """

    names: tuple[str, ...]
    make: Callable[..., Tensor]
    keep: Callable[..., tuple[Tensor, Tensor]] | None = None

    @property
    def is_narrow(self) -> bool:
        """Return whether the tensor is quantized on disk."""
        return len(self.names) > 1


def stored_format(settings: Mapping[str, Any]) -> WeightFormat | None:
    """Return the weight format of a config.json's quantization_config; MXFP4 if experts are mxfp4; None if it is empty.

    Raises UnsupportedModelError for unsupported formats.
    """
    method = settings.get("quant_method")
    if not settings:
        return None
    if method == "mxfp4":
        return MXFP4
    if method == "fp8" and settings.get("fmt", "e4m3") in ("e4m3", "float8_e4m3fn"):
        return _float8(settings.get("weight_block_size"))
    if method == COMPRESSED:
        return _compressed(settings)
    raise refused(method_name(settings))


def _float8(block: Any) -> WeightFormat:
    return WeightFormat(FP8.name, 8, int(block[1]), floating=True, rows=int(block[0])) if block else FP8


def _compressed(settings: Mapping[str, Any]) -> WeightFormat:
    groups = list((settings.get("config_groups") or {}).values())
    weights = (groups[0].get("weights") or {}) if len(groups) == 1 else {}
    layout, strategy, bits = settings.get("format"), weights.get("strategy"), weights.get("num_bits")
    if layout == FLOAT_FORMAT and weights.get("type") == "float" and bits == 8 and weights.get("symmetric"):
        if strategy in ("tensor", "channel"):
            return FP8
        if strategy == "block" and weights.get("block_structure"):
            return _float8(weights["block_structure"])
    whole = layout == PACKED_FORMAT and weights.get("type") == "int" and bits in (4, 8) and weights.get("symmetric")
    whole = whole and weights.get("actorder") in _IN_ORDER
    if whole and strategy in ("channel", "group") and not groups[0].get("input_activations"):
        group = None if strategy == "channel" else int(weights["group_size"])
        return WeightFormat(f"int{bits}", int(weights["num_bits"]), group)
    raise refused(f"{COMPRESSED} {_description(settings, groups)}")


def _description(settings: Mapping[str, Any], groups: list[Any]) -> str:
    """Return a readable description of the weights in a compressed-tensors configuration."""
    if len(groups) != 1:
        return f"{settings.get('format')!r} with {len(groups)} groups of layers of their own"
    weights, inputs = groups[0].get("weights") or {}, groups[0].get("input_activations") or {}
    kind = f"{weights.get('num_bits')} bits, {weights.get('type')}, by {weights.get('strategy')}"
    more = [] if weights.get("symmetric", True) else ["asymmetric"]
    more += [f"activation ordering {weights['actorder']!r}"] if weights.get("actorder") else []
    more += [f"activations in {inputs.get('num_bits')} bits"] if inputs else []
    more += ["sparse"] if settings.get("sparsity_config") else []
    return f"{settings.get('format')!r} ({', '.join([kind, *more])})"


def sources(present: set[str], form: WeightFormat | None = None) -> dict[str, TensorSource]:
    """Return the sources of all tensors, by the names that they would have in an unquantized checkpoint.

    `form`: format of the weights on disk, if they are quantized.
    """
    found: dict[str, TensorSource] = {}
    for name in present:
        scale = next((name + end for end in (INVERSE, SCALES) if name + end in present), None)
        if name.endswith(BLOCKS) and name.removesuffix(BLOCKS) + EXPONENTS in present:
            plain = name.removesuffix(BLOCKS)
            found[plain] = TensorSource((name, plain + EXPONENTS), from_mxfp4)
        elif form is not None and form.is_float8 and scale is not None:
            found[name] = TensorSource((name, scale), partial(from_float8, form=form), partial(kept_float8, form=form))
        elif form is not None and not form.floating and name.endswith(PACKED):
            plain = name.removesuffix(PACKED)
            parts = (name, plain + SCALES, plain + SHAPE)
            found[plain] = TensorSource(parts, partial(from_packed, form=form), partial(kept_packed, form=form))
        elif not _is_scale(name, present, form):
            found[name] = TensorSource((name,), as_it_is)
    return found


def _is_scale(name: str, present: set[str], form: WeightFormat | None) -> bool:
    if name.endswith(EXPONENTS) and name.removesuffix(EXPONENTS) + BLOCKS in present:
        return True
    if form is None:
        return False
    if form.is_float8:
        of_weight = any(name.endswith(end) and name.removesuffix(end) in present for end in (INVERSE, SCALES))
        return of_weight or name.endswith(INPUT_SCALE)
    return not form.floating and any(name.removesuffix(end) + PACKED in present for end in (SCALES, SHAPE))


def as_it_is(tensor: Tensor) -> Tensor:
    """Return the tensor unchanged. Raises ValueError for float8, which would need a scale."""
    if tensor.is_floating_point() and tensor.itemsize == 1:
        raise ValueError("it is float8 but has no scale")
    return tensor


def kept_float8(matrix: Tensor, scale: Tensor, form: WeightFormat) -> tuple[Tensor, Tensor]:
    """Return (bytes [..., N, K], scales float32 [..., N, G]) of a float8_e4m3fn matrix.

    `scale` is that of the matrix, or those of its rows or blocks; the last blocks may be smaller. Raises ValueError.
    """
    if matrix.dtype is not torch.float8_e4m3fn:
        raise ValueError(f"the values are {matrix.dtype}, not float8_e4m3fn")
    *stacked, rows, width = matrix.shape
    wide = scale.float()
    if wide.numel() == 1:
        wide = wide.reshape(1, 1)
    elif form.group is None:
        wide = wide.reshape(*stacked, rows, 1)
    elif tuple(scale.shape) == (*stacked, -(-rows // form.rows), -(-width // form.group)):
        wide = wide.repeat_interleave(form.rows, -2)[..., :rows, :]
    else:
        raise ValueError(f"scales of shape {tuple(scale.shape)} do not match blocks of {form.rows} by {form.group}")
    return matrix.view(torch.uint8), wide.expand(*matrix.shape[:-1], form.num_groups(width))


def from_float8(matrix: Tensor, scale: Tensor, form: WeightFormat) -> Tensor:
    """Return each value times its scale, float32."""
    values, scales = kept_float8(matrix, scale, form)
    return dequantize(QuantizedWeight(values.view(torch.float8_e4m3fn), scales, form))


def kept_packed(packed: Tensor, scale: Tensor, shape: Tensor, form: WeightFormat) -> tuple[Tensor, Tensor]:
    """Return (bytes [N, K], scales float32 [N, G]) from int32 [N, ⌈K · bits / 32⌉] and scales [N, G].

    The bytes are the numbers plus half their range. Raises ValueError.
    """
    if packed.dtype is not torch.int32:
        raise ValueError(f"the values are packed into {packed.dtype}, not int32")
    rows, width = shape.tolist()
    if tuple(scale.shape) != (rows, form.num_groups(width)):
        raise ValueError(f"scales of shape {tuple(scale.shape)} do not match groups of {form.group or width}")
    numbers = packed.view(torch.uint8)  # a word's lowest bits are its first byte
    if form.bits == 4:
        numbers = torch.stack((numbers & 15, numbers >> 4), dim=-1).flatten(-2)
    return numbers[:, :width], scale.float()


def from_packed(packed: Tensor, scale: Tensor, shape: Tensor, form: WeightFormat) -> Tensor:
    """Return each number times its scale, float32 [N, K]."""
    numbers, scales = kept_packed(packed, scale, shape, form)
    groups = (numbers.float() - form.half).reshape(*scales.shape, -1)
    return (groups * scales.unsqueeze(-1)).flatten(-2)


def to_packed(q_NK: Tensor, scales_NG: Tensor, bits: int) -> dict[str, Tensor]:
    """Return the packed tensors that `from_packed` reads, by name suffix."""
    rows, width = q_NK.shape
    a_word = 32 // bits
    shifts = torch.arange(0, 32, bits, dtype=torch.int64)
    numbers = functional.pad(q_NK.long() + (1 << bits - 1), (0, -width % a_word)).view(rows, -1, a_word)
    words = (numbers << shifts).sum(-1)
    signed = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    return {PACKED: signed, SCALES: scales_NG, SHAPE: torch.tensor([rows, width])}


def from_mxfp4(blocks: Tensor, exponents: Tensor) -> Tensor:
    """Return the exact values of mxfp4 experts, bfloat16 [E, columns, rows].

    `blocks`: bytes [E, rows, columns / 32, 16], the lower half of a byte first. `exponents`: [E, rows, columns / 32].
    """
    values = torch.tensor([*MXFP4_VALUES, *(-value for value in MXFP4_VALUES)], dtype=torch.bfloat16)
    made = []
    for bytes_of_one, exponents_of_one in zip(blocks, exponents, strict=True):  # one expert's indices at a time
        pairs = torch.stack((bytes_of_one & 0x0F, bytes_of_one >> 4), dim=-1).flatten(-2)
        scaled = torch.ldexp(values[pairs.int()], (exponents_of_one.int() - EXPONENT_BIAS).unsqueeze(-1))
        made.append(scaled.flatten(-2).T)
    return torch.stack(made)
