"""Computation of an MoE layer with offloaded experts, some of which are cached on the device.

T tokens, K experts a token, D model width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moiety_kernels.moe import experts
from moiety_kernels.moe.staged import experts_in_stages

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from moiety_engine.offload.layer import LayerExperts
    from moiety_kernels.quantization import Weight


class CachedExperts:
    """Cached experts of one layer.

    The host decides which experts are in which slots, so every pass waits for the router's choices.
    """

    def __init__(self, layer: LayerExperts) -> None:
        self._layer = layer

    def __call__(
        self,
        x_TD: Tensor,
        weight_TK: Tensor,
        expert_TK: Tensor,
        products: tuple[Weight, Weight],
        options: dict[str, Any],
        expect: Callable[[Tensor], None],
    ) -> Tensor:
        """Return the output of the chosen experts.

        `products`: weights of the slots. `expect` is called with x once loads of the missing experts have started, to
        prefetch experts for the next layer.
        """
        layer = self._layer
        layer.begin(expert_TK.cpu().numpy())
        expect(x_TD)
        slot_TK = layer.slots_if_there()
        if slot_TK is not None:
            out_TD = experts(x_TD, weight_TK, slot_TK.to(x_TD.device), *products, **options)
        else:
            stages = (slot_TK.to(x_TD.device) for slot_TK in layer.stages())
            out_TD = experts_in_stages(x_TD, weight_TK, stages, *products, **options)
        layer.end()
        return out_TD

    def expect(self, expert_TK: Tensor) -> None:
        """Prefetch experts that the next pass may choose."""
        self._layer.expect(expert_TK.cpu().numpy())
