"""Cache groups: layers that keep keys and values for the same range of positions, and so share block tables.

A block holds the keys and values of `block_size` tokens for the layers of one group. All blocks have the same size and
come from one pool, so a group has as many layers as fit. This follows vLLM's hybrid KV cache manager.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from moiety_engine.cache.table_layout import CHUNK_TOKENS
from moiety_engine.model.paged_state_spec import PagedStateSpec
from moiety_engine.model.recurrent_specs import RecurrentSpec
from moiety_engine.model.spec import LatentAttentionSpec

if TYPE_CHECKING:
    from moiety_engine.model.spec import ModelSpec

MAX_GROUPS = 8  # each costs a block table per sequence and step
MAX_MEMORY_FRACTION = 0.9  # groups are formed if they need at most this fraction of the memory of a single one
_CONTEXT_TOKENS = 32768  # context for which memory is compared, unless the model's is shorter


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers of one cache group, as indices over all pipeline stages.

    `window`: number of positions that a query of any of its layers sees, its own included; None: all. `chunked`: a
    query sees those of its own chunk of `window` positions.
    """

    layers: tuple[int, ...]
    window: int | None
    chunked: bool = False


class _Kind(NamedTuple):
    """Range of positions that layers keep, see CacheGroup, and what they keep of a position."""

    window: int | None
    chunked: bool
    values: int
    shape: tuple[int, ...]


def cache_groups(spec: ModelSpec, *, keep_everything: bool = False, one_shape: bool = False) -> tuple[CacheGroup, ...]:
    """Return the cache groups of a model; those without a window come first.

    Recurrent layers are in none, unless they have compressed entries, which cover the whole context. With
    `keep_everything` there is one group that frees nothing. Layers are divided into groups only where that saves
    memory. The layers of a group have caches of one shape; with `one_shape`, groups are formed only if all layers have
    the same.
    """
    layers = spec.paged_layers
    kind_of = {layer: _kind(spec, layer) for layer in layers}
    if keep_everything:
        return (CacheGroup(layers, None),)
    num_of = Counter(kind_of.values())
    kinds = sorted(num_of, key=lambda kind: (kind.window is not None, -(kind.window or 0), kind.chunked, kind.values))
    ranges = {(kind.window, kind.chunked) for kind in kinds}
    single = (CacheGroup(layers, *(ranges.pop() if len(ranges) == 1 else (_widest(kinds), False))),)
    shapes = {kind.shape for kind in kinds}
    latent = {isinstance(spec.layers[layer].attention, LatentAttentionSpec) for layer in layers}
    if len({kind[:2] for kind in kinds}) <= 1 or (len(shapes) > 1 and one_shape) or len(latent) > 1:
        return single
    context = min(spec.max_context_tokens, _CONTEXT_TOKENS)

    def values(block: int) -> int:
        """Return the values that all groups keep of the context, with `block` values of a token in a block."""
        kept = (-(-num_of[kind] // (block // kind.values)) * _kept(kind.window, context) for kind in kinds)
        return block * sum(kept)

    widest = max(kind.values for kind in kinds)
    sizes = sorted({count * kind.values for kind in kinds for count in range(1, num_of[kind] + 1)})
    fitting = [
        block
        for block in sizes
        if block >= widest and sum(-(-num_of[kind] // (block // kind.values)) for kind in kinds) <= MAX_GROUPS
    ]
    best = min(fitting, key=lambda block: (values(block), -block), default=0)
    in_one = sum(num_of[kind] * kind.values for kind in kinds) * _kept(single[0].window, context)
    if not best or values(best) > MAX_MEMORY_FRACTION * in_one:
        return single
    found = []
    for kind in kinds:
        of_kind, places = [layer for layer in layers if kind_of[layer] == kind], best // kind.values
        parts = (of_kind[begin : begin + places] for begin in range(0, len(of_kind), places))
        found += [CacheGroup(tuple(part), kind.window, kind.chunked) for part in parts]
    return tuple(found)


def _kind(spec: ModelSpec, layer: int) -> _Kind:
    attention = spec.layers[layer].attention
    if isinstance(attention, PagedStateSpec):
        return _Kind(None, False, sum(attention.entry_widths), attention.entry_widths)
    assert not isinstance(attention, RecurrentSpec), "other recurrent layers are in no group"
    window: int | None = getattr(attention, "window", None)
    chunked = bool(getattr(attention, "chunked", False))
    if window is not None and window >= spec.max_context_tokens:
        window, chunked = None, False
    return _Kind(window, chunked, attention.cached_values, attention.cache_shape)


def _widest(kinds: list[_Kind]) -> int | None:
    windows = [kind.window for kind in kinds if kind.window is not None]
    return max(windows) if windows and len(windows) == len(kinds) else None


def _kept(window: int | None, context: int) -> int:
    """Return the tokens that layers with the window keep of a context, and a chunk of a prompt."""
    return context if window is None else min(context, window + CHUNK_TOKENS)
