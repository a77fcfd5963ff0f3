"""Data of `moiety top` from the admin API: current engines, and classes and tenants over the last minutes.

Rates of engines are the difference of two readings; figures of tenants and classes come from the gateway's sums by
minute. A key without access to engines gets the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from moiety_platform.cli.admin_client import AdminClient
from moiety_platform.cli.errors import NotAllowed

WINDOW = timedelta(minutes=5)

Row = dict[str, Any]


@dataclass(frozen=True)
class Report:
    """One reading. `engines` is None if the key has no access to them; their rates are None at the first reading."""

    at: datetime
    window_s: float  # of classes and tenants
    engines: list[Row] | None
    classes: list[Row]
    tenants: list[Row]

    def as_json(self) -> dict[str, Any]:
        fields = {"engines": self.engines, "classes": self.classes, "tenants": self.tenants}
        return {"at": self.at.isoformat(), "window_s": round(self.window_s, 3), **fields}


@dataclass
class Reader:
    """Reader of successive reports; it keeps the previous counters."""

    client: AdminClient
    _before: dict[str, tuple[datetime, Mapping[str, Any]]] = field(default_factory=dict)

    def read(self) -> Report:
        """Read a report. Raises NotReachable, NotAllowed or CommandError."""
        now = datetime.now(UTC)
        since = (now - WINDOW).replace(second=0, microsecond=0)  # sums are of whole minutes
        window_s = (now - since).total_seconds()
        classes = self.client.get("/classes")["data"]
        by_class, by_tenant = (self._sums(since, group) for group in ("service_class", "tenant"))
        try:
            listed = self.client.get("/engines")["data"]
        except NotAllowed:
            listed = None
        engines = None if listed is None else [self._engine(one, now) for one in listed]
        return Report(now, window_s, engines, class_rows(classes, by_class, listed or [], window_s),
                      tenant_rows(by_tenant, window_s))  # fmt: skip

    def _sums(self, since: datetime, group: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.client.get(
            "/usage/minutes", group_by=group, step=60, since=since.isoformat()
        )["data"]
        return found

    def _engine(self, one: Mapping[str, Any], now: datetime) -> Row:
        load, card = one["load"] or {}, one["card"] or {}
        return {
            "engine": one["address"],
            "model": card.get("model"),
            "state": state_of(one),
            "running": load.get("num_running"),
            "waiting": load.get("num_waiting"),
            "kv_used": ratio(load.get("kv_blocks_used"), load.get("kv_blocks_total")),
            **self._rates(one["address"], load, now),
        }

    def _rates(self, address: str, load: Mapping[str, Any], now: datetime) -> Row:
        """Return the rates since the last reading of the same engine; None without one."""
        before_at, before = self._before.get(address, (now, {}))
        self._before[address] = now, load
        passed_s = (now - before_at).total_seconds()
        is_same = passed_s > 0 and load and before.get("engine_id") == load["engine_id"]

        def more(name: str) -> int | None:
            return load[f"{name}_total"] - before[f"{name}_total"] if is_same else None

        return {
            "prompt_tokens_per_s": ratio(more("prompt_tokens"), passed_s),
            "output_tokens_per_s": ratio(more("output_tokens"), passed_s),
            "cache_hits": ratio(more("cached_tokens"), more("prompt_tokens")),
            "steps_per_s": ratio(more("steps"), passed_s),
        }


def state_of(engine: Mapping[str, Any]) -> str:
    """Return the engine's state in one word."""
    load = engine["load"] or {}
    if not engine["healthy"]:
        return "lost"
    if engine["draining"]:
        return "draining"
    return "ready" if load.get("sleep", "awake") == "awake" else str(load["sleep"]).replace("_", " ")


def class_rows(
    classes: Sequence[Mapping[str, Any]],
    sums: Sequence[Mapping[str, Any]],
    engines: Sequence[Mapping[str, Any]],
    window_s: float,
) -> list[Row]:
    """Return the rows of the deployment's classes, best first."""
    totals = {one["group"]["service_class"]: one["totals"] for one in sums}
    loads = [load for engine in engines for load in (engine["load"] or {}).get("classes", ())]

    def now(name: str, figure: str) -> int:
        return sum(load[figure] for load in loads if load["name"] == name)

    return [
        {
            "class": one["name"],
            "running": now(one["name"], "num_running"),
            "waiting": now(one["name"], "num_waiting"),
            **of_window(totals.get(one["name"], {}), window_s),
        }
        for one in classes
    ]


def tenant_rows(sums: Sequence[Mapping[str, Any]], window_s: float) -> list[Row]:
    """Return the rows of the tenants with requests, with their share of all tokens."""
    tokens = {one["group"]["tenant_id"]: tokens_of(one["totals"]) for one in sums}
    whole = sum(tokens.values())
    return [
        {
            "tenant": one["group"]["tenant_name"] or one["group"]["tenant_id"],
            "tenant_id": one["group"]["tenant_id"],
            "share": ratio(tokens[one["group"]["tenant_id"]], whole),
            **of_window(one["totals"], window_s),
        }
        for one in sums
    ]


def of_window(totals: Mapping[str, Any], window_s: float) -> Row:
    """Return the figures of requests that ended in the window, per second or minute; None where there is none."""
    return {
        "requests_per_min": totals.get("requests", 0) * 60 / window_s,
        "prompt_tokens_per_s": totals.get("prompt_tokens", 0) / window_s,
        "output_tokens_per_s": totals.get("output_tokens", 0) / window_s,
        "good_tokens_per_s": totals.get("good_tokens", 0) / window_s,
        "slo_attainment": ratio(totals.get("num_slo_attained"), totals.get("num_slo_requests")),
        "mean_ttft_ms": totals.get("mean_ttft_ms"),
        "rejected": totals.get("rejected", 0),
        "failed": totals.get("failed", 0),
        "preemptions": totals.get("preemptions", 0),
    }


def tokens_of(totals: Mapping[str, Any]) -> int:
    return int(totals["prompt_tokens"] + totals["output_tokens"])


def ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None
