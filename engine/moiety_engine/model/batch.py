"""Input batch of a step, and the paged KV cache that the model reads and writes.

T tokens of the step (all sequences' chunks concatenated), S sequences, B blocks per row, L rows whose results are
wanted, d width of a compressed entry, N blocks, E places for entries per block.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from moiety_kernels.kv_store.caches import LatentCache, LayerCache
from moiety_kernels.paged_attention.inputs import AttentionMetadata
from moiety_kernels.recurrent.inputs import RecurrentSequences

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_engine.model.adapter_stacks import AdaptedRows
    from moiety_engine.model.recurrent_specs import StatePart


@dataclass(frozen=True, slots=True)
class Spread:
    """Distribution of a step's tokens over groups of ranks (data-parallel attention), each with its own batch."""

    num_tokens: tuple[int, ...]  # of each group
    num_wanted: tuple[int, ...]
    order_L: Tensor  # int64, index of each wanted row of the step in the groups' concatenated rows

    def share_bounds(self, tp: int, num_parts: int) -> list[int]:
        """Return, of each micro-batch, the most tokens that any of the `tp` ranks of any group dispatches.

        `num_parts`: number of micro-batches, in which `micro_batches.cut` divides each group's tokens; 0 for none.
        """
        parts = max(1, num_parts)
        return [max(-(-(n * (i + 1) // parts - n * i // parts) // tp) for n in self.num_tokens) for i in range(parts)]


@dataclass(frozen=True, slots=True)
class ImageRows:
    """Tokens of a step that stand for parts of images: I rows, each with its encoder's output."""

    rows_I: Tensor  # int64, rows of T
    positions_3I: Tensor  # int64, temporal, vertical and horizontal position of each (M-RoPE)
    features_FID: Tensor  # embedding of each row, and what is added to the output of each of the first layers

    def add_deepstack(self, fed_TD: Tensor, layer: int) -> Tensor:
        """Return a layer's contribution to the residual stream plus what the encoder adds after this layer, if any."""
        of_layers_FID = self.features_FID[1:]
        return fed_TD if layer >= len(of_layers_FID) else fed_TD.index_add(0, self.rows_I, of_layers_FID[layer])


@dataclass(frozen=True, slots=True)
class GroupTable:
    """Slots and block tables of a step in one cache group; the shapes and types are those of the fields of Batch."""

    slots_T: Tensor
    block_table_SB: Tensor
    rank_slots: tuple[Tensor, ...] = ()


@dataclass(frozen=True, slots=True)
class RecurrentRows:
    """Rows of a step as recurrent layers see them: R runs, each of consecutive tokens of one sequence.

    All tokens of a step are in a run, in the order of the batch; a sequence has one run. A layer reads the state of run
    r from slot slots_R[r] of its RecurrentStateCache and writes the state after the run's last token to the same slot.
    The state before the first token of a sequence is zero, whatever the slot contains.
    """

    run_start_R1: Tensor  # int32; run r has the tokens run_start[r] … run_start[r + 1] - 1
    slots_R: Tensor  # int64; all slots of a step are distinct
    has_state_R: Tensor  # int32; 0 if the run begins with the first token of its sequence
    num_single: int  # runs 0 … num_single - 1 have exactly one token
    max_run: int  # Python int: tokens of the longest run
    recorded_rows_K: Tensor | None = None  # int64; tokens that may be replayed, for which inputs are recorded
    record_places_K: Tensor | None = None  # int64; where: slot · num_record_tokens + place
    runs: RecurrentSequences = field(init=False)  # the runs as the operations of recurrent layers take them

    def __post_init__(self) -> None:
        runs = RecurrentSequences(self.slots_R, self.has_state_R, self.run_start_R1, self.max_run, self.num_single)
        object.__setattr__(self, "runs", runs)  # once for all layers of a step


@dataclass(slots=True)
class SelectedTokens:
    """Cache slots that the queries of one batch attend to, as the newest layer with an indexer has selected them.

    The batch owns it. A layer with an indexer writes it, and the layers after it that share its selection read it.
    """

    slot_TK: Tensor | None = None  # int32, in the order of the positions
    count_T: Tensor | None = None  # int32, slots of each query; the rest of its row is void


class Batch(msgspec.Struct, frozen=True, eq=False, dict=True):
    """Tokens of one step for one group of ranks. Decodes (sequences with exactly one query token) come first.

    Each step creates one, and a struct with so many fields is created faster than a frozen dataclass.
    """

    token_ids_T: Tensor  # int64
    positions_T: Tensor  # int64, rotary positions; after an image they are less than the places in the context
    slots_T: Tensor  # int64, cache slot of token t's K and V: block_id · block_size + offset
    query_start_S1: Tensor  # int32; sequence s owns the tokens query_start[s] … query_start[s + 1] - 1
    context_len_S: Tensor  # int32, tokens of sequence s in the cache, this chunk included
    block_table_SB: Tensor  # int32, padded with 0; entries of freed blocks are void
    wanted_rows_L: Tensor  # int64, rows of T whose logits or hidden states are wanted
    num_decode: int  # sequences 0 … num_decode - 1 have exactly one query token
    max_context: int  # Python ints, to avoid device synchronization
    max_query: int
    owner_T: Tensor | None = None  # int64, tenant slot of each token (moe.tenants). None: experts are not counted
    spread: Spread | None = None  # None: there is one group. Else `owner_T` covers the tokens of all groups
    adapted: AdaptedRows | None = None  # None: no token has an adapter
    images: ImageRows | None = None  # None: no token stands for a part of an image
    micro_batches: tuple[Batch, ...] = ()  # the same tokens in consecutive parts, if they run as micro-batches
    further_tables: tuple[GroupTable, ...] = ()  # of the cache groups after the first
    states: RecurrentRows | None = None  # None: the model has no recurrent layers
    num_shards: int = 1  # ranks that divide the positions of a sequence's cache; see AttentionMetadata
    shard: int = 0  # index of this rank; `slots_T` has those of its positions and -1 for the others
    rank_slots: tuple[Tensor, ...] = ()  # slots of the tokens of each rank with a copy of the cache; (): no copies
    selected: SelectedTokens = msgspec.field(default_factory=SelectedTokens)  # of sparse attention

    @cached_property
    def attention(self) -> AttentionMetadata:
        """Sequences as attention kernels take them, made once for all layers of a step that does not replay others."""
        bounds = self.max_query, self.max_context, self.num_decode, self.num_shards, self.shard
        return AttentionMetadata(self.query_start_S1, self.context_len_S, self.block_table_SB, *bounds)

    def by_cache_group(self) -> tuple[Batch, ...]:
        """Return the batch as the layers of each cache group see it: with the slots and block tables of the group."""
        if not self.further_tables:
            return (self,)
        others = (
            replace(
                self,
                slots_T=one.slots_T,
                block_table_SB=one.block_table_SB,
                further_tables=(),
                rank_slots=one.rank_slots,
            )
            for one in self.further_tables
        )
        return (self, *others)

    def of_shard(self, num_shards: int, shard: int, block_size: int) -> Batch:
        """Return the batch as a rank sees it whose blocks have every `num_shards`-th of their `block_size` positions.

        The ranks' blocks have the same numbers. `num_shards` divides `block_size`.
        """

        def own(slots_T: Tensor) -> Tensor:
            block_T = slots_T.div(block_size, rounding_mode="floor")
            place_T = slots_T - block_T * block_size
            slot_T = block_T * (block_size // num_shards) + place_T // num_shards
            return slot_T.masked_fill(place_T % num_shards != shard, -1)

        return replace(
            self,
            slots_T=own(self.slots_T),
            micro_batches=tuple(part.of_shard(num_shards, shard, block_size) for part in self.micro_batches),
            further_tables=tuple(GroupTable(own(one.slots_T), one.block_table_SB) for one in self.further_tables),
            num_shards=num_shards,
            shard=shard,
        )


@dataclass(frozen=True, slots=True)
class RecurrentStateCache:
    """States of one recurrent layer: for each part of the layer's spec a tensor [num_slots, *shape of the part].

    `records` has the inputs of drafted tokens: for each of the spec's `input_widths` a tensor
    [num_slots, num_record_tokens, width]; (): none are kept. `specs` are those of the parts.
    """

    parts: tuple[Tensor, ...]
    records: tuple[Tensor, ...] = ()
    specs: tuple[StatePart, ...] = ()

    def record(self, rows: RecurrentRows, *inputs_TC: Tensor) -> None:
        """Keep the inputs of the tokens that may be replayed."""
        if rows.recorded_rows_K is None or rows.record_places_K is None:
            return
        for record, input_TC in zip(self.records, inputs_TC, strict=True):
            kept_KC = input_TC.index_select(0, rows.recorded_rows_K)
            record.flatten(0, 1).index_copy_(0, rows.record_places_K, kept_KC)


@dataclass(frozen=True, slots=True)
class CompressedCache:
    """Compressed entries of one layer, and its state.

    An entry is in the block that has its last token, of `block_size`; a block has E places for entries. `heads`:
    key-value heads, if the entries of a block are the keys of each head and then the values of each; 0: an entry is of
    `tokens_per_entry` tokens.
    """

    entries_NEd: Tensor
    index_keys_NEI: Tensor | None  # beside each entry, if the layer has an indexer
    block_size: int
    state: RecurrentStateCache
    tokens_per_entry: int = 1
    heads: int = 0

    @property
    def pages(self) -> LayerCache:
        """Views of the keys and values of `heads`, which share the memory of the entries."""
        assert self.heads, "the entries are no keys and values"
        width = self.entries_NEd.shape[-1]
        blocks_N2GPd = self.entries_NEd.view(len(self.entries_NEd), 2 * self.heads, -1, width)
        return LayerCache(*blocks_N2GPd.chunk(2, dim=1))

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """All tensors whose first dimension is the block."""
        return (self.entries_NEd,) if self.index_keys_NEI is None else (self.entries_NEd, self.index_keys_NEI)


Cache = LayerCache | LatentCache | RecurrentStateCache | CompressedCache  # of one layer


@dataclass(frozen=True, slots=True)
class KvCache:
    """Paged KV cache of all attention layers, and the states of all recurrent layers.

    A block belongs to one cache group at a time. It has a place for each of the group's layers; layers of different
    groups share a place, and so the memory that `layers` has for both.
    """

    layers: tuple[Cache, ...]
    num_blocks: int
    block_size: int
    rotation: str = ""  # digest of the rotary embedding; equal for engines with compatible keys
    hidden: LatentCache | None = None  # hidden state of each token after the final norm; None: not kept
    num_groups: int = 1  # cache groups of the model, also those without layers on this pipeline stage
    group_of_layer: tuple[int, ...] = ()  # cache group of each layer; (): all layers are in the first
    num_state_slots: int = 0  # of each recurrent layer
    num_record_tokens: int = 0  # tokens whose inputs each of these slots records; 0: none
    windows: tuple[int | None, ...] = ()  # of the block tables: blocks behind a window are freed; (): not known
    shared: LatentCache | None = None  # memory of a block as one row, which layers of different shapes share

    @property
    def groups(self) -> tuple[int, ...]:
        """Cache group of each layer, and of the hidden states if they are kept."""
        of_layers = self.group_of_layer or (0,) * len(self.layers)
        return of_layers if self.hidden is None else (*of_layers, 0)

    @property
    def token_caches(self) -> dict[int, LayerCache | LatentCache]:
        """Caches with rows of every token by number: those of layers by index, then that of the hidden states.

        Layers that read the cache of an earlier layer are left out.
        """
        numbered = enumerate(self.layers if self.hidden is None else (*self.layers, self.hidden))
        found = [(number, one) for number, one in numbered if isinstance(one, LayerCache | LatentCache)]
        first: dict[tuple[int, int], int] = {}  # by group and object, since groups share places
        for number, one in found:
            first.setdefault((self.groups[number], id(one)), number)
        return {number: one for number, one in found if first[self.groups[number], id(one)] == number}

    @property
    def entry_caches(self) -> dict[int, CompressedCache]:
        """Caches of the layers that keep entries in blocks beside a state, by index."""
        return {number: one for number, one in enumerate(self.layers) if isinstance(one, CompressedCache)}

    @property
    def state_caches(self) -> dict[int, RecurrentStateCache]:
        """States of the layers that keep one, by index."""
        states = ((i, one.state if isinstance(one, CompressedCache) else one) for i, one in enumerate(self.layers))
        return {number: one for number, one in states if isinstance(one, RecurrentStateCache)}

    @property
    def everything(self) -> tuple[Cache, ...]:
        """Cache of each layer, the states beside compressed entries, and the hidden states if they are kept."""
        beside = [one.state for one in self.layers if isinstance(one, CompressedCache)]
        return (*self.layers, *beside, *(() if self.hidden is None else (self.hidden,)))

    @property
    def places(self) -> tuple[LayerCache | LatentCache | CompressedCache, ...]:
        """All caches to copy when a block is moved: the places of a block, each once."""
        if self.shared is not None:
            return (self.shared, *(() if self.hidden is None else (self.hidden,)))
        paged = [one for one in self.layers if not isinstance(one, RecurrentStateCache)]
        found = {one.parts[0].data_ptr(): one for one in paged}
        return (*found.values(), *(() if self.hidden is None else (self.hidden,)))

    @property
    def states(self) -> tuple[RecurrentStateCache, ...]:
        """Caches of the recurrent layers."""
        return tuple(self.state_caches.values())
