"""Prompt and output lengths for a benchmark, from fixed numbers or from a trace."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moiety_engine.errors import InvalidConfig
from moiety_workload.errors import BadTrace
from moiety_workload.readers import read_trace


@dataclass(frozen=True, slots=True)
class BenchLengths:
    input_tokens: int
    output_tokens: int


def fixed_lengths(count: int, input_tokens: int, output_tokens: int) -> list[BenchLengths]:
    return [BenchLengths(input_tokens, output_tokens)] * count


def trace_lengths(path: Path, count: int, scale: float, *, input_tokens: int | None) -> list[BenchLengths]:
    """Return the lengths of the first `count` requests of a trace, multiplied by `scale` (at least 1).

    `input_tokens` replaces the trace's prompt lengths. Raises InvalidConfig.
    """
    try:
        requests = read_trace(path)
    except BadTrace as exc:
        raise InvalidConfig(str(exc)) from exc
    if len(requests) < count:
        raise InvalidConfig(f"{path} has {len(requests)} requests, fewer than the requested {count}")
    return [
        BenchLengths(input_tokens or max(1, round(r.input_tokens * scale)), max(1, round(r.output_tokens * scale)))
        for r in requests[:count]
    ]
