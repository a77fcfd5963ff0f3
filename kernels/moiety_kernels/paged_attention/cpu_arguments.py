"""Arguments of attention on a CPU, shared by its tasks; `cpu.py` has the dimensions."""

from __future__ import annotations

from typing import NamedTuple

from moiety_kernels.cpu.compiling import jit
from moiety_kernels.cpu.structs import Address, Float64, Int64, size_of

CHUNK = 128  # key positions that a task processes at once, at fixed boundaries


class QueryRange(NamedTuple):
    """Queries of one sequence that a task computes, for one key-value head."""

    sequence: Int64
    first: Int64  # query
    queries: Int64


class AttentionArguments(NamedTuple):
    """Arguments of attention over the paged cache."""

    q_THd: Address  # float32
    k_cache_NGPd: Address
    v_cache_NGPd: Address
    out_THd: Address  # float32, contiguous, as wide as a value
    query_start_S1: Address  # int32: where each sequence's queries start, with one entry more
    context_len_S: Address  # int32
    block_table_SB: Address  # int32
    sequences: Int64  # S
    table_width: Int64  # entries from one row of the block table to the next
    heads: Int64  # H
    kv_heads: Int64  # G
    width: Int64  # d of queries and keys
    places: Int64  # P
    key_block: Int64  # bytes from one block of the key cache to the next
    value_block: Int64
    q_stride: Int64  # bytes from one token of q to the next
    window: Int64  # positions that a query sees, or 0: all
    chunked: Int64  # whether positions are divided into chunks of `window`
    items: Address  # workspace of `QueryRange`s
    tokens_at_once: Int64  # most queries of an item
    task: Address
    sinks_H: Address  # float32, or 0
    value_width: Int64  # d of values
    value_stride: Int64  # bytes from one slot of the value cache to the next
    cache_itemsize: Int64  # 4 for float32, 2 for bfloat16
    scale: Float64
    num_shards: Int64  # the cache has every num_shards-th position,
    shard: Int64  # beginning with this one
    states_TH2: Address  # float32, output: the largest scaled score and the sum of weights relative to it, or 0


ITEM_BYTES = size_of(QueryRange)


@jit
def lowest_seen(args: AttentionArguments, position: int) -> int:
    """Return the first place, an index of the cache's positions, that the query at `position` sees."""
    window = args.window
    if not window:
        return 0
    first = position // window * window if args.chunked else max(0, position - window + 1)
    return (first + args.num_shards - 1 - args.shard) // args.num_shards


@jit
def end_seen(args: AttentionArguments, position: int) -> int:
    """Return the place after the last one that the query at `position` sees; 0 if it sees none."""
    return (position + args.num_shards - args.shard) // args.num_shards
