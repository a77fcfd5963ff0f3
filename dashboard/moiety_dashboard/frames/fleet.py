"""Engines and service classes in their current state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import pandas as pd

from moiety_dashboard.formatting import ratio, short_address

Rows = Sequence[Mapping[str, Any]]
Seen = Mapping[str, Sequence[tuple[float, Mapping[str, Any]]]]  # by engine: time of a load report, and the load

NO_DEVICE = (None, "", "none")  # external servers, and an engine without computation
OBJECTIVE = 0.99  # target SLO attainment, the base of the burn rate


def engine_state(engine: Mapping[str, Any]) -> str:
    if not engine["healthy"]:
        return f"unavailable: {engine['reason']}"
    if engine["draining"]:
        return "draining"
    asleep = (engine["load"] or {}).get("sleep", "awake")
    return "ready" if asleep == "awake" else str(asleep).replace("_", " ")


def fleet(engines: Rows) -> dict[str, float]:
    """Return the totals of all engines, from their last heartbeats."""
    loads = [engine["load"] for engine in engines if engine["healthy"] and engine["load"]]
    names = ("num_running", "num_waiting", "num_paused", "kv_blocks_total", "kv_blocks_used", "kv_blocks_cached")
    return {name: sum(load[name] for load in loads) for name in names}


def class_loads(engines: Rows) -> dict[str, dict[str, float]]:
    """Return the totals of all engines' reports by class.

    They are the waiting and running requests, the arrival time of the oldest waiting one (0: none waits), the decisions
    since the engines' start, and the shortest predicted TTFT.
    """
    found: dict[str, dict[str, float]] = {}
    for engine in engines:
        for load in (engine["load"] or {}).get("classes", []) if engine["healthy"] else []:
            total = found.setdefault(load["name"], dict.fromkeys(_COUNTS, 0) | _NONE_WAITS)
            for name in _COUNTS:
                value = load[f"{name}_total"] if f"{name}_total" in load else load[name]
                total[name] += sum(value.values()) if isinstance(value, Mapping) else value
            total["predicted_ttft_s"] = min(total["predicted_ttft_s"], load["predicted_ttft_s"])
            arrivals = [at for at in (total[OLDEST], load[OLDEST]) if at]
            total[OLDEST] = min(arrivals, default=0.0)
    return found


OLDEST = "oldest_waiting_unix_s"
_NONE_WAITS = {"predicted_ttft_s": float("inf"), OLDEST: 0.0}
_COUNTS = ("num_waiting", "num_running", "admitted", "rejected", "downgraded", "preempted", "demoted", "boosted")


def slo_of(terms: Mapping[str, Any]) -> str:
    """Return a class's SLO in words."""
    parts = []
    if terms["ttft_s"] is not None:
        more = f" + {terms['ttft_per_1k_s']:g} s/1k" if terms["ttft_per_1k_s"] else ""
        parts.append(f"TTFT ≤ {terms['ttft_s']:g} s{more}")
    if terms["tpot_s"] is not None:
        parts.append(f"TPOT ≤ {terms['tpot_s'] * 1000:g} ms")
    if terms["completion_s"] is not None:
        parts.append(f"completion ≤ {_span(terms['completion_s'])}")
    return ", ".join(parts)


def _span(seconds: float) -> str:
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:g} {unit}"
    return f"{seconds:g} s"


def classes_frame(classes: Rows, sums: Rows, engines: Rows, now: datetime) -> pd.DataFrame:
    """Return one row per class: its SLO, its attainment (`sums` of one slot by class), and its current queue."""
    by_class = {one["group"]["service_class"]: one["totals"] for one in sums}
    loads = class_loads(engines)
    rows = []
    for terms in classes:
        totals, load = by_class.get(terms["name"], {}), loads.get(terms["name"], {})
        attainment = ratio(totals.get("num_slo_attained", 0), totals.get("num_slo_requests", 0))
        predicted, oldest = load.get("predicted_ttft_s"), load.get(OLDEST)
        rows.append(
            {
                "class": terms["name"],
                "slo": slo_of(terms),
                "attainment": attainment,
                "burn": None if attainment is None else (1 - attainment) / (1 - OBJECTIVE),
                "requests": totals.get("requests", 0),
                "ttft_ms": totals.get("mean_ttft_ms"),
                "queue_ms": totals.get("mean_queue_ms"),
                "preemptions": totals.get("preemptions", 0),
                "rejections": totals.get("rejected", 0),
                "downgraded": load.get("downgraded"),
                "waiting": load.get("num_waiting"),
                "running": load.get("num_running"),
                "oldest_s": max(0.0, now.timestamp() - oldest) if oldest else None,
                "predicted_ms": None if predicted is None else predicted * 1000,
                "weight": terms["weight"],
                "rank": terms["rank"],
                "price_factor": terms["price_factor"],
                "on_overload": terms["on_overload"],
            }
        )
    return pd.DataFrame(rows)


