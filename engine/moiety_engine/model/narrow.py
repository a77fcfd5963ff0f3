"""Checkpoints whose matrices are kept in few bits beside their scales, read back as plain numbers. Knows no family.

Known are eight bits with a scale for each block of rows and columns (DeepSeek's `…_scale_inv`), mxfp4 (OCP's
microscaling: four bits, and an exponent for every 32 of a row), as gpt-oss keeps its experts, and whole numbers of four
or eight bits packed into int32, the lowest bits first (`pack-quantized` of compressed-tensors).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from moiety_engine.model.errors import UnsupportedModelError
from moiety_kernels.quantization.weight import MXFP4, WeightFormat

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from torch import Tensor

SCALE = "_scale_inv"
BLOCKS, EXPONENTS = "_blocks", "_scales"
MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the three bits below the sign
EXPONENT_BIAS = 127
PACKED_METHOD, PACKED_FORMAT = "compressed-tensors", "pack-quantized"
PACKED, SCALES, SHAPE = "_packed", "_scale", "_shape"  # after the name of the weight


@dataclass(frozen=True, slots=True)
class Source:
    """The tensors on disk that one tensor is made of, and how."""

    names: tuple[str, ...]
    make: Callable[..., Tensor]


def fp8_block(settings: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns that share a scale, by a config.json's quantization_config, if the checkpoint is of eight bits.
    Raises UnsupportedModelError unless the checkpoint is of a kind that can be read."""
    method, block = settings.get("quant_method"), settings.get("weight_block_size")
    if method == "fp8" and block:
        return int(block[0]), int(block[1])
    if not settings or method in ("mxfp4", PACKED_METHOD):
        return None
    raise UnsupportedModelError(
        f"a checkpoint quantized by {method!r} is not supported; known are mxfp4, fp8 with a weight_block_size, and "
        f"{PACKED_METHOD} with packed whole numbers. Use the unquantized one"
    )


def packed_format(settings: Mapping[str, Any]) -> WeightFormat | None:
    """How whole numbers are packed, by a config.json's quantization_config, if they are, or MXFP4 if experts are that.
    Raises UnsupportedModelError for what cannot be read."""
    if settings.get("quant_method") == "mxfp4":
        return MXFP4
    if settings.get("quant_method") != PACKED_METHOD:
        return None
    groups = list((settings.get("config_groups") or {}).values())
    weights = (groups[0].get("weights") or {}) if len(groups) == 1 else {}
    by_row = weights.get("strategy") == "channel"
    readable = (
        settings.get("format") == PACKED_FORMAT
        and weights.get("type") == "int"
        and weights.get("num_bits") in (4, 8)
        and weights.get("symmetric")
        and (by_row or weights.get("strategy") == "group")
        and not groups[0].get("input_activations")
    )
    if not readable:
        raise UnsupportedModelError(
            f"of {PACKED_METHOD}'s checkpoints those are supported that pack all weights as symmetric whole numbers of "
            "4 or 8 bits by rows or groups, and no activations; use another one, or the unquantized one"
        )
    bits = int(weights["num_bits"])
    return WeightFormat(f"int{bits}", bits, None if by_row else int(weights["group_size"]))


def sources(present: set[str], block: tuple[int, int] | None, packed: WeightFormat | None = None) -> dict[str, Source]:
    """What stands on disk, by the name that each tensor would have in an unquantized checkpoint. `block`: the rows and
    columns that share a scale, in a checkpoint of eight bits. `packed`: how whole numbers are, in one that has them."""
    found: dict[str, Source] = {}
    for name in present:
        if name.endswith(BLOCKS) and name.removesuffix(BLOCKS) + EXPONENTS in present:
            plain = name.removesuffix(BLOCKS)
            found[plain] = Source((name, plain + EXPONENTS), from_mxfp4)
        elif block is not None and name + SCALE in present:
            found[name] = Source((name, name + SCALE), partial(from_fp8, block=block))
        elif packed is not None and not packed.floating and name.endswith(PACKED):
            plain = name.removesuffix(PACKED)
            found[plain] = Source((name, plain + SCALES, plain + SHAPE), partial(from_packed, bits=packed.bits))
        elif not _is_scale(name, present, block, packed):
            found[name] = Source((name,), lambda tensor: tensor)
    return found


def _is_scale(name: str, present: set[str], block: tuple[int, int] | None, packed: WeightFormat | None) -> bool:
    if (
        packed is not None
        and not packed.floating
        and any(name.removesuffix(end) + PACKED in present for end in (SCALES, SHAPE))
    ):
        return True
    of_fp8 = block is not None and name.endswith(SCALE) and name.removesuffix(SCALE) in present
    return of_fp8 or (name.endswith(EXPONENTS) and name.removesuffix(EXPONENTS) + BLOCKS in present)


def from_fp8(matrix: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """Each value times its block's scale, float32; blocks at the ends may be smaller."""
    rows, columns = matrix.shape[-2:]
    wide = scale.float().repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
    return matrix.float() * wide[..., :rows, :columns]


def from_packed(packed: Tensor, scale: Tensor, shape: Tensor, bits: int) -> Tensor:
    """float32 [N, K] from int32 [N, ⌈K · bits / 32⌉], numbers plus half their range, and scales [N, G]."""
    rows, width = shape.tolist()
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    numbers = (packed.unsqueeze(-1) >> shifts & (1 << bits) - 1).flatten(-2)[:, :width] - (1 << bits - 1)
    return (numbers.view(rows, scale.shape[1], -1).float() * scale.float().unsqueeze(-1)).view(rows, width)


def to_packed(q_NK: Tensor, scales_NG: Tensor, bits: int) -> dict[str, Tensor]:
    """What `from_packed` reads, by the ends of the names."""
    rows, width = q_NK.shape
    a_word = 32 // bits
    shifts = torch.arange(0, 32, bits, dtype=torch.int64)
    numbers = functional.pad(q_NK.long() + (1 << bits - 1), (0, -width % a_word)).view(rows, -1, a_word)
    words = (numbers << shifts).sum(-1)
    signed = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    return {PACKED: signed, SCALES: scales_NG, SHAPE: torch.tensor([rows, width])}


def from_mxfp4(blocks: Tensor, exponents: Tensor) -> Tensor:
    """bfloat16, exact, [E, columns, rows] from bytes [E, rows, columns / 32, 16], the lower half of a byte first, and
    exponents [E, rows, columns / 32]."""
    values = torch.tensor([*MXFP4_VALUES, *(-value for value in MXFP4_VALUES)], dtype=torch.bfloat16)
    made = []
    for bytes_of_one, exponents_of_one in zip(blocks, exponents, strict=True):  # one expert's indices at a time
        pairs = torch.stack((bytes_of_one & 0x0F, bytes_of_one >> 4), dim=-1).flatten(-2)
        scaled = torch.ldexp(values[pairs.int()], (exponents_of_one.int() - EXPONENT_BIAS).unsqueeze(-1))
        made.append(scaled.flatten(-2).T)
    return torch.stack(made)
