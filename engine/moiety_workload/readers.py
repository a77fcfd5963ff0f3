"""Readers of request traces (arrival time, tenant, lengths) in their published formats.

| format | columns |
|---|---|
| own | `arrival_s,tenant,input_tokens,output_tokens[,class]` |
| Azure LLM inference 2023 | `TIMESTAMP,ContextTokens,GeneratedTokens` |
| VTC | `req_time_s,client,prompt_len,output_len` |
| Mooncake | JSON lines with `timestamp` (ms), `input_length`, `output_length` and possibly `hash_ids` |
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from moiety_workload.errors import BadTrace
from moiety_workload.request import DEFAULT_CLASS, DEFAULT_TENANT, TraceRequest, Workload
from moiety_workload.tenants import spread_over_tenants
from moiety_workload.transforms import spread_ticks

MOONCAKE_BLOCK_TOKENS = 512  # block size of the trace's hashes
_COMMON_SHARE = 0.05  # a leading block in a larger share of requests is a system prompt, not a conversation

Row = Mapping[str, Any]


def read_trace(path: Path) -> list[TraceRequest]:
    """Return the requests in order of arrival, the first at 0. Raises BadTrace."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            requests = _read_json_lines(file) if path.suffix == ".jsonl" else _read_csv(csv.DictReader(file))
    except OSError as exc:
        raise BadTrace(f"cannot read the trace {path}: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise BadTrace(f"{path} is not text") from exc
    except BadTrace as exc:
        raise BadTrace(f"{path}: {exc}") from exc
    if not requests:
        raise BadTrace(f"{path} has no requests")
    requests.sort(key=lambda request: request.arrival_s)
    first_s = requests[0].arrival_s
    return [replace(request, arrival_s=request.arrival_s - first_s) for request in requests]


def load_workload(path: Path, *, seed: int = 0, num_tenants: int = 20) -> Workload:
    """Return the trace as a workload.

    Where it has prefix blocks (Mooncake), its coarse arrival times are spread over their ticks, and its conversations
    over `num_tenants` tenants, both at random by `seed`. Raises BadTrace.
    """
    requests = read_trace(path)
    block_tokens = None
    if any(request.prefix_ids for request in requests):
        block_tokens = MOONCAKE_BLOCK_TOKENS
        requests = spread_over_tenants(spread_ticks(requests, seed), num_tenants, seed)
    last_s = requests[-1].arrival_s
    mean_gap_s = last_s / (len(requests) - 1) if len(requests) > 1 and last_s > 0 else 1.0
    return Workload(path.stem, tuple(requests), last_s + mean_gap_s, block_tokens)


def _read_csv(rows: csv.DictReader[str]) -> list[TraceRequest]:
    columns = set(rows.fieldnames or ())
    for needed, parse in _FORMS:
        if needed <= columns:
            return _parse_all(enumerate(rows, start=2), parse)
    known = "; ".join(",".join(sorted(needed)) for needed, _ in _FORMS)
    raise BadTrace(f"columns {', '.join(sorted(columns)) or 'missing'}; known are: {known}")


def _read_json_lines(lines: Iterable[str]) -> list[TraceRequest]:
    try:
        rows = [(number, json.loads(line)) for number, line in enumerate(lines, start=1) if line.strip()]
    except ValueError as exc:
        raise BadTrace(f"the file is not JSON lines: {exc}") from exc
    return _name_conversations(_parse_all(rows, _parse_mooncake))


def _parse_all(rows: Iterable[tuple[int, Row]], parse: Callable[[Row], TraceRequest]) -> list[TraceRequest]:
    requests = []
    for number, row in rows:
        try:
            request = parse(row)
        except (ValueError, TypeError, KeyError) as exc:
            raise BadTrace(f"line {number}: {exc}") from exc
        if request.input_tokens > 0 and request.output_tokens > 0:  # published traces contain a few empty requests
            requests.append(request)
    return requests


def _parse_own(row: Row) -> TraceRequest:
    return TraceRequest(
        float(row["arrival_s"]),
        row["tenant"],
        int(row["input_tokens"]),
        int(row["output_tokens"]),
        row.get("class") or DEFAULT_CLASS,
    )


def _parse_azure(row: Row) -> TraceRequest:
    arrival_s = datetime.fromisoformat(row["TIMESTAMP"][:26]).replace(tzinfo=UTC).timestamp()
    return TraceRequest(arrival_s, DEFAULT_TENANT, int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def _parse_vtc(row: Row) -> TraceRequest:
    return TraceRequest(float(row["req_time_s"]), row["client"], int(row["prompt_len"]), int(row["output_len"]))


def _parse_mooncake(row: Row) -> TraceRequest:
    ids = tuple(int(block) for block in row.get("hash_ids") or ())
    input_tokens = int(row["input_length"])
    if ids and len(ids) != -(-input_tokens // MOONCAKE_BLOCK_TOKENS):
        raise ValueError(f"{len(ids)} hash_ids for {input_tokens} tokens in blocks of {MOONCAKE_BLOCK_TOKENS}")
    return TraceRequest(
        float(row["timestamp"]) / 1000, DEFAULT_TENANT, input_tokens, int(row["output_length"]), prefix_ids=ids
    )


def _name_conversations(requests: list[TraceRequest]) -> list[TraceRequest]:
    """Name each conversation by its first leading block that is not a common system prompt: its turns share it."""
    count = Counter(block for request in requests for block in set(request.prefix_ids))
    limit = max(2.0, _COMMON_SHARE * len(requests))

    def name(request: TraceRequest) -> str:
        own = (block for block in request.prefix_ids if count[block] <= limit)
        return str(next(own, ""))

    return [replace(request, conversation=name(request)) if request.prefix_ids else request for request in requests]


_FORMS: tuple[tuple[frozenset[str], Callable[[Row], TraceRequest]], ...] = (
    (frozenset({"arrival_s", "tenant", "input_tokens", "output_tokens"}), _parse_own),
    (frozenset({"TIMESTAMP", "ContextTokens", "GeneratedTokens"}), _parse_azure),
    (frozenset({"req_time_s", "client", "prompt_len", "output_len"}), _parse_vtc),
)