def engines_frame(engines: Rows) -> pd.DataFrame:
    """Return one row per engine; figures are missing if it has not reported."""
    rows = []
    for engine in engines:
        card, load = engine["card"] or {}, engine["load"] or {}
        blocks = load.get("kv_blocks_total") or 0
        rows.append(
            {
                "engine": short_address(engine["address"]),
                "address": engine["address"],
                "model": card.get("model", "–"),
                "device": " ".join(part for part in (card.get("device"), card.get("dtype")) if part not in NO_DEVICE)
                or "–",
                "state": engine_state(engine),
                "running": load.get("num_running"),
                "waiting": load.get("num_waiting"),
                "paused": load.get("num_paused"),
                "kv_used": load["kv_blocks_used"] / blocks if blocks else None,
                "kv_cached": load["kv_blocks_cached"] / blocks if blocks else None,
                "hit_rate": ratio(load.get("cached_tokens_total", 0), load.get("prompt_tokens_total", 0)),
                "prompt_tokens": load.get("prompt_tokens_total"),
                "output_tokens": load.get("output_tokens_total"),
                "steps": load.get("steps_total"),
                "requests": load.get("requests_total"),
                "up_s": load.get("running_for_s"),
            }
        )
    return pd.DataFrame(rows)


TOGETHER_S = 3.0
IN_STEPS = ("prefill_seconds_total", "decode_seconds_total")


def memory_frame(engines: Rows, sums: Rows) -> pd.DataFrame:
    """Return one row per tenant: its current share of all engines' KV cache, and its prefix cache hit share.

    `sums` are of one slot by tenant. The tenant with the most memory comes first.
    """
    blocks, held = 0, Counter[str]()
    for engine in engines:
        if engine["healthy"] and engine["load"]:
            blocks += engine["load"]["kv_blocks_total"]
            held.update(engine["load"]["tenant_kv_blocks"])
    totals: dict[str, dict[str, Any]] = {}
    for one in sums:
        row = totals.setdefault(
            one["group"]["tenant_id"], {"prompt": 0, "cached": 0, "name": one["group"]["tenant_name"]}
        )
        row["prompt"] += one["totals"]["prompt_tokens"]
        row["cached"] += one["totals"]["cached_tokens"]
    nothing = {"prompt": 0, "cached": 0, "name": None}
    rows = [
        {
            "tenant": totals.get(tenant_id, nothing)["name"] or tenant_id,
            "kv_share": ratio(held[tenant_id], blocks),
            "kv_blocks": held[tenant_id],
            "prompt_tokens": totals.get(tenant_id, nothing)["prompt"],
            "cached_tokens": totals.get(tenant_id, nothing)["cached"],
            "hit_rate": ratio(totals.get(tenant_id, nothing)["cached"], totals.get(tenant_id, nothing)["prompt"]),
        }
        for tenant_id in {*held, *totals}
    ]
    columns = ["tenant", "kv_share", "kv_blocks", "prompt_tokens", "cached_tokens", "hit_rate"]
    frame = pd.DataFrame(rows, columns=columns)
    return frame.sort_values(
        ["kv_blocks", "prompt_tokens", "tenant"], ascending=[False, False, True], ignore_index=True
    )


def over_time(samples: Seen, part: str, whole: str | None = None) -> list[float]:
    """Return a gauge of all engines together, or its share of another, for a line without axes.

    It combines samples of the same seconds.
    """
    slots: dict[float, dict[str, Mapping[str, Any]]] = {}
    for address, seen in samples.items():
        for at_s, load in seen:
            slots.setdefault(at_s // TOGETHER_S, {})[address] = load
    found = []
    for _, loads in sorted(slots.items()):
        total = sum(load[part] for load in loads.values())
        found.append(total if whole is None else ratio(total, sum(load[whole] for load in loads.values())) or 0.0)
    return found


def time_frame(samples: Seen, since: datetime) -> pd.DataFrame:
    """Return the share of time between two samples in steps with prompt tokens, and in steps without.

    Columns: `slot`, `kind`, and `share`, the mean of the engines that reported within the same seconds.
    """
    rows = []
    for seen in samples.values():
        for (before_s, before), (now_s, now) in pairwise(seen):
            found = rates(before, now, now_s - before_s) if now_s >= since.timestamp() else None
            slot = datetime.fromtimestamp(now_s // TOGETHER_S * TOGETHER_S, UTC)
            if found:
                rows += [{"slot": slot, "kind": one.split("_")[0], "share": min(1.0, found[one])} for one in IN_STEPS]
    frame = pd.DataFrame(rows, columns=["slot", "kind", "share"])
    return frame.groupby(["slot", "kind"], as_index=False).agg({"share": "mean"})


def rates(before: Mapping[str, Any] | None, now: Mapping[str, Any], seconds: float) -> dict[str, float] | None:
    """Return an engine's rates per second between two heartbeats; None if it was restarted between them."""
    if before is None or seconds <= 0 or before["engine_id"] != now["engine_id"]:
        return None
    names = ("steps_total", "prompt_tokens_total", "output_tokens_total", "requests_total", *IN_STEPS)
    return {name: max(0.0, now[name] - before[name]) / seconds for name in names}
