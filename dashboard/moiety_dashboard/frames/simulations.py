"""Input and results of a simulation. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from moiety_dashboard.formatting import NO_VALUE, percent, short

Rows = Sequence[Mapping[str, Any]]
SIDES = {"now": "Current", "then": "Simulated"}  # names of the two runs

_LENGTHS = "input=100..1000,output=50..400"
GENERATED = {  # labels of arrivals; their classes are the built-in ones
    (
        f"poisson:rate=0.6,tenants=2,{_LENGTHS},class=priority;poisson:rate=1.5,tenants=4,{_LENGTHS},class=standard;"
        f"poisson:rate=0.4,tenants=2,{_LENGTHS},class=flex"
    ): "generated, steady, 10 min",
    (
        f"poisson:rate=0.6,tenants=2,{_LENGTHS},class=priority;poisson:rate=1,tenants=4,{_LENGTHS},class=standard;"
        f"onoff:rate=8,on=30,off=90,tenants=2,{_LENGTHS},class=standard"
    ): "generated, bursts, 10 min",
}
TERMS = (
    *("rank", "weight", "ttft_s", "ttft_per_1k_s", "tpot_s", "completion_s", "max_queue_s"),
    *("preemptible", "on_overload", "downgrade_to"),
)
NULLABLE_TERMS = ("ttft_s", "tpot_s", "completion_s", "downgrade_to")  # may be empty
_COUNTS = (
    *("attainment", "demand_share", "num", "num_rejected", "num_downgraded", "num_preemptions"),
    "longest_wait_s",
)
_PERCENTS = {
    "attainment": "SLO attainment",
    "goodput_fraction_of_capacity": "Goodput / capacity",
    "completed_fraction_of_capacity": "Completed / capacity",
    "offered_fraction_of_capacity": "Offered load / capacity",
    "wasted_prefill_fraction": "Wasted prefill",
    "recomputed_fraction": "Recomputed tokens",
    "kv_used_fraction": "KV cache usage",
}


def terms_frame(classes: Rows) -> pd.DataFrame:
    """Return one editable row per class."""
    rows = [{"class": terms["name"], **{name: terms[name] for name in TERMS}} for terms in classes]
    frame = pd.DataFrame(rows, columns=["class", *TERMS])
    numbers = [name for name in TERMS if name.endswith("_s")] + ["weight"]
    return frame.astype(dict.fromkeys(numbers, float))


def changes(before: Rows, edited: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """Return the changed terms by class; an emptied term is None where that is allowed, else unchanged."""
    found: dict[str, dict[str, Any]] = {}
    by_name = {terms["name"]: terms for terms in before}
    for row in edited.to_dict("records"):
        terms = by_name[row["class"]]
        for name in TERMS:
            value: Any = None if pd.isna(row[name]) else row[name]
            if value == terms[name] or (value is None and name not in NULLABLE_TERMS):
                continue
            found.setdefault(row["class"], {})[name] = int(value) if name == "rank" else value
    return found


def sides_frame(result: Mapping[str, Any]) -> pd.DataFrame:
    """Return one row per class and side."""
    rows = [
        {
            "class": name,
            "side": name_of_side,
            **{count: figures[count] for count in _COUNTS},
            "longest_wait_ms": _milliseconds(figures["longest_wait_s"]),
            "ttft_p50_s": figures["ttft_s"]["p50"],
            "ttft_p99_s": figures["ttft_s"]["p99"],
            "ttft_p99_ms": _milliseconds(figures["ttft_s"]["p99"]),
            "tpot_p99_s": figures["tpot_s"]["p99"],
        }
        for side, name_of_side in SIDES.items()
        for name, figures in result[side]["classes"].items()
    ]
    return pd.DataFrame(rows)


def _milliseconds(seconds: float | None) -> float | None:
    """Return whole microseconds: a fast model's step times differ from 0 by rounding only."""
    return None if seconds is None else round(1000 * seconds, 3)


def totals_frame(result: Mapping[str, Any]) -> pd.DataFrame:
    """Return one row per figure of all requests, formatted for people."""
    now, then = (result[side] for side in SIDES)
    shown = [(label, percent(now[name]), percent(then[name])) for name, label in _PERCENTS.items()]
    shown += [
        ("Requests", short(now["num_requests"]), short(then["num_requests"])),
        ("Tokens per second", short(now["throughput_tokens_per_s"]), short(then["throughput_tokens_per_s"])),
        ("Preemptions", short(now["preemptions"]), short(then["preemptions"])),
        ("Rejected", short(num_rejected(now)), short(num_rejected(then))),
        ("Longest queue time", seconds(now["longest_wait_s"]), seconds(then["longest_wait_s"])),
    ]
    return pd.DataFrame(shown, columns=["figure", *SIDES])


def num_rejected(side: Mapping[str, Any]) -> float:
    return sum(float(figures["num_rejected"]) for figures in side["classes"].values())


def seconds(value: float | None) -> str:
    """Format 0.0123 as 12 ms, 75 as 75.0 s."""
    if value is None:
        return NO_VALUE
    return f"{value * 1000:,.0f} ms" if value < 1 else f"{value:,.1f} s"


def learned(engines: Rows) -> dict[str, str]:
    """Return the engines with a learned step-time model, by id, in words."""
    found = {}
    for engine in engines:
        load, card = engine["load"] or {}, engine["card"] or {}
        if engine["healthy"] and load.get("step_costs"):
            error = percent(load["step_costs"]["relative_error"])
            found[load["engine_id"]] = f"learned by {engine['address']} ({card.get('model', '?')}, error {error})"
    return found


def in_words(settings: Mapping[str, Any]) -> str:
    """Return the settings of a simulation besides its classes."""
    generated = settings["generate"]
    source = GENERATED.get(generated, generated) if generated else f"last {settings['minutes']} min"
    replicas = f"{settings['replicas_now']} → {settings['replicas']} replicas"
    changed = [
        f"{name}.{term} = {value}" for name, terms in settings["classes"].items() for term, value in terms.items()
    ]
    return ", ".join([source, f"× {settings['times']:g}", replicas, f"policy {settings['policy']}", *changed])
