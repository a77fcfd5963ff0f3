"""Where a tensor of a checkpoint goes. Knows no name and no family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from moiety_kernels.quantization import Weight


@dataclass(frozen=True, slots=True)
class Chosen:
    """Of a tensor that stacks so many experts, those in `which`."""

    which: slice | list[int]
    among: int


@dataclass(frozen=True, slots=True)
class TensorMapping:
    """`view` takes what `arrange` makes of a tensor that has `shape` on disk; without `arrange`, the tensor itself. Of
    one that stacks experts those that are `chosen`; the shape is then theirs."""

    view: Tensor
    shape: tuple[int, ...]
    arrange: Callable[[Tensor], Tensor] | None = None
    chosen: Chosen | None = None

    def fill(self, source: Tensor) -> None:
        """Copy what was read from disk to where it belongs."""
        self.view.copy_(source if self.arrange is None else self.arrange(source))


@dataclass(frozen=True, slots=True)
class Shares:
    """The `views` take what `divide` makes of a tensor that has `shape` on disk."""

    views: tuple[Tensor, ...]
    shape: tuple[int, ...]
    divide: Callable[[Tensor], tuple[Tensor, ...]]

    def fill(self, source: Tensor) -> None:
        """Copy what was read from disk to where it belongs."""
        for view, part in zip(self.views, self.divide(source), strict=True):
            view.copy_(part)


def addresses(place: TensorMapping | Shares) -> set[int]:
    """Where the memory begins that it fills."""
    views = (place.view,) if isinstance(place, TensorMapping) else place.views
    return {view.untyped_storage().data_ptr() for view in views}


def plain(weight: Weight) -> Tensor:
    """The weight as it is filled; only then is it put into few bits."""
    assert isinstance(weight, Tensor)
    return weight


def whole(view: Tensor) -> TensorMapping:
    """The view takes the tensor as it is."""
    return TensorMapping(view, tuple(view.shape))


def raised(place: TensorMapping, offset: float) -> TensorMapping:
    """The view takes the tensor plus `offset`."""
    return TensorMapping(place.view, place.shape, lambda source: source.to(place.view.dtype) + offset)


def reshaped(view: Tensor, shape: tuple[int, ...]) -> TensorMapping:
    """The view takes the tensor, which has another shape on disk, in the order of its elements."""
    return TensorMapping(view, shape, lambda source: source.reshape(view.shape))


Named = tuple[str, TensorMapping | Shares]  # the name on disk, which may be relative to the layer's
