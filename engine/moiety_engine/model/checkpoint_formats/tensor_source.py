"""Sources of tensors: which tensors on disk form a tensor of the model, and how. Independent of formats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

    from moiety_kernels.quantization import WeightFormat

INPUT_SCALES = (".input_scale", ".input_global_scale")  # of activations; not used, each row gets scales of its own


@dataclass(frozen=True, slots=True)
class TensorSource:
    """Tensors on disk that form one tensor, and the functions that combine them.

    `make` returns the dequantized tensor. `keep` returns it quantized, as (bytes of its shape, scales of its rows and
    groups), see `StoredPrecision`; None if it can only be dequantized. `is_narrow`: it is stored in the format of the
    checkpoint's products. `widened`: the format that it is stored in, if another one. `order`: name of the tensor on
    disk that assigns inputs to groups, if `keep` sorts them.
    """

    names: tuple[str, ...]
    make: Callable[..., Tensor]
    keep: Callable[..., tuple[Tensor, Tensor]] | None = None
    is_narrow: bool = False
    widened: str = ""
    order: str = ""


@dataclass(frozen=True, slots=True)
class StoredQuantization:
    """Quantization of a checkpoint.

    `form`: format of the products that can be kept as stored; None if all are dequantized. `find_sources` returns the
    sources of the quantized tensors among the names in the files, by the names that they would have in an unquantized
    checkpoint. `unused`: suffixes of tensors that the format adds and that are not read.
    """

    name: str
    form: WeightFormat | None
    find_sources: Callable[[set[str]], dict[str, TensorSource]]
    unused: tuple[str, ...] = INPUT_SCALES


def sources(present: Iterable[str], stored: StoredQuantization | None = None) -> dict[str, TensorSource]:
    """Return the sources of all tensors, by the names that they would have in an unquantized checkpoint."""
    names = set(present)
    found = {} if stored is None else stored.find_sources(names)
    parts = {part for source in found.values() for part in source.names}
    unused = () if stored is None else stored.unused
    plain = (name for name in names - parts if name not in found and not (unused and name.endswith(unused)))
    return {name: TensorSource((name,), as_it_is) for name in plain} | found


def as_it_is(tensor: Tensor) -> Tensor:
    """Return the tensor unchanged. Raises ValueError for float8, which would need a scale."""
    if tensor.is_floating_point() and tensor.itemsize == 1:
        raise ValueError("it is float8 but has no scale")
    return tensor
