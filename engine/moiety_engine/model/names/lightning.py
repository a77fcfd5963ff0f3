"""Names of the tensors of lightning attention layers.

The input projection has the rows of each head's query, key and value next to each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moiety_engine.model.names.tensor_mapping import TensorMapping, plain, whole

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from moiety_engine.model.names.tensor_mapping import Named
    from moiety_engine.model.recurrent_specs import LightningSpec
    from moiety_engine.model.recurrent_weights import LightningWeights


def lightning_places(spec: LightningSpec, weights: LightningWeights, _present: set[str]) -> Iterator[Named]:
    """Yield the names, relative to the layer's, and mappings of the layer's tensors."""

    def by_part(source: Tensor) -> Tensor:
        of_heads = source.view(spec.num_heads, 3, spec.head_width, *source.shape[1:])
        return of_heads.transpose(0, 1).flatten(0, 2)

    input_CD = plain(weights.input_CD)
    yield "self_attn.qkv_proj.weight", TensorMapping(input_CD, tuple(input_CD.shape), by_part)
    yield "self_attn.output_gate.weight", whole(plain(weights.gate_CD))
    yield "self_attn.norm.weight", whole(weights.norm_C)
    yield "self_attn.out_proj.weight", whole(plain(weights.output_DC))
