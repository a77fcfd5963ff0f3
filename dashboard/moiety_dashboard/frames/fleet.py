"""Engines and classes as they are now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from moiety_dashboard.figures import ratio

Rows = Sequence[Mapping[str, Any]]

OBJECTIVE = 0.99  # of the promises, against which the burn is told


def engine_state(engine: Mapping[str, Any]) -> str:
    if not engine["healthy"]:
        return f"away: {engine['reason']}"
    if engine["draining"]:
        return "draining"
    asleep = (engine["load"] or {}).get("sleep", "awake")
    return "ready" if asleep == "awake" else str(asleep).replace("_", " ")


def fleet(engines: Rows) -> dict[str, float]:
    """What all engines have together, by their last heartbeats."""
    loads = [engine["load"] for engine in engines if engine["healthy"] and engine["load"]]
    names = ("num_running", "num_waiting", "num_paused", "kv_blocks_total", "kv_blocks_used", "kv_blocks_cached")
    return {name: sum(load[name] for load in loads) for name in names}


def class_loads(engines: Rows) -> dict[str, dict[str, float]]:
    """By class, what all engines say of it: those that wait and run, what was decided since they started, and the
    shortest predicted time to a first token."""
    found: dict[str, dict[str, float]] = {}
    for engine in engines:
        for load in (engine["load"] or {}).get("classes", []) if engine["healthy"] else []:
            total = found.setdefault(load["name"], dict.fromkeys(_COUNTS, 0) | {"predicted_ttft_s": float("inf")})
            for name in _COUNTS:
                value = load[f"{name}_total"] if f"{name}_total" in load else load[name]
                total[name] += sum(value.values()) if isinstance(value, Mapping) else value
            total["predicted_ttft_s"] = min(total["predicted_ttft_s"], load["predicted_ttft_s"])
    return found


_COUNTS = ("num_waiting", "num_running", "admitted", "rejected", "downgraded", "preempted", "relegated", "boosted")


def promise(terms: Mapping[str, Any]) -> str:
    """A class's promise in words."""
    parts = []
    if terms["ttft_s"] is not None:
        more = f" + {terms['ttft_per_1k_s']:g} s/1k" if terms["ttft_per_1k_s"] else ""
        parts.append(f"TTFT ≤ {terms['ttft_s']:g} s{more}")
    if terms["tpot_s"] is not None:
        parts.append(f"{terms['tpot_s'] * 1000:g} ms/token")
    if terms["completion_s"] is not None:
        parts.append(f"whole ≤ {_span(terms['completion_s'])}")
    return ", ".join(parts)


def _span(seconds: float) -> str:
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:g} {unit}"
    return f"{seconds:g} s"


def classes_frame(classes: Rows, sums: Rows, engines: Rows) -> pd.DataFrame:
    """A line a class: its promise, how it was kept (`sums` of one slot by class), and what waits now."""
    by_class = {one["group"]["service_class"]: one["totals"] for one in sums}
    loads = class_loads(engines)
    rows = []
    for terms in classes:
        totals, load = by_class.get(terms["name"], {}), loads.get(terms["name"], {})
        attainment = ratio(totals.get("num_kept", 0), totals.get("num_promised", 0))
        predicted = load.get("predicted_ttft_s")
        rows.append(
            {
                "class": terms["name"],
                "promise": promise(terms),
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
                "predicted_ms": None if predicted is None else predicted * 1000,
                "weight": terms["weight"],
                "rank": terms["rank"],
                "price_factor": terms["price_factor"],
                "on_overload": terms["on_overload"],
            }
        )
    return pd.DataFrame(rows)


def engines_frame(engines: Rows) -> pd.DataFrame:
    """A line an engine; figures are missing where it has not reported."""
    rows = []
    for engine in engines:
        card, load = engine["card"] or {}, engine["load"] or {}
        blocks = load.get("kv_blocks_total") or 0
        rows.append(
            {
                "address": engine["address"],
                "model": card.get("model", "–"),
                "device": " ".join(part for part in (card.get("device"), card.get("dtype")) if part) or "–",
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


def rates(before: Mapping[str, Any] | None, now: Mapping[str, Any], seconds: float) -> dict[str, float] | None:
    """What an engine did a second between two of its heartbeats; None where it was started anew between them."""
    if before is None or seconds <= 0 or before["engine_id"] != now["engine_id"]:
        return None
    names = ("steps_total", "prompt_tokens_total", "output_tokens_total", "requests_total")
    return {name: max(0.0, now[name] - before[name]) / seconds for name in names}
