"""Caches of a replica: whether blocks behind windows are freed, and which settings recurrent states allow."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from moiety_engine.config import Speculate
from moiety_engine.errors import InvalidConfig
from moiety_engine.model.compressed_specs import CompressedAttentionSpec
from moiety_engine.model.recurrent_specs import RecurrentSpec
from moiety_wire.engine_choices import Batching

if TYPE_CHECKING:
    from moiety_engine.config import EngineConfig
    from moiety_engine.model.compressed_specs import PoolSpec
    from moiety_engine.model.spec import ModelSpec
    from moiety_engine.model.transformer import Transformer


def why_windows_are_kept(config: EngineConfig) -> str:
    """Return why blocks behind sliding windows are not freed with this configuration; "" if they are."""
    if config.disk_cache:
        return "the disk cache (--disk-cache) stores one block for all layers"
    if config.batching is Batching.PADDED:
        return "padded batching reserves all blocks of a batch when it starts"
    return ""


def table_windows(model: Transformer, config: EngineConfig) -> tuple[int | None, ...]:
    """Return the window of each block table; None: the table keeps the whole context.

    A draft model and an MTP layer use the first table for their own keys and values, so it keeps the whole context.
    Raises InvalidConfig if the model was loaded to free what the configuration keeps.
    """
    first, *others = (group.window for group in model.cache_groups)
    reason = why_windows_are_kept(config)
    if reason and others:
        raise InvalidConfig(f"the model was loaded to free blocks behind windows, but {reason}: load it again")
    if reason or config.speculate in (Speculate.DRAFT, Speculate.MTP):
        first = None
    return (first, *others)


def require_recurrent_support(model: Transformer, config: EngineConfig) -> None:
    """Raise InvalidConfig for settings that are not available with a model that has recurrent layers."""
    if not model.spec.recurrent_layers:
        return
    if config.block_size is not None:
        _require_block_size(model.spec, config.block_size)
    refused = {
        "the disk cache stores states only if each rank has all layers: leave out --disk-cache, or --pp": (
            bool(config.disk_cache) and config.pp > 1
        ),
        "padded batching computes rows beyond a sequence: use another --batching": config.batching is Batching.PADDED,
        "not all of them can replay tokens when a draft is rejected: leave out --speculate": (
            config.speculate is not Speculate.OFF and not can_undo_drafts(model.spec)
        ),
        "their bits on a GPU depend on how prompts are cut: leave out --batch-invariant": (
            config.batch_invariant and model.device.type != "cpu"
        ),
    }
    for reason, is_set in refused.items():
        if is_set:
            raise InvalidConfig(f"this model has recurrent layers, and {reason}")


def entry_block_size(spec: ModelSpec) -> int:
    """Return the least block size whose blocks have no unused places for compressed entries; 0 without such layers."""
    rates = [pool.rate for pool in _pools(spec)]
    return math.lcm(*rates) if rates else 0


def _pools(spec: ModelSpec) -> list[PoolSpec]:
    attentions = [layer.attention for layer in spec.layers]
    compressed = [one for one in attentions if isinstance(one, CompressedAttentionSpec)]
    return [one.pool for one in compressed if one.pool is not None]


def _require_block_size(spec: ModelSpec, block_size: int) -> None:
    """Raise InvalidConfig if the borders of blocks are no borders of compressed entries."""
    for pool in _pools(spec):
        if not pool.fits(block_size):
            raise InvalidConfig(
                f"this model has compressed entries of {pool.rate} tokens, and --block-size {block_size} is neither a "
                f"multiple nor a divisor of that: use another --block-size, such as {entry_block_size(spec)}"
            )


def can_undo_drafts(spec: ModelSpec) -> bool:
    """Return whether all recurrent layers can replay the accepted tokens of a draft."""
    attentions = (layer.attention for layer in spec.layers)
    return all(one.input_widths for one in attentions if isinstance(one, RecurrentSpec))
