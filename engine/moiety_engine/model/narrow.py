"""Checkpoints whose matrices are kept in few bits beside their scales, read back as plain numbers. Knows no family.

Known are eight bits with a scale for each block of rows and columns (DeepSeek's `…_scale_inv`) and mxfp4 (OCP's
microscaling: four bits, and an exponent for every 32 of a row), as gpt-oss keeps its experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from moiety_engine.model.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from torch import Tensor

SCALE = "_scale_inv"
BLOCKS, EXPONENTS = "_blocks", "_scales"
MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the three bits below the sign
EXPONENT_BIAS = 127


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
    if not settings or method == "mxfp4":
        return None
    raise UnsupportedModelError(
        f"a checkpoint quantized by {method!r} is not supported; known are mxfp4 and fp8 with a weight_block_size. Use "
        "the unquantized one"
    )


def sources(present: set[str], block: tuple[int, int] | None) -> dict[str, Source]:
    """What stands on disk, by the name that each tensor would have in an unquantized checkpoint. `block`: the rows and
    columns that share a scale, in a checkpoint of eight bits."""
    found: dict[str, Source] = {}
    for name in present:
        if name.endswith(BLOCKS) and name.removesuffix(BLOCKS) + EXPONENTS in present:
            plain = name.removesuffix(BLOCKS)
            found[plain] = Source((name, plain + EXPONENTS), from_mxfp4)
        elif block is not None and name + SCALE in present:
            found[name] = Source((name, name + SCALE), partial(from_fp8, block=block))
        elif not _is_scale(name, present, block):
            found[name] = Source((name,), lambda tensor: tensor)
    return found


def _is_scale(name: str, present: set[str], block: tuple[int, int] | None) -> bool:
    of_fp8 = block is not None and name.endswith(SCALE) and name.removesuffix(SCALE) in present
    return of_fp8 or (name.endswith(EXPONENTS) and name.removesuffix(EXPONENTS) + BLOCKS in present)


def from_fp8(matrix: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """Each value times its block's scale, float32; blocks at the ends may be smaller."""
    rows, columns = matrix.shape[-2:]
    wide = scale.float().repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
    return matrix.float() * wide[..., :rows, :columns]


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
