"""Results of contract checks. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

NEW_TENANT = "new tenant"
CONTRACT = "contract"  # the gateway's name of the new tenant in `missed`
SIDES = ("Without the tenant", "With the tenant")

CARRIES, CARRIES_NOT = "carries the tenant", "does not carry it"

Result = Mapping[str, Any]


def attainment_frame(result: Result) -> pd.DataFrame:
    """Return one row per class, and the new tenant's, with the attainment of the first run beside that before it."""
    run = result["runs"][0]
    rows = [
        {
            "class": name,
            "before": result["before"].get(name),
            "with": run["attainment"].get(name),
            "state": _state(name in run["missed"]),
        }
        for name in sorted({*result["before"], *run["attainment"]})
    ]
    own = {"class": NEW_TENANT, "before": None, "with": run["tenant_attainment"]}
    frame = pd.DataFrame([*rows, {**own, "state": _state(CONTRACT in run["missed"])}])
    return frame.astype({"before": float, "with": float})


def sides_frame(result: Result) -> pd.DataFrame:
    """Return the same attainments, one row per class and side, without those that were not simulated."""
    shown = attainment_frame(result)
    sides = [
        shown[["class"]].assign(side=side, attainment=shown[column])
        for side, column in zip(SIDES, ("before", "with"), strict=True)
    ]
    return pd.concat(sides, ignore_index=True).dropna(subset=["attainment"]).reset_index(drop=True)


def runs_frame(result: Result) -> pd.DataFrame:
    """Return one row per run, in their order, with a column for the attainment of each class."""
    rows = [
        {
            "run": f"{run['service_class']}, {replicas_in_words(run['replicas'])}",
            "state": CARRIES if not run["missed"] else CARRIES_NOT,
            "tenant": run["tenant_attainment"],
            **{f"of {name}": share for name, share in run["attainment"].items()},
            "missed": ", ".join(NEW_TENANT if name == CONTRACT else name for name in run["missed"]) or None,
        }
        for run in result["runs"]
    ]
    return pd.DataFrame(rows)


def verdict_in_words(result: Result, max_replicas: int) -> str:
    """Return what the check has found, in one sentence."""
    there, name = replicas_in_words(result["replicas"]), result["terms"]["service_class"]
    verb = "carries" if result["replicas"] == 1 else "carry"
    match result["verdict"]:
        case "accepted":
            return f"{there} {verb} the tenant in {name}."
        case "needs_more":
            needed = result["replicas_needed"]
            options = [] if needed is None else [replicas_in_words(needed)]
            options += [f"the class {one}" for one in result["classes"]]
            verb = "does" if result["replicas"] == 1 else "do"
            return f"{there} {verb} not carry the tenant in {name}; it needs {' or '.join(options)}."
    tried = replicas_in_words(max(max_replicas, result["replicas"]))
    return f"neither {tried} nor a lower class than {name} carry the tenant."


def burst_warning(result: Result) -> str | None:
    """Return what the tenant and the classes lose in a burst of the other traffic, None if they attain their SLOs."""
    burst = result.get("burst")
    if not burst or not burst["missed"]:
        return None
    shares = {CONTRACT: burst["tenant_attainment"], **burst["attainment"]}
    names = [f"{NEW_TENANT if one == CONTRACT else one} {shares[one]:.1%}" for one in burst["missed"]]
    return (
        f"With {result['burst_factor']:g} times the recent requests SLOs are missed: {', '.join(names)}. Single hours "
        "can fall below the required attainment."
    )


def replicas_in_words(number: int) -> str:
    return f"{number} replica" if number == 1 else f"{number} replicas"


def models_of(engines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the models of the healthy engines."""
    return sorted({one["card"]["model"] for one in engines if one["healthy"] and one["card"] is not None})


def _state(is_missed: bool) -> str:
    return "missed" if is_missed else "attained"
