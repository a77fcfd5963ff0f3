"""Parses load from the servers' Prometheus metrics. Pure.

A series may occur once for each rank of an engine replica, with the same value, and once for each replica.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moiety_platform.engine_addresses import ExternalKind

_SERIES = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? ([^ ]+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
REPLICA_LABELS = ("engine", "dp_rank")  # vLLM's and SGLang's


@dataclass(frozen=True, slots=True)
class ExternalMetrics:
    """Metrics of one server. Values that it does not report are 0."""

    num_running: int = 0
    num_waiting: int = 0
    kv_blocks_total: int = 0
    kv_blocks_used: int = 0
    block_size: int = 1
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    output_tokens_total: int = 0
    requests_total: int = 0


@dataclass(frozen=True, slots=True)
class _Names:
    num_running: str
    num_waiting: str
    kv_use: str = ""  # a fraction from 0 to 1
    prompt_tokens: str = ""
    cached_tokens: str = ""
    output_tokens: str = ""
    requests: str = ""


NAMES: Mapping[ExternalKind, _Names] = {
    ExternalKind.VLLM: _Names(
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:prompt_tokens_total",
        "vllm:prefix_cache_hits_total",
        "vllm:generation_tokens_total",
        "vllm:request_success_total",
    ),
    ExternalKind.SGLANG: _Names(
        "sglang:num_running_reqs",
        "sglang:num_queue_reqs",
        "sglang:token_usage",
        "sglang:prompt_tokens_total",
        "sglang:cached_tokens_total",
        "sglang:generation_tokens_total",
        "sglang:num_requests_total",
    ),
    ExternalKind.LLAMA_CPP: _Names(
        "llamacpp:requests_processing",
        "llamacpp:requests_deferred",
        prompt_tokens="llamacpp:prompt_tokens_total",
        cached_tokens="llamacpp:prompt_tokens_cached_total",
        output_tokens="llamacpp:tokens_predicted_total",
    ),
}
VLLM_CACHE = "vllm:cache_config_info"
SGLANG_CACHE = "sglang:max_total_num_tokens"

Series = Sequence[tuple[dict[str, str], float]]


def read_metrics(kind: ExternalKind, text: str) -> ExternalMetrics | None:
    """Parse the metrics. Returns None if they have no number of running requests."""
    names = NAMES[kind]
    wanted = {getattr(names, field) for field in _Names.__slots__} | {VLLM_CACHE, SGLANG_CACHE}
    found = _parse(text, wanted)
    if names.num_running not in found:
        return None
    num_blocks, block_size = _cache(found)
    use = _mean(found[names.kv_use])
    prompt_tokens, cached_tokens = _sum(found[names.prompt_tokens]), _sum(found[names.cached_tokens])
    if kind is ExternalKind.LLAMA_CPP:  # counts only computed prompt tokens
        prompt_tokens += cached_tokens
    return ExternalMetrics(
        num_running=_level(found[names.num_running]),
        num_waiting=_level(found[names.num_waiting]),
        kv_blocks_total=num_blocks,
        kv_blocks_used=min(num_blocks, round(use * num_blocks)),
        block_size=block_size,
        prompt_tokens_total=prompt_tokens,
        cached_tokens_total=cached_tokens,
        output_tokens_total=_sum(found[names.output_tokens]),
        requests_total=_sum(found[names.requests]),
    )


def _parse(text: str, names: set[str]) -> defaultdict[str, list[tuple[dict[str, str], float]]]:
    found: defaultdict[str, list[tuple[dict[str, str], float]]] = defaultdict(list)
    text = f"\n{text}"
    for name in filter(None, names):
        begin = text.find(f"\n{name}")
        while begin >= 0:  # hundreds of other series are skipped without a look at their lines
            end = text.find("\n", begin + 1)
            line = text[begin + 1 :] if end < 0 else text[begin + 1 : end]
            begin = text.find(f"\n{name}", begin + 1)
            match = _SERIES.match(line.rstrip())
            if match is None or match[1] != name:
                continue
            try:
                value = float(match[3])
            except ValueError:
                continue
            if math.isfinite(value) and value >= 0:
                found[name].append((dict(_LABEL.findall(match[2] or "")), value))
    return found


def _level(series: Series) -> int:
    """Return the sum of a gauge over all replicas."""
    by_replica: defaultdict[tuple[str, ...], float] = defaultdict(float)
    for labels, value in series:
        replica = tuple(labels.get(name, "") for name in REPLICA_LABELS)
        by_replica[replica] = max(by_replica[replica], value)
    return int(sum(by_replica.values()))


def _sum(series: Series) -> int:
    return int(sum(value for _, value in series))


def _mean(series: Series) -> float:
    return sum(value for _, value in series) / len(series) if series else 0.0


def _cache(found: Mapping[str, Series]) -> tuple[int, int]:
    """Return the number of blocks, and the tokens per block, of the KV caches of all replicas."""
    if VLLM_CACHE in found:
        pairs = [(labels.get("num_gpu_blocks", ""), labels.get("block_size", "")) for labels, _ in found[VLLM_CACHE]]
        if all(blocks.isdecimal() and size.isdecimal() for blocks, size in pairs):
            return sum(int(blocks) for blocks, _ in pairs), int(pairs[0][1])
    return _level(found.get(SGLANG_CACHE, ())), 1
