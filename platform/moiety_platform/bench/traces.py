"""Traces of requests: when, from whom, how long. Read from the forms in which they are published, or drawn at random.

| form | columns |
|---|---|
| own | `arrival_s,tenant,input_tokens,output_tokens[,class]` |
| Azure 2023 | `TIMESTAMP,ContextTokens,GeneratedTokens` |
| VTC | `req_time_s,client,prompt_len,output_len` |
| Mooncake | JSON lines with `timestamp` (ms), `input_length`, `output_length` |
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from random import Random

DEFAULT_CLASS = "standard"
DEFAULT_TENANT = "default"


class BadTrace(ValueError):
    """The file is not a trace of a known form; the message says where."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One arrival, in seconds from the start of the trace."""

    arrival_s: float
    tenant: str
    input_tokens: int
    output_tokens: int
    service_class: str = DEFAULT_CLASS


Row = Mapping[str, str]


def read_trace(path: Path) -> list[TraceRequest]:
    """The requests in order of arrival, the first at 0. Raises BadTrace."""
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
        raise BadTrace(f"{path} holds no request")
    requests.sort(key=lambda request: request.arrival_s)
    first_s = requests[0].arrival_s
    return [replace(request, arrival_s=request.arrival_s - first_s) for request in requests]


def draw_poisson(
    rng: Random, rate_per_s: float, num_requests: int, input_tokens: int, output_tokens: int
) -> list[TraceRequest]:
    """Independent arrivals at a mean rate, all of one length."""
    arrival_s, requests = 0.0, []
    for _ in range(num_requests):
        requests.append(TraceRequest(arrival_s, DEFAULT_TENANT, input_tokens, output_tokens))
        arrival_s += rng.expovariate(rate_per_s)
    return requests


def at_rate(requests: list[TraceRequest], rate_per_s: float) -> list[TraceRequest]:
    """The same arrivals, stretched or compressed in time to a mean rate; bursts stay bursts."""
    span_s = requests[-1].arrival_s
    if span_s == 0:
        return requests
    factor = (len(requests) - 1) / rate_per_s / span_s
    return [replace(request, arrival_s=request.arrival_s * factor) for request in requests]


def shorten(requests: list[TraceRequest], num_requests: int | None, duration_s: float | None) -> list[TraceRequest]:
    """The first so many requests, or those of the first so many seconds."""
    chosen = requests if num_requests is None else requests[:num_requests]
    return chosen if duration_s is None else [request for request in chosen if request.arrival_s <= duration_s]


def _read_csv(rows: csv.DictReader[str]) -> list[TraceRequest]:
    columns = set(rows.fieldnames or ())
    for needed, parse in _FORMS:
        if needed <= columns:
            return _parse_all(enumerate(rows, start=2), parse)
    known = "; ".join(",".join(sorted(needed)) for needed, _ in _FORMS)
    raise BadTrace(f"columns {', '.join(sorted(columns)) or 'missing'}; known are: {known}")


def _read_json_lines(lines: Iterable[str]) -> list[TraceRequest]:
    def parse(row: Row) -> TraceRequest:
        arrival_s = float(row["timestamp"]) / 1000
        return TraceRequest(arrival_s, DEFAULT_TENANT, int(row["input_length"]), int(row["output_length"]))

    try:
        rows = [(number, json.loads(line)) for number, line in enumerate(lines, start=1) if line.strip()]
    except ValueError as exc:
        raise BadTrace(f"not JSON lines: {exc}") from exc
    return _parse_all(rows, parse)


def _parse_all(rows: Iterable[tuple[int, Row]], parse: Callable[[Row], TraceRequest]) -> list[TraceRequest]:
    requests = []
    for number, row in rows:
        try:
            request = parse(row)
        except (ValueError, TypeError, KeyError) as exc:
            raise BadTrace(f"line {number}: {exc}") from exc
        if request.input_tokens > 0 and request.output_tokens > 0:  # published traces hold a few empty requests
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


_FORMS: tuple[tuple[frozenset[str], Callable[[Row], TraceRequest]], ...] = (
    (frozenset({"arrival_s", "tenant", "input_tokens", "output_tokens"}), _parse_own),
    (frozenset({"TIMESTAMP", "ContextTokens", "GeneratedTokens"}), _parse_azure),
    (frozenset({"req_time_s", "client", "prompt_len", "output_len"}), _parse_vtc),
)
