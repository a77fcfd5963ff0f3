"""Attention over a cache whose positions are divided among ranks (decode context parallelism).

Each rank attends to its own keys with the query heads of all ranks that hold the same key-value heads. The partial
results go to the ranks that own the heads, which combine them by the logarithm of their sums of exponentials (LSE).
With one rank this is plain attention.

T tokens, H query heads of a rank, K those of all ranks that divide the positions, R these ranks, d head width, e a
partial result with its LSE.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from moiety_engine.errors import InvalidConfig
from moiety_engine.model.paged_state_spec import PagedStateSpec
from moiety_engine.model.recurrent_specs import RecurrentSpec
from moiety_engine.model.routed_attention_spec import RoutedAttentionSpec
from moiety_engine.model.spec import LatentAttentionSpec
from moiety_kernels.mla_attention import mla_attention
from moiety_kernels.paged_attention import paged_attention
from moiety_kernels.shard_attention import combine_shards, shard_attention, shard_mla_attention

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from moiety_engine.distribution.collectives import RankCollectives
    from moiety_engine.distribution.layout import Layout
    from moiety_engine.model.spec import ModelSpec
    from moiety_kernels.kv_store.caches import LatentCache, LayerCache
    from moiety_kernels.paged_attention.inputs import AttentionMetadata, AttentionParameters
    from moiety_kernels.shard_attention import ShardResult


def paged_attention_over(
    context: RankCollectives, parameters: AttentionParameters
) -> Callable[[Tensor, LayerCache, AttentionMetadata], Tensor]:
    """Return `paged_attention` with these parameters, over the shards of all ranks of `context`.

    With several ranks a cache has one key-value head, the same on all of them.
    """
    if context.size == 1:
        return partial(paged_attention, parameters=parameters)
    sinks_H, of_shard = parameters.sinks_H, replace(parameters, sinks_H=None)

    def attend(q_THd: Tensor, cache: LayerCache, metadata: AttentionMetadata) -> Tensor:
        return _combined(
            context, q_THd, partial(shard_attention, cache=cache, metadata=metadata, parameters=of_shard), sinks_H
        )

    return attend


def mla_attention_over(
    context: RankCollectives, scale: float
) -> Callable[[Tensor, LatentCache, AttentionMetadata], Tensor]:
    """Return `mla_attention` with this scale, over the shards of all ranks of `context`."""
    if context.size == 1:
        return partial(mla_attention, scale=scale)

    def attend(q_THL: Tensor, cache: LatentCache, metadata: AttentionMetadata) -> Tensor:
        return _combined(context, q_THL, partial(shard_mla_attention, cache=cache, metadata=metadata, scale=scale))

    return attend


def require_shared_positions(spec: ModelSpec, layout: Layout) -> None:
    """Raise InvalidConfig if the ranks of --decode-context-parallel cannot divide the positions of the model's cache.

    They must hold the same keys and values: latent rows, or fewer key-value heads than ranks.
    """
    dcp, tp, option = layout.dcp, layout.tp, f"--decode-context-parallel {layout.dcp}"
    if dcp == 1:
        return
    for layer in spec.layers:
        attention = layer.attention
        if isinstance(attention, PagedStateSpec | RoutedAttentionSpec) or getattr(attention, "indexer", None):
            raise InvalidConfig(
                f"{option} is not available for this {spec.family} model, whose attention selects or compresses "
                "positions across the whole context: leave it out"
            )
        if isinstance(attention, RecurrentSpec | LatentAttentionSpec):
            continue
        num_kv = attention.num_kv_heads
        if tp % num_kv or tp // num_kv % dcp:
            most = tp // num_kv if tp % num_kv == 0 else 1
            raise InvalidConfig(
                f"{option} needs that many copies of each key-value head, but with --tp {tp} there "
                + (f"are {most}" if most > 1 else "is one")
                + f" of each of the model's {num_kv}: use "
                + (f"a divisor of {most}" if most > 1 else f"a multiple of {dcp * num_kv} as --tp, or leave it out")
            )


def require_shared_cache(spec: ModelSpec, layout: Layout) -> None:
    """Raise InvalidConfig if the ranks of --prefill-context-parallel cannot divide the tokens of the model."""
    if layout.pcp == 1:
        return
    option = f"--prefill-context-parallel {layout.pcp}"
    for layer in spec.layers:
        attention = layer.attention
        if isinstance(attention, RecurrentSpec):
            raise InvalidConfig(
                f"{option} is not available for this {spec.family} model, whose recurrent layers compute the tokens of "
                "a prompt one after the other: leave it out"
            )
        is_selective = isinstance(attention, PagedStateSpec | RoutedAttentionSpec)
        if is_selective or getattr(attention, "indexer", None):
            raise InvalidConfig(
                f"{option} is not available for this {spec.family} model, whose attention selects or compresses "
                "positions before it reads the cache: leave it out"
            )
    if spec.defers_experts:
        raise InvalidConfig(
            f"{option} is not available for this {spec.family} model, whose experts run beside the next attention: "
            "leave it out"
        )


def _combined(
    context: RankCollectives, q_THd: Tensor, attend: Callable[[Tensor], ShardResult], sinks_H: Tensor | None = None
) -> Tensor:
    """Return attention of this rank's heads to all shards, as wide as a value, in the type of the queries."""
    out_TKd, lse_TK = attend(context.gather_heads(q_THd))
    tokens, heads, width = out_TKd.shape[0], q_THd.shape[1], out_TKd.shape[2]
    sent_RTHe = out_TKd.new_empty(context.size, tokens, heads, width + 1)
    sent_RTHe[..., :width] = out_TKd.view(tokens, context.size, heads, width).transpose(0, 1)
    sent_RTHe[..., width] = lse_TK.view(tokens, context.size, heads).transpose(0, 1)
    parts_RTHe = context.exchange_parts(sent_RTHe)
    return combine_shards(parts_RTHe[..., :width], parts_RTHe[..., width], sinks_H).to(q_THd.dtype)
