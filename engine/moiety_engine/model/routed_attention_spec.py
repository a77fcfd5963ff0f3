"""Specification and weights of attention whose query heads are those of routed experts (JetMoe).

E experts, D model width, Q width of an expert's queries, which is that of all keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moiety_engine.model.spec import AttentionSpec

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_engine.model.tensor_allocator import TensorAllocator
    from moiety_kernels.quantization import Weight
    from moiety_kernels.route.spec import RoutingSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedAttentionSpec(AttentionSpec):
    """Mixture of attention heads (arXiv 2404.07413): a router chooses experts of query heads for each token.

    An expert projects the queries of `num_kv_heads` heads, one for each key-value head, and their output.
    `num_heads`: query heads of all experts that a token has. The output is weighted, summed and has a bias.
    """

    routing: RoutingSpec

    @property
    def output_width(self) -> int:
        """Width of the output of one expert's heads."""
        return self.kv_width

    @property
    def qkv_widths(self) -> tuple[int, int, int]:
        """Widths of queries, keys and values that all tokens project alike."""
        return 0, self.kv_width, self.kv_width


@dataclass(frozen=True, slots=True)
class RoutedAttentionWeights:
    router_ED: Tensor
    query_EQD: Weight
    kv_CD: Weight
    output_EDQ: Weight
    output_bias_D: Tensor  # float32


ROUTED_PRODUCTS: dict[type, tuple[str, ...]] = {RoutedAttentionWeights: ("query_EQD", "kv_CD", "output_EDQ")}


def allocate_routed(spec: RoutedAttentionSpec, size: int, new: TensorAllocator) -> RoutedAttentionWeights:
    """Return uninitialized weights of the attention in a model of width `size`."""
    experts = spec.routing.num_experts
    return RoutedAttentionWeights(
        router_ED=new.matrix(experts, size),
        query_EQD=new.product(experts, spec.kv_width, size),
        kv_CD=new.product(sum(spec.qkv_widths), size),
        output_EDQ=new.product(experts, size, spec.output_width),
        output_bias_D=new.vector(size),
    )
