"""What the runner hands to the model each step, and the paged cache that the model reads and writes.

T tokens of the step (all sequences' chunks concatenated), S sequences, B blocks a row, L rows whose results are wanted,
N blocks, G key-value heads, P places a block, d head width, L width of a latent row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_engine.model.adapter_stacks import AdaptedRows


@dataclass(frozen=True, slots=True)
class Spread:
    """How a step's tokens are spread over groups of ranks, each of which has a batch of its own."""

    num_tokens: tuple[int, ...]  # of each group
    num_wanted: tuple[int, ...]
    order_L: Tensor  # int64, where each wanted row of the step is among the groups' one after the other


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's tokens, those of one group of ranks. Decodes, sequences with exactly one query token, come first."""

    token_ids_T: Tensor  # int64
    positions_T: Tensor  # int64
    slots_T: Tensor  # int64, where token t's K and V go: block_id · block_size + offset
    query_start_S1: Tensor  # int32; sequence s owns the tokens query_start[s] … query_start[s + 1]
    context_len_S: Tensor  # int32, tokens of sequence s in the cache, this chunk included
    block_table_SB: Tensor  # int32, padded with 0
    wanted_rows_L: Tensor  # int64, rows of T, of which logits or hidden states are wanted
    num_decode: int  # sequences 0 … num_decode - 1 have exactly one query token
    max_context: int  # Python ints, so that nothing waits for the device
    max_query: int
    owner_T: Tensor | None = None  # int64, whose token it is: a slot of moe.tenants. None: nobody counts experts
    spread: Spread | None = None  # None: there is one group. Else `owner_T` is of all groups' tokens
    adapted: AdaptedRows | None = None  # None: no token has an adapter
    micro_batches: tuple[Batch, ...] = ()  # its tokens one after the other, if they are taken through in turns


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's share of the cache, as views. A slot that no token was stored to may hold anything, NaN included. A
    cache of int8 has a scale for each key and each value, float32."""

    k_NGPd: Tensor
    v_NGPd: Tensor
    k_scale_NGP: Tensor | None = None
    v_scale_NGP: Tensor | None = None

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """All tensors, the first dimension of each being the block."""
        every = self.k_NGPd, self.v_NGPd, self.k_scale_NGP, self.v_scale_NGP
        return tuple(part for part in every if part is not None)


@dataclass(frozen=True, slots=True)
class LatentCache:
    """The share of a layer of latent attention: one row a position, `latent_width` numbers of its latent part first.
    A cache of int8 has a scale for either part. Otherwise as LayerCache."""

    rows_NPL: Tensor
    latent_width: int
    latent_scale_NP: Tensor | None = None
    rotated_scale_NP: Tensor | None = None

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """All tensors, the first dimension of each being the block."""
        every = self.rows_NPL, self.latent_scale_NP, self.rotated_scale_NP
        return tuple(part for part in every if part is not None)


@dataclass(frozen=True, slots=True)
class KvCache:
    """The paged cache of all layers; block b of every layer belongs together."""

    layers: tuple[LayerCache | LatentCache, ...]
    num_blocks: int
    block_size: int
    rotation: str = ""  # a digest of how keys are turned, the same where other engines' keys fit
    hidden: LatentCache | None = None  # what the model made of each token, after the final norm; None: it is not kept

    @property
    def everything(self) -> tuple[LayerCache | LatentCache, ...]:
        """All that goes along with a block, wherever it goes."""
        return self.layers if self.hidden is None else (*self.layers, self.hidden)
