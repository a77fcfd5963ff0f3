"""Announcements of transfers of whole caches, as an engine with one rank makes them."""

from __future__ import annotations

from typing import Any

from moiety_engine.kv_transfer.cache_shards import EVENLY, WHOLE, CacheShare
from moiety_engine.kv_transfer.kv_layout import ShardViews, token_bytes
from moiety_engine.kv_transfer.messages import Begin
from moiety_engine.model.batch import KvCache
from moiety_kernels.kv_store.caches import LayerCache
from moiety_wire.roles import KvRanks


def share_of(kv: KvCache) -> CacheShare:
    """Return the share of a rank whose cache has all layers and heads."""

    def units(number: int) -> int:
        cache = kv.token_caches.get(number)
        return EVENLY if cache is None else cache.k_NGPd.shape[1] if isinstance(cache, LayerCache) else WHOLE

    return CacheShare(KvRanks(), 0, len(kv.layers), tuple(units(number) for number in range(len(kv.layers))))


def begin_of(kv: KvCache, transfer_id: str, num_tokens: int, hashed: bytes = b"", **changes: Any) -> Begin:
    """Return the announcement of tokens that have no states."""
    share = share_of(kv)
    shards = share.shards_to(KvRanks())[0]
    form = ShardViews(kv, share, shards).form
    fields: dict[str, Any] = {"shards": shards, "transport": "tcp"} | changes
    return Begin(transfer_id, num_tokens, num_tokens * token_bytes(form), hashed, form, **fields)
