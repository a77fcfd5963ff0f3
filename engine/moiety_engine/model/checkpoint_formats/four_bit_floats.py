"""Reader of floating-point numbers of four bits (e2m1) with scales of groups: mxfp4 and NVFP4.

mxfp4 (OCP microscaling) has an exponent for every 32 inputs; gpt-oss's experts are stored so. NVFP4 has a float8 scale
for every 16 inputs and one float32 scale for the matrix. In both a byte's lower half is the first of its two numbers.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from moiety_engine.model.checkpoint_formats.float8 import EXPONENT_BIAS, powers_of_two
from moiety_engine.model.checkpoint_formats.tensor_source import TensorSource
from moiety_kernels.quantization import NVFP4
from moiety_kernels.quantization.reference import MAGNITUDES

if TYPE_CHECKING:
    from torch import Tensor

BLOCKS, EXPONENTS = "_blocks", "_scales"
VALUES = (*MAGNITUDES, *(-value for value in MAGNITUDES))


def expert_sources(present: set[str]) -> dict[str, TensorSource]:
    """Return the sources of experts in mxfp4, as gpt-oss stores them."""
    plain = (name.removesuffix(BLOCKS) for name in present if name.endswith(BLOCKS))
    return {
        name: TensorSource((name + BLOCKS, name + EXPONENTS), from_mxfp4, is_narrow=True)
        for name in plain
        if name + EXPONENTS in present
    }


def from_mxfp4(blocks: Tensor, exponents: Tensor) -> Tensor:
    """Return the exact values of mxfp4 experts, bfloat16 [E, columns, rows].

    `blocks`: bytes [E, rows, columns / 32, 16], the lower half of a byte first. `exponents`: [E, rows, columns / 32].
    """
    values = torch.tensor(VALUES, dtype=torch.bfloat16)
    made = []
    for bytes_of_one, exponents_of_one in zip(blocks, exponents, strict=True):  # one expert's indices at a time
        pairs = torch.stack((bytes_of_one & 0x0F, bytes_of_one >> 4), dim=-1).flatten(-2)
        scaled = torch.ldexp(values[pairs.int()], (exponents_of_one.int() - EXPONENT_BIAS).unsqueeze(-1))
        made.append(scaled.flatten(-2).T)
    return torch.stack(made)


def codes(packed: Tensor) -> Tensor:
    """Return the numbers' codes, uint8 [..., K], from bytes [..., K / 2]. Raises ValueError."""
    if packed.dtype is not torch.uint8:
        raise ValueError(f"the values are packed into {packed.dtype}, not uint8")
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def from_codes(packed: Tensor, scales: Tensor, group: int) -> Tensor:
    """Return the values, float32 [..., K]. `scales`: float32 [..., K / group]. Raises ValueError."""
    numbers = codes(packed)
    if tuple(scales.shape) != (*numbers.shape[:-1], numbers.shape[-1] // group):
        raise ValueError(f"scales of shape {tuple(scales.shape)} do not match groups of {group}")
    values = torch.tensor(VALUES)[numbers.int()].view(*scales.shape, group)
    return (values * scales.unsqueeze(-1)).flatten(-2)


def from_dense_mxfp4(packed: Tensor, exponents: Tensor) -> Tensor:
    """Return the values of a matrix, float32 [N, K], from bytes [N, K / 2] and exponents uint8 [N, K / 32]."""
    return from_codes(packed, powers_of_two(exponents), 32)


def kept_dense_mxfp4(packed: Tensor, exponents: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers' codes and the scales of groups, as `StoredPrecision` takes them; see `from_dense_mxfp4`."""
    return codes(packed), powers_of_two(exponents)


def from_nvfp4(packed: Tensor, scale: Tensor, whole: Tensor, *, divides: bool) -> Tensor:
    """Return the values of a matrix, float32 [N, K], from bytes [N, K / 2] and float8 scales [N, K / 16].

    `whole`: the scale of the matrix, by which the others are multiplied, or, if it `divides`, divided.
    """
    assert NVFP4.group is not None
    return from_codes(packed, _scales(scale, whole, divides=divides), NVFP4.group)


def _kept_nvfp4(packed: Tensor, scale: Tensor, whole: Tensor, *, divides: bool) -> tuple[Tensor, Tensor]:
    return codes(packed), _scales(scale, whole, divides=divides)


def _scales(scale: Tensor, whole: Tensor, *, divides: bool) -> Tensor:
    factor = whole.float().reshape(())
    return scale.float() / factor if divides else scale.float() * factor


def nvfp4_source(packed: str, scale: str, whole: str, *, divides: bool) -> TensorSource:
    """Return the source of one NVFP4 matrix; `divides`: see `from_nvfp4`."""
    make, keep = partial(from_nvfp4, divides=divides), partial(_kept_nvfp4, divides=divides)
    return TensorSource((packed, scale, whole), make, keep, is_narrow=True)
