"""Argument offsets of attention on a CPU, shared by its tasks."""

from __future__ import annotations

CHUNK = 128  # key positions that a task processes at once, at fixed boundaries

Q, K_CACHE, V_CACHE, OUT, QUERY_START, CONTEXT_LEN, TABLE = 0, 1, 2, 3, 4, 5, 6
SEQUENCES, TABLE_WIDTH, HEADS, KV_HEADS, WIDTH, PLACES, Q_STRIDE, WINDOW = 7, 8, 9, 10, 11, 12, 13, 14
ITEMS, TOKENS_AT_ONCE, TASK, SINKS, VALUE_WIDTH, VALUE_STRIDE, SIZE, SCALE = 15, 16, 17, 18, 19, 20, 21, 22
