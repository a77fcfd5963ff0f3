"""Division of a model's cache over ranks, and the shards that each rank of one engine sends to each rank of another.

A layer's cache consists of equal units: its key-value heads; a single one if every rank has the whole layer, as with
latent attention; or, for recurrent states, as many as both engines' numbers of ranks need. A layer with entries in
blocks and a state has a shard of each. Ranks with the same units may divide the positions of a layer (decode context
parallelism); those of hidden states are never divided. Pure functions of the two divisions, so both engines compute the
same shards. Ranks are numbered within a group of --dp-attention: those of each pipeline stage, one stage after the
other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from moiety_engine.distribution.layout import Layout, RankPosition
from moiety_engine.kv_transfer.messages import CacheShard
from moiety_engine.model.paged_state_spec import PagedStateSpec
from moiety_engine.model.recurrent_specs import RecurrentSpec
from moiety_engine.model.spec import LatentAttentionSpec, kv_layer_of
from moiety_engine.model.tensor_shards import own_range
from moiety_wire.roles import KvRanks

if TYPE_CHECKING:
    from moiety_engine.model.spec import AttentionSpec, ModelSpec

EVENLY = 0  # units of a recurrent state, which tensor parallelism divides evenly
WHOLE = 1  # units of a cache that every rank of a stage has
WHOLE_STATE = -1  # units of a state that every rank has
WITH_STATE = -2  # units of entries in blocks beside a state, both of which every rank has
MAX_RANKS = 256  # of one group of another engine; the time to compute its shards grows with them


@dataclass(frozen=True, slots=True)
class CacheShare:
    """One rank's share of a model's cache. `rank` counts the ranks of one group.

    `units` has the key-value heads of each layer of the whole model, one of the constants above, or None for a layer
    that reads the cache of an earlier one; those of the hidden states follow if they are kept.
    `row_tokens` has the tokens of a row of each layer with rows; () if they are one each.
    """

    ranks: KvRanks
    rank: int
    num_layers: int
    units: tuple[int | None, ...]
    row_tokens: tuple[int, ...] = ()

    @property
    def first_layer(self) -> int:
        """Index of the rank's first layer in the model."""
        return _layers_of(self.ranks, self.rank // self.ranks.tp, self.num_layers).start

    def why_incompatible(self, other: KvRanks) -> str:
        """Return why the caches of the other engine's ranks have no common division with this one's; "" if they do."""
        if min(other.tp, other.pp, other.groups, other.dcp) < 1 or other.tp * other.pp > MAX_RANKS:
            return f"--tp {other.tp} and --pp {other.pp} of the other engine are no numbers of ranks"
        if other.pp > self.num_layers:
            return f"--pp {other.pp} of the other engine is more than the model's {self.num_layers} layers"
        uneven = {one for one in self.units if one and one > WHOLE and one % other.tp and other.tp % one}
        if uneven:
            return f"--tp {other.tp} of the other engine does not divide the model's {min(uneven)} key-value heads"
        few = {one for one in self.units[: self.num_layers] if one and one > 0 and max(1, other.tp // one) % other.dcp}
        if few:
            return (
                f"--decode-context-parallel {other.dcp} of the other engine needs as many copies of the model's "
                f"{max(few)} key-value heads, which --tp {other.tp} does not have"
            )
        return ""

    def num_position_shards(self, layer: int) -> int:
        """Return the number of ranks that divide the positions of a layer of the whole model."""
        return _num_position_shards(self, self.ranks, layer)

    def range_of(self, shard: CacheShard) -> tuple[int, int]:
        """Return the rank's own range of a layer, in units of the shard."""
        return _range(self.units[shard.layer], shard.num_units, self.ranks.tp, self.rank % self.ranks.tp)

    def shards_to(self, receivers: KvRanks) -> dict[int, tuple[CacheShard, ...]]:
        """Return what this rank sends, by rank of the other engine; ranks without a shard of it are left out.

        `why_incompatible` must have found no reason against `receivers`.
        """
        found = {to: _shards(self, self.ranks, self.rank, receivers, to) for to in range(receivers.tp * receivers.pp)}
        return {rank: shards for rank, shards in found.items() if shards}

    def shards_from(self, senders: KvRanks) -> dict[int, tuple[CacheShard, ...]]:
        """Return what this rank receives, by rank of the other engine; see `shards_to`."""
        found = {by: _shards(self, senders, by, self.ranks, self.rank) for by in range(senders.tp * senders.pp)}
        return {rank: shards for rank, shards in found.items() if shards}

    def shards_from_rank(self, senders: KvRanks, rank: int) -> tuple[CacheShard, ...]:
        """Return what this rank receives from one rank of the other engine; () if it has no such rank."""
        if not 0 <= rank < senders.tp * senders.pp:
            return ()
        return _shards(self, senders, rank, self.ranks, self.rank)


def share_on_rank(spec: ModelSpec, position: RankPosition, *, keeps_hidden: bool) -> CacheShare:
    """Return a rank's share of the model with this spec. `keeps_hidden`: its cache has hidden states."""
    units = tuple(_units_of(layer.attention) for layer in spec.layers)
    attentions = (layer.attention for layer in spec.layers)
    row_tokens = tuple(one.tokens_per_entry if isinstance(one, PagedStateSpec) else 1 for one in attentions)
    layout = position.layout
    rank = position.pp_rank * layout.tp + position.tp_rank
    return CacheShare(
        KvRanks(layout.tp, layout.pp, layout.num_caches, layout.dcp),
        rank,
        len(units),
        (*units, WHOLE) if keeps_hidden else units,
        row_tokens if any(one > 1 for one in row_tokens) else (),
    )


def _units_of(attention: AttentionSpec | LatentAttentionSpec | RecurrentSpec) -> int | None:
    if isinstance(attention, PagedStateSpec):
        return WITH_STATE if attention.entry_widths else WHOLE_STATE
    if isinstance(attention, RecurrentSpec):
        return EVENLY
    if kv_layer_of(attention) is not None:
        return None
    return WHOLE if isinstance(attention, LatentAttentionSpec) else attention.num_kv_heads


@lru_cache(maxsize=1024)
def _shards(
    share: CacheShare, senders: KvRanks, sender: int, receivers: KvRanks, receiver: int
) -> tuple[CacheShard, ...]:
    """Return what `sender` sends to `receiver`: layers with rows of every token first, then those with states."""
    stages = sender // senders.tp, receiver // receivers.tp
    common = set(_layers_of(senders, stages[0], share.num_layers))
    common &= set(_layers_of(receivers, stages[1], share.num_layers))
    if len(share.units) > share.num_layers and stages == (senders.pp - 1, receivers.pp - 1):
        common.add(share.num_layers)
    numbered = [(layer, units) for layer in sorted(common) if (units := share.units[layer]) is not None]
    paged = [one for one in numbered if one[1] not in (EVENLY, WHOLE_STATE)]
    states = [one for one in numbered if one[1] in (EVENLY, WHOLE_STATE, WITH_STATE)]
    shards: list[CacheShard] = []
    for number, (layer, units) in enumerate((*paged, *states)):
        counts = _num_position_shards(share, senders, layer), _num_position_shards(share, receivers, layer)
        residues = sender % senders.tp % counts[0], receiver % receivers.tp % counts[1]
        if (residues[0] - residues[1]) % math.gcd(*counts):
            continue  # they have no position in common
        stride = math.lcm(*counts)
        phase = next(one for one in range(residues[0], stride, counts[0]) if one % counts[1] == residues[1])
        if (
            number < len(paged) and units == WITH_STATE and share.row_tokens
        ):  # an entry is at the position of the last of its tokens
            stride, phase = share.row_tokens[layer], share.row_tokens[layer] - 1
        num_units = math.lcm(senders.tp, receivers.tp) if units == EVENLY else max(WHOLE, units)
        wanted = _range(units, num_units, receivers.tp, receiver % receivers.tp)
        held = _range(units, num_units, senders.tp, sender % senders.tp)
        first, end = max(wanted[0], held[0]), min(wanted[1], held[1])
        nearest = _nearest(num_units, counts[0], senders, sender, receivers, receiver)
        if first < end and sender == nearest:
            shards.append(CacheShard(layer, first, end, num_units, stride, phase))
    return tuple(shards)


def _num_position_shards(share: CacheShare, ranks: KvRanks, layer: int) -> int:
    """Return by how many of these ranks the positions of a layer are divided."""
    units = share.units[layer]
    return 1 if layer == share.num_layers or units is None or units < WHOLE else ranks.dcp


def _nearest(
    num_units: int, num_position_shards: int, senders: KvRanks, sender: int, receivers: KvRanks, receiver: int
) -> int:
    """Return which of the ranks with the sender's units and positions of a layer, in its stage, sends them.

    Several ranks have the same unit if there are more ranks than units, and every `num_position_shards`-th of these
    has the same positions. The one nearest to the receiver's place sends them: with equal --tp that with the same
    number, and otherwise the receivers are divided among these ranks.
    """
    stage, own = divmod(sender, senders.tp)
    num_same = max(1, senders.tp // num_units)
    first = own // num_same * num_same + own % num_position_shards
    place, both = receiver % receivers.tp, 2 * receivers.tp
    ideal = -((receivers.tp - 2 * place * senders.tp) // both)  # rounded; a half is rounded down
    index = (ideal - first + num_position_shards // 2) // num_position_shards
    index = min(max(index, 0), num_same // num_position_shards - 1)
    return stage * senders.tp + first + index * num_position_shards


def _range(units: int | None, num_units: int, tp: int, tp_rank: int) -> tuple[int, int]:
    """Return the range of a layer's `num_units` that a rank has."""
    if units == EVENLY:
        return tp_rank * num_units // tp, (tp_rank + 1) * num_units // tp
    found = own_range(num_units, max(1, num_units // tp), RankPosition(Layout(tp=tp), tp_rank))
    return found.start, found.stop


def _layers_of(ranks: KvRanks, stage: int, num_layers: int) -> range:
    return RankPosition(Layout(pp=ranks.pp), stage).layers_of(num_layers)
