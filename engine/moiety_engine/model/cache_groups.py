"""Cache groups: layers that keep keys and values for the same range of positions, and so share block tables.

A block holds the keys and values of `block_size` tokens for the layers of one group; every group has the same number of
places for layers, so that all blocks are equal and come from one pool. This follows vLLM's hybrid KV cache manager.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moiety_engine.cache.table_layout import CHUNK_TOKENS
from moiety_engine.model.spec import LatentAttentionSpec, RecurrentSpec

if TYPE_CHECKING:
    from moiety_engine.model.spec import ModelSpec

MOST_GROUPS = 8  # each costs a block table per sequence and step
WORTH = 0.9  # groups are formed if they need at most this fraction of the memory of a single one
_CONTEXT_TOKENS = 32768  # context for which memory is compared, unless the model's is shorter


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers of one cache group, as indices over all pipeline stages.

    `window`: number of positions that a query of any of its layers sees, its own included; None: all.
    """

    layers: tuple[int, ...]
    window: int | None


def cache_groups(spec: ModelSpec, *, keep_everything: bool = False) -> tuple[CacheGroup, ...]:
    """Return the cache groups of a model; those without a window come first.

    Recurrent layers are in none. With `keep_everything` there is one group that frees nothing. Layers are divided into
    groups only where that saves memory, and only if the caches of all layers have the same shape.
    """
    recurrent = set(spec.recurrent_layers)
    layers = tuple(layer for layer in range(len(spec.layers)) if layer not in recurrent)
    windows = {layer: _window(spec, layer) for layer in layers}
    if keep_everything:
        return (CacheGroup(layers, None),)
    single = (CacheGroup(layers, _widest(list(windows.values()))),)
    num_of = Counter(windows.values())
    kinds = sorted(num_of, key=lambda window: (window is not None, -(window or 0)))
    if len(kinds) <= 1 or len({_shape(spec, layer) for layer in layers}) > 1:
        return single
    context = min(spec.max_context_tokens, _CONTEXT_TOKENS)

    def slots(places: int) -> int:
        kept = {None: context} | {w: min(context, w + CHUNK_TOKENS) for w in kinds if w is not None}
        return sum(-(-num_of[kind] // places) * places * kept[kind] for kind in kinds)

    fitting = [
        places
        for places in range(1, max(num_of.values()) + 1)
        if sum(-(-count // places) for count in num_of.values()) <= MOST_GROUPS
    ]
    best = min(fitting, key=lambda places: (slots(places), -places), default=0)
    widest = single[0].window
    kept_by_one = context if widest is None else min(context, widest + CHUNK_TOKENS)
    if not best or slots(best) > WORTH * len(layers) * kept_by_one:
        return single
    of_kind = {kind: [layer for layer in layers if windows[layer] == kind] for kind in kinds}
    return tuple(
        CacheGroup(tuple(of_kind[kind][begin : begin + best]), kind)
        for kind in kinds
        for begin in range(0, num_of[kind], best)
    )


def _window(spec: ModelSpec, layer: int) -> int | None:
    window: int | None = getattr(spec.layers[layer].attention, "window", None)
    return None if window is None or window >= spec.max_context_tokens else window


def _widest(windows: list[int | None]) -> int | None:
    bounded = [window for window in windows if window is not None]
    return max(bounded) if bounded and len(bounded) == len(windows) else None


def _shape(spec: ModelSpec, layer: int) -> tuple[type, int, int, int]:
    attention = spec.layers[layer].attention
    assert not isinstance(attention, RecurrentSpec), "recurrent layers are in no group"
    index_width = attention.index_key_width if isinstance(attention, LatentAttentionSpec) else 0
    return type(attention), attention.cached_values, attention.cached_rows, index_width
