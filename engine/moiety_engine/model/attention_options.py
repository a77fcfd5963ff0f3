"""Options of attention that few families have, as data; `spec` has the attention that they belong to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moiety_kernels.output_gate.spec import GateKind


@dataclass(frozen=True, slots=True)
class OutputGateSpec:
    """Gate of attention's output (Qiu et al. 2025, arXiv 2505.06708); `per_head`: one gate for all values of a head.

    `in_query_projection`: on disk, and for adapters, the projection of queries has the gate's rows too.
    """

    kind: GateKind
    per_head: bool = False
    in_query_projection: bool = False


@dataclass(frozen=True, slots=True)
class IndexerSpec:
    """Lightning indexer of sparse attention (DeepSeek-V3.2): selects the `top_k` tokens that a query attends to.

    A query has `num_heads` index queries, a token one index key of width `head_dim`. The first entries of both are
    rotated, as many as attention rotates; `interleaved`: the checkpoint has the entries of a pair next to each other.
    `reuses`: the layer has no indexer and attends to the selection of the nearest layer before it that has one.
    """

    num_heads: int
    head_dim: int
    top_k: int
    interleaved: bool = False
    reuses: bool = False


@dataclass(frozen=True, slots=True)
class DividedNormSpec:
    """Normalization of all heads together over several ranks; `kv_copies`: ranks that have the same key heads."""

    kv_copies: int


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """Growth of queries with the position, which keeps attention focused in long contexts (Llama 4).

    Queries at position p are multiplied by 1 + beta · ln(1 + floor((p + first) / original_max_positions)).
    """

    beta: float
    original_max_positions: int
    first: int = 0  # number of the first position
