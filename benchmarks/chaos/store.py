"""Store of a long run: its size, its sums, and rows past their retention time."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psycopg

MORNING, AFTERNOON = 10, 15  # hours of the day between which growth is measured, and from which on memory is flat
MAX_MISSED = 0.15  # of the predicted size
HOUR_MS = 3_600_000

SUMS = (
    "requests",
    "prompt_tokens",
    "cached_tokens",
    "output_tokens",
    "cost_nanodollars",
    "credit_nanodollars",
    "num_slo_attained",
    "num_slo_requests",
)
GROUP = "tenant_id, project_id, key_id, model, service_class"
DIFFERENCES = f"""
SELECT count(*) FROM (
    SELECT date_trunc('hour', started_at AT TIME ZONE 'UTC') AS hour, {GROUP}, count(*) AS requests,
        sum(prompt_tokens) AS prompt_tokens, sum(cached_tokens) AS cached_tokens, sum(output_tokens) AS output_tokens,
        sum(cost_nanodollars) AS cost_nanodollars, sum(credit_nanodollars) AS credit_nanodollars,
        count(*) FILTER (WHERE slo_attained) AS num_slo_attained,
        count(slo_attained) AS num_slo_requests
    FROM usage GROUP BY 1, {GROUP}
) one FULL JOIN (
    SELECT hour AT TIME ZONE 'UTC' AS hour, {GROUP}, {", ".join(SUMS)} FROM usage_hours
) other USING (hour, {GROUP})
WHERE {" OR ".join(f"one.{name} IS DISTINCT FROM other.{name}" for name in SUMS)}
"""
TABLES = ("usage", "ledger", "usage_hours", "usage_minutes")  # that grow with requests and are kept


def measure(url: str, traces: Path) -> dict[str, Any]:
    """Return the current rows and bytes."""
    with contextlib.closing(psycopg.connect(url, autocommit=True)) as connection:
        sizes = {name: _one(connection, f"SELECT pg_total_relation_size('{name}')") for name in TABLES}
        rows = _one(connection, "SELECT count(*) FROM usage")
        keys = _one(connection, "SELECT count(*) FROM idempotent_requests")
    return {
        "rows": rows,
        "bytes": sizes,
        "keys": keys,
        "traces": _count_traces(traces),
        "traces_bytes": traces.stat().st_size,
    }


def compare_sums(url: str) -> dict[str, Any]:
    """Compare the stored sums of every hour, key, model and class with the sums of the requests."""
    with contextlib.closing(psycopg.connect(url, autocommit=True)) as connection:
        return {
            "hours": _one(connection, "SELECT count(DISTINCT hour) FROM usage_hours"),
            "groups": _one(connection, "SELECT count(*) FROM usage_hours"),
            "requests": _one(connection, "SELECT count(*) FROM usage"),
            "requests_by_minutes": _one(connection, "SELECT sum(requests) FROM usage_minutes"),
            "differences": _one(connection, DIFFERENCES),
        }


def find_forgotten(url: str, traces: Path, keys_s: float, traces_h: float, upkeep_s: float) -> dict[str, Any]:
    """Return rows that retention should have deleted: two rounds after their retention time."""
    late_ms = 2000 * upkeep_s
    with contextlib.closing(psycopg.connect(url, autocommit=True)) as connection:
        past = f"SELECT count(*) FROM idempotent_requests WHERE expires_ms < {time.time() * 1000 - late_ms:.0f}"
        keys = {
            "keys": _one(connection, "SELECT count(*) FROM idempotent_requests"),
            "keys_past_their_time": _one(connection, past),
        }
    with contextlib.closing(sqlite3.connect(f"file:{traces}?mode=ro", uri=True)) as connection:
        newest_ms, oldest_ms = connection.execute("SELECT max(stored_ms), min(stored_ms) FROM traces").fetchone()
        limit_ms = newest_ms - traces_h * HOUR_MS - late_ms - HOUR_MS  # the clock may have gone on since the newest
        past = connection.execute("SELECT count(*) FROM traces WHERE stored_ms < ?", (limit_ms,)).fetchone()[0]
    hours = (newest_ms - oldest_ms) / HOUR_MS
    return keys | {"traces": _count_traces(traces), "traces_span_h": round(hours, 2), "traces_past_their_time": past}


def predicted_size(samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the bytes of the growing tables, and the bytes predicted from the growth a request during the day.

    Earlier, the tables are too small: a page of every index, and of each hour's sums.
    """
    morning, afternoon, last = (samples[min(hour, len(samples)) - 1] for hour in (MORNING, AFTERNOON, len(samples)))
    each = (_bytes(afternoon) - _bytes(morning)) / max(1, afternoon["rows"] - morning["rows"])
    predicted = _bytes(afternoon) + each * (last["rows"] - afternoon["rows"])
    return {
        "bytes_a_request": round(each),
        "predicted": round(predicted),
        "bytes": _bytes(last),
        "ratio": round(_bytes(last) / predicted, 4),
    }


def growth_of_memory(samples: Sequence[Mapping[str, Any]], parts: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return the memory growth of processes that ran throughout, after caches, pools and arenas are filled."""
    first, last = samples[: AFTERNOON + 1][-3:], samples[-3:]
    found = {}
    for name in samples[-1]["rss_bytes"]:
        if name.partition("/")[0] in parts and all(name in one["rss_bytes"] for one in (*first, *last)):
            before, after = (sum(one["rss_bytes"][name] for one in some) / len(some) for some in (first, last))
            found[name] = {"before": round(before), "after": round(after), "growth": round(after / before - 1, 4)}
    return found


def _bytes(sample: Mapping[str, Any]) -> int:
    return int(sum(sample["bytes"].values()))


def _one(connection: psycopg.Connection[Any], statement: str) -> int:
    row = connection.execute(statement).fetchone()
    assert row is not None, "an aggregate has a row"
    return int(row[0] or 0)


def _count_traces(path: Path) -> int:
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        return int(connection.execute("SELECT count(*) FROM traces").fetchone()[0])
