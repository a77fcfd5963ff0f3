"""Quantization of a decoder's products during loading.

Each product is quantized as soon as it is completely filled, so that only a few are held in full precision at a time.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moiety_engine.model.errors import UnsupportedModelError
from moiety_engine.model.names.tensor_mapping import addresses
from moiety_engine.model.weight_offload import named_tensors
from moiety_engine.model.weights import ModelWeights, allocate, products_of
from moiety_kernels.quantization import QuantizedWeight, quantize
from moiety_kernels.quantization.weight import BLOCK, GPU_PACK

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from moiety_engine.model.names.tensor_mapping import Shares, TensorMapping
    from moiety_engine.model.offloading import Offloading
    from moiety_engine.model.spec import ModelSpec
    from moiety_engine.model.stored_precision import StoredPrecision
    from moiety_kernels.quantization import WeightFormat


class WeightQuantizer:
    """Tracker of the weights that wait for tensors while a checkpoint is read; quantizes products that are complete.

    `weights` are filled on a CPU; the memory of products is released once they are quantized on `device`. Weights
    filled from a tensor named in `wide` stay unquantized. With `as_stored`, products are taken from there instead of
    being rounded. With `offloading`, experts' products go to its store instead of the device; if the store holds them
    already, they are left unchanged.
    """

    def __init__(
        self,
        weights: ModelWeights,
        places: Mapping[str, TensorMapping | Shares],
        form: WeightFormat,
        device: torch.device,
        wide: set[str],
        as_stored: StoredPrecision | None = None,
        offloading: Offloading | None = None,
    ) -> None:
        self._weights, self._form, self._device, self._as_stored = weights, form, device, as_stored
        self._offloading = offloading
        self._offloaded = set() if offloading is None else set(map(id, products_of(weights, experts_only=True)))
        self._done: dict[int, QuantizedWeight] = {}  # by id of the product, like the following ones
        self._moved: dict[int, Tensor] = {}
        products = {product.untyped_storage().data_ptr(): product for product in _products(weights, form)}
        for name in wide:
            for address in addresses(places[name]):
                products.pop(address, None)
        for product in products.values():
            is_divided = as_stored is not None and as_stored.is_divided(product)
            if not is_divided and not form.takes(product.shape[-1]):
                raise UnsupportedModelError(
                    f"{form.name} needs rows with a multiple of {form.group or BLOCK} weights, but the "
                    f"model has rows of {product.shape[-1]}; load it without quantization, or use another "
                    "format"
                )
        self._of_place = {
            id(place): [products[address] for address in addresses(place) if address in products]
            for place in places.values()
        }
        self._missing = Counter(id(product) for some in self._of_place.values() for product in some)

    def places(
        self, name: str, place: TensorMapping | Shares
    ) -> tuple[TensorMapping | Shares, TensorMapping | Shares] | None:
        """Return the mappings of the values and scales of the tensor at `place`; None if it is filled unquantized."""
        return self._as_stored.places(name) if self._as_stored is not None and self._of_place[id(place)] else None

    def filled(self, place: TensorMapping | Shares) -> None:
        """Record that a place, or its quantized substitute, is filled; quantize the products that are now complete."""
        for product in self._of_place[id(place)]:
            self._missing[id(product)] -= 1
            if not self._missing[id(product)]:
                self._done[id(product)] = self._narrow(product)
                product.untyped_storage().resize_(0)  # releases the memory although mappings still have views

    def _narrow(self, product: Tensor) -> QuantizedWeight:
        if self._offloading is not None and id(product) in self._offloaded:
            here = torch.device("cpu")
            narrow = self._as_stored.hand_out(product, here) if self._as_stored else quantize(product, self._form)
            kept = self._offloading.keep(narrow)
            assert isinstance(kept, QuantizedWeight)
            return kept
        if self._as_stored is not None:
            return self._as_stored.hand_out(product, self._device)
        narrow = quantize(product, self._form)
        return QuantizedWeight(narrow.values_NK.to(self._device), narrow.scales_NG.to(self._device), self._form)

    def finish(self, dtype: torch.dtype) -> ModelWeights:
        """Return all weights on the device; products that are not quantized have `dtype`."""
        for product in products_of(self._weights):
            if id(product) in self._done:
                continue
            if self._offloading is None or id(product) not in self._offloaded:
                self._moved[id(product)] = product.to(self._device, dtype)
            elif self._offloading.is_whole:
                self._moved[id(product)] = product
            else:
                wide = self._offloading.keep(product.to(dtype))
                assert isinstance(wide, Tensor)
                self._moved[id(product)] = wide
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
    """Return the memory of the model's weights with products in `form`, in bytes."""
    weights = allocate(spec, device=torch.device("meta"), dtype=dtype)
    products = list(_products(weights, form))
    plain = {id(tensor): tensor.nbytes for _, tensor in named_tensors(weights)}
    rest = sum(plain.values()) - sum(plain[id(product)] for product in products)
    scales = sum(4 * product.numel() // product.shape[-1] * form.num_scales(product.shape[-1]) for product in products)
    orders = 4 * sum(product.numel() // max(1, product.shape[-2]) for product in products) if form.ordered else 0
    return rest + scales + orders + sum(product.numel() * form.bits // 8 for product in products)


def products_among(weights: ModelWeights, places: Mapping[str, TensorMapping | Shares]) -> set[str]:
    """Return the names of the tensors that belong to products."""
    own = {product.untyped_storage().data_ptr() for product in products_of(weights)}
    return {name for name, place in places.items() if addresses(place) & own}


def takes_products(form: WeightFormat, spec: ModelSpec) -> bool:
    """Return whether the format supports the widths of all the model's products."""
    weights = allocate(spec, device=torch.device("meta"), dtype=torch.bfloat16)
    return all(form.takes(product.shape[-1]) for product in _products(weights, form))


def as_packed_for_a_gpu(form: WeightFormat, spec: ModelSpec) -> WeightFormat | None:
    """Return the 4-bit format in the layout of the GPU kernels, or None if it does not support all product widths."""
    packed = replace(form, pack=GPU_PACK)
    return packed if takes_products(packed, spec) else None


def _products(weights: ModelWeights, form: WeightFormat) -> Iterator[Tensor]:
    """Return the products that are kept in `form`; for mxfp4 only those of experts."""
    return products_of(weights, experts_only=form.of_experts_only)
