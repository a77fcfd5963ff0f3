"""Output of `moiety usage --requests N --json` as a workload: a gateway's own traffic."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import msgspec

from moiety_engine.errors import InvalidConfig
from moiety_workload.request import TraceRequest, Workload


class _UsageRow(msgspec.Struct):
    started_at: datetime
    tenant_id: str
    service_class: str
    prompt_tokens: int
    output_tokens: int


class _Page(msgspec.Struct):
    data: list[_UsageRow]


def read_usage(path: Path) -> tuple[Workload, int]:
    """Return the requests with their arrivals, and the number of rows left out.

    A row without lengths was not served and is left out. Raises InvalidConfig.
    """
    try:
        rows = msgspec.json.decode(path.read_bytes(), type=_Page).data
    except (OSError, msgspec.DecodeError) as exc:
        raise InvalidConfig(
            f"cannot read usage from {path}: {exc}; write it with: moiety usage --requests 500 --json > usage.json"
        ) from exc
    served = sorted((row for row in rows if row.prompt_tokens > 0 and row.output_tokens > 0), key=_started)
    if len(served) < 2:
        raise InvalidConfig(
            f"{path} has {len(served)} served requests; advice needs at least two, and better some hundred"
        )
    first = served[0].started_at
    requests = tuple(
        TraceRequest(
            (row.started_at - first).total_seconds(),
            row.tenant_id,
            row.prompt_tokens,
            row.output_tokens,
            row.service_class,
        )
        for row in served
    )
    last_s = requests[-1].arrival_s
    mean_gap_s = last_s / (len(requests) - 1) if last_s > 0 else 1.0
    return Workload(path.stem, requests, last_s + mean_gap_s), len(rows) - len(served)


def _started(row: _UsageRow) -> datetime:
    return row.started_at
