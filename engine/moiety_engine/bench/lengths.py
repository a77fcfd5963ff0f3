"""Prompt and output lengths for a benchmark, from fixed numbers or from a trace's columns.

Known forms: our own (`input_tokens,output_tokens`), Azure LLM inference 2023 (`ContextTokens,GeneratedTokens`) and the
VTC paper's (`prompt_len,output_len`).
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from moiety_engine.errors import InvalidConfig

_COLUMNS = [("input_tokens", "output_tokens"), ("ContextTokens", "GeneratedTokens"), ("prompt_len", "output_len")]


@dataclass(frozen=True, slots=True)
class Lengths:
    input_tokens: int
    output_tokens: int


def fixed_lengths(count: int, input_tokens: int, output_tokens: int) -> list[Lengths]:
    return [Lengths(input_tokens, output_tokens)] * count


def trace_lengths(path: Path, count: int, scale: float, *, input_tokens: int | None) -> list[Lengths]:
    """The first `count` requests of a trace, lengths multiplied by `scale` (at least 1); `input_tokens` replaces the
    trace's prompt lengths. Raises InvalidConfig."""
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        names = reader.fieldnames or []
        columns = next((pair for pair in _COLUMNS if set(pair) <= set(names)), None)
        if columns is None:
            known = "; ".join(" and ".join(pair) for pair in _COLUMNS)
            raise InvalidConfig(f"{path} has the columns {', '.join(names)}; lengths are read from {known}")
        rows = [(int(row[columns[0]]), int(row[columns[1]])) for row, _ in zip(reader, range(count), strict=False)]
    if len(rows) < count:
        raise InvalidConfig(f"{path} has {len(rows)} requests, and {count} were asked for")
    return [Lengths(input_tokens or max(1, round(i * scale)), max(1, round(o * scale))) for i, o in rows]
