"""Orders in which quantized weights store their inputs: GPTQ's act-order assigns inputs to groups by tensors on disk.

A product is multiplied by inputs in one order, so matrices that are joined in it (query, key and value; gate and up)
must have the same; experts have one each. K inputs, E experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moiety_engine.model.checkpoint_formats.integers import inputs_by_group
from moiety_engine.model.errors import WeightsError
from moiety_engine.model.names.tensor_mapping import TensorMapping

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

    from moiety_engine.model.names.tensor_mapping import Shares

_STACKED = 3  # dimensions of a product of all experts


class InputOrders:
    """Orders of the inputs of products.

    `products`: the tensors that the mappings in `places` fill. `groups_of`: the group of each input, by the name of the
    quantized tensor on disk; None if they are in order. `group`: inputs of a group. `unequal`: names of tensors that
    are joined with others of another order. Raises WeightsError if the groups do not have that many inputs.
    """

    def __init__(
        self,
        products: Iterable[Tensor],
        places: Mapping[str, TensorMapping | Shares],
        groups_of: Mapping[str, Tensor | None],
        group: int,
    ) -> None:
        self.unequal: set[str] = set()
        self._of_product: dict[int, Tensor] = {}
        known = {product.untyped_storage().data_ptr(): product for product in products}
        first: dict[tuple[int, int], str] = {}  # name that has set the order of an expert of a product
        for name, group_of_K in groups_of.items():
            place = places[name]
            for view in (place.view,) if isinstance(place, TensorMapping) else place.views:
                product = known.get(view.untyped_storage().data_ptr())
                if product is None:
                    continue
                order_EK = self._of_product.setdefault(id(product), _in_order(product))
                expert = view.storage_offset() // (product.shape[-2] * product.shape[-1])
                order_K = _order(name, group_of_K, product.shape[-1], group)
                setter = first.setdefault((id(product), expert), name)
                if setter == name:
                    order_EK[expert : expert + (len(view) if view.dim() == _STACKED else 1)] = order_K
                elif not torch.equal(order_EK[expert], order_K):
                    self.unequal |= {setter, name}

    def pop(self, product: Tensor) -> Tensor | None:
        """Return the order of a product's inputs, int32 [K] or [E, K], once; None if one matrix has them in order."""
        order_EK = self._of_product.pop(id(product), _in_order(product))
        if product.dim() == _STACKED:
            return order_EK
        return None if torch.equal(order_EK, _in_order(product)) else order_EK[0]


def _in_order(product: Tensor) -> Tensor:
    experts = product.shape[0] if product.dim() == _STACKED else 1
    return torch.arange(product.shape[-1], dtype=torch.int32).repeat(experts, 1)


def _order(name: str, group_of_K: Tensor | None, width: int, group: int) -> Tensor:
    if group_of_K is None:
        return torch.arange(width, dtype=torch.int32)
    try:
        return inputs_by_group(group_of_K, width, group).int()
    except ValueError as exc:
        raise WeightsError(f"{name} cannot be read in groups: {exc}") from exc
