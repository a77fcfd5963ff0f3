"""Mappings of a checkpoint's tensors to weights. Independent of names and model families."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from moiety_kernels.quantization import Weight


@dataclass(frozen=True, slots=True)
class Chosen:
    """Selection of the experts `which` from a tensor that stacks `among` experts."""

    which: slice | list[int]
    among: int


@dataclass(frozen=True, slots=True)
class TensorMapping:
    """Mapping of a tensor with `shape` on disk to `view`, through `arrange` if given.

    `chosen`: experts to select first from a tensor that stacks experts; `shape` is then that of the selection.
    `takes_transposed`: the tensor may be stored with its last two dimensions exchanged. `sections`: numbers of rows of
    the parts that the tensor joins (query, key and value; gate and up), each of which is divided among ranks alone.
    `rows_of_expert`: rows of each expert in a tensor that joins the rows of all experts; 0 in other tensors.
    """

    view: Tensor
    shape: tuple[int, ...]
    arrange: Callable[[Tensor], Tensor] | None = None
    chosen: Chosen | None = None
    takes_transposed: bool = False
    sections: tuple[int, ...] = ()
    rows_of_expert: int = 0

    def fill(self, source: Tensor) -> None:
        """Copy a tensor read from disk into the weight."""
        self.view.copy_(source if self.arrange is None else self.arrange(source))


@dataclass(frozen=True, slots=True)
class Shares:
    """Mapping of a tensor with `shape` on disk to several `views`, which get the parts that `divide` returns."""

    views: tuple[Tensor, ...]
    shape: tuple[int, ...]
    divide: Callable[[Tensor], tuple[Tensor, ...]]

    def fill(self, source: Tensor) -> None:
        """Copy a tensor read from disk into the weights."""
        for view, part in zip(self.views, self.divide(source), strict=True):
            view.copy_(part)


def addresses(place: TensorMapping | Shares) -> set[int]:
    """Return the addresses of the storages that the mapping fills."""
    views = (place.view,) if isinstance(place, TensorMapping) else place.views
    return {view.untyped_storage().data_ptr() for view in views}


def plain(weight: Weight) -> Tensor:
    """Return a weight as a plain tensor; weights are filled before they are quantized."""
    assert isinstance(weight, Tensor)
    return weight


def whole(view: Tensor) -> TensorMapping:
    """Return the mapping of a tensor, unchanged, to the view."""
    return TensorMapping(view, tuple(view.shape))


def joined(view: Tensor, sections: tuple[int, ...]) -> TensorMapping:
    """Return the mapping of a tensor whose rows join `sections`, unchanged, to the view."""
    return TensorMapping(view, tuple(view.shape), sections=sections)


def raised(place: TensorMapping, offset: float) -> TensorMapping:
    """Return the mapping that adds `offset` to the tensor."""
    return TensorMapping(place.view, place.shape, lambda source: source.to(place.view.dtype) + offset)


def reshaped(view: Tensor, shape: tuple[int, ...]) -> TensorMapping:
    """Return the mapping of a tensor with another shape on disk, reshaped in element order."""
    return TensorMapping(view, shape, lambda source: source.reshape(view.shape))


Named = tuple[str, TensorMapping | Shares]  # name on disk, possibly relative to the layer's
