"""Whether blocks behind sliding windows are freed, and the windows of the block tables of a replica."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moiety_engine.config import Speculate
from moiety_wire.engine_choices import Batching

if TYPE_CHECKING:
    from moiety_engine.config import EngineConfig
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
    """
    first, *others = (group.window for group in model.cache_groups)
    if config.speculate in (Speculate.DRAFT, Speculate.MTP):
        first = None
    return (first, *others)
