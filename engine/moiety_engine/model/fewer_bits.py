"""Putting a decoder's products into few bits while they are read: each as soon as all of it has been filled, so that no
more than a few are ever held in full."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moiety_engine.model.errors import UnsupportedModelError
from moiety_engine.model.names.place import Place
from moiety_engine.model.residence import named_tensors
from moiety_engine.model.weights import (
    AttentionWeights,
    DenseWeights,
    LatentAttentionWeights,
    ModelWeights,
    MoeWeights,
    allocate,
)
from moiety_kernels.quantization import QuantizedWeight, quantize
from moiety_kernels.quantization.weight import BLOCK, GPU_PACK

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from moiety_engine.model.names.place import Shares
    from moiety_engine.model.spec import ModelSpec
    from moiety_kernels.quantization import WeightFormat

_PRODUCTS: dict[type, tuple[str, ...]] = {  # the weights that take most of the memory and of the time
    AttentionWeights: ("qkv_CD", "output_DC"),
    LatentAttentionWeights: ("input_CD", "query_up", "output_DC"),
    DenseWeights: ("gate_up_2FD", "down_DF"),
    MoeWeights: ("gate_up_E2FD", "down_EDF"),
}


class FewerBits:
    """Owns, while a checkpoint is read, which weights wait for which tensors. `weights` are those that are filled, on a
    CPU; those of products, of a floating format only the experts', are emptied once they are in few bits, on `device`.
    """

    def __init__(
        self,
        weights: ModelWeights,
        places: Mapping[str, Place | Shares],
        form: WeightFormat,
        device: torch.device,
    ) -> None:
        self._weights, self._form, self._device = weights, form, device
        self._done: dict[int, QuantizedWeight] = {}  # by the product's identity, as is what follows
        self._moved: dict[int, Tensor] = {}
        products = {product.untyped_storage().data_ptr(): product for product in _products(weights, form)}
        for product in products.values():
            if not form.takes(product.shape[-1]):
                raise UnsupportedModelError(
                    f"{form.name} takes rows of a multiple of {form.group or BLOCK} numbers, and the model has some of "
                    f"{product.shape[-1]}; load it without quantization, or in another one"
                )
        self._of_place = {
            id(place): [products[address] for address in _addresses(place) if address in products]
            for place in places.values()
        }
        self._missing = Counter(id(product) for some in self._of_place.values() for product in some)

    def filled(self, place: Place | Shares) -> None:
        """That place has been filled."""
        for product in self._of_place[id(place)]:
            self._missing[id(product)] -= 1
            if not self._missing[id(product)]:
                narrow = quantize(product, self._form)
                values, scales = narrow.values_NK.to(self._device), narrow.scales_NG.to(self._device)
                self._done[id(product)] = QuantizedWeight(values, scales, self._form)
                product.untyped_storage().resize_(0)  # gives the memory back, though places still have views of it

    def finish(self) -> ModelWeights:
        """All weights, on the device."""
        finished: ModelWeights = self._finish(self._weights)
        return finished

    def _finish(self, part: Any) -> Any:
        if isinstance(part, tuple):
            return tuple(map(self._finish, part))
        if isinstance(part, Tensor):
            return self._done.get(id(part)) or self._moved.setdefault(id(part), part.to(self._device))
        if not is_dataclass(part) or isinstance(part, type):
            return part
        return replace(part, **{field.name: self._finish(getattr(part, field.name)) for field in fields(part)})


def bytes_in(form: WeightFormat, spec: ModelSpec, dtype: torch.dtype) -> int:
    """Memory that the model's weights take with those of products in few bits."""
    weights = allocate(spec, device=torch.device("meta"), dtype=dtype)
    products = list(_products(weights, form))
    plain = {id(tensor): tensor.nbytes for _, tensor in named_tensors(weights)}
    rest = sum(plain.values()) - sum(plain[id(product)] for product in products)
    scales = sum(4 * product.numel() // product.shape[-1] * form.num_groups(product.shape[-1]) for product in products)
    return rest + scales + sum(product.numel() * form.bits // 8 for product in products)


def products_among(weights: ModelWeights, places: Mapping[str, Place | Shares]) -> set[str]:
    """The names of the tensors that products are made of."""
    addresses = {product.untyped_storage().data_ptr() for product in _products(weights)}
    return {name for name, place in places.items() if _addresses(place) & addresses}


def as_packed_for_a_gpu(form: WeightFormat, spec: ModelSpec) -> WeightFormat | None:
    """The format whose four bits lie as a GPU's kernels read them, or None if some of the model's products are not as
    wide as that asks for."""
    packed = replace(form, pack=GPU_PACK)
    weights = allocate(spec, device=torch.device("meta"), dtype=torch.bfloat16)
    return packed if all(packed.takes(product.shape[-1]) for product in _products(weights, form)) else None


def _products(part: Any, form: WeightFormat | None = None) -> Iterator[Tensor]:
    """Those that are kept in `form`."""
    if isinstance(part, tuple):
        for one in part:
            yield from _products(one, form)
    elif is_dataclass(part):
        experts_only = form is not None and form.floating
        names = _PRODUCTS.get(type(part), ()) if isinstance(part, MoeWeights) or not experts_only else ()
        for field in fields(part):
            value = getattr(part, field.name)
            if field.name in names and value is not None:
                yield value
            else:
                yield from _products(value, form)


def _addresses(place: Place | Shares) -> set[int]:
    views = (place.view,) if isinstance(place, Place) else place.views
    return {view.untyped_storage().data_ptr() for view in views}
