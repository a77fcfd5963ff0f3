"""Expert load from the admin API as frames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import numpy as np
import pandas as pd

Model = Mapping[str, Any]

ALL, MOST, LEAST = "all layers", "most balanced layer", "least balanced layer"
OTHERS = "all others"
MIN_TOKENS_PER_EXPERT = 50  # tokens per expert, below which chance alone makes a load look uneven


def cells(model: Model) -> pd.DataFrame:
    """Return one row per expert of a layer: its tokens, and their ratio to the mean of its layer."""
    picks_LE = matrix(model)
    num_layers, num_experts = picks_LE.shape
    mean_L1 = picks_LE.mean(axis=1, keepdims=True)
    times_LE = np.divide(picks_LE, mean_L1, out=np.full(picks_LE.shape, np.nan), where=mean_L1 > 0)
    return pd.DataFrame(
        {
            "layer": np.repeat(np.array(model["layers"], dtype=np.int64), num_experts),
            "expert": np.tile(np.arange(num_experts), num_layers),
            "tokens": picks_LE.ravel(),
            "times_mean": times_LE.ravel(),
        }
    )


def matrix(model: Model) -> np.ndarray:
    """Return tokens by layer and expert."""
    return np.array(model["picks"], dtype=np.int64).reshape(len(model["layers"]), model["num_experts"])


def layers_frame(model: Model) -> pd.DataFrame:
    """Return one row per layer: its balancedness, its busiest expert, and its unused experts."""
    picks_LE = matrix(model)
    mean_L = np.maximum(picks_LE.mean(axis=1), 1e-9)
    active = model["active_experts_by_layer"] or [None] * len(picks_LE)
    return pd.DataFrame(
        {
            "layer": model["layers"],
            "balancedness": model["balancedness_by_layer"],
            "busiest": picks_LE.argmax(axis=1),
            "times_mean": picks_LE.max(axis=1) / mean_L,
            "unused": (picks_LE == 0).sum(axis=1),
            "active": active,
        }
    )


def tenants_frame(model: Model) -> pd.DataFrame:
    """Return one row per tenant, the busiest first."""
    rows = [
        {
            "tenant": OTHERS if one["tenant_id"] is None else one["tenant_name"] or one["tenant_id"],
            "tokens": one["tokens"],
            "share": one["tokens"] / max(model["tokens"], 1),
        }
        for one in model["tenants"]
    ]
    return pd.DataFrame(rows, columns=["tenant", "tokens", "share"])


def evenness_frame(model: Model) -> pd.DataFrame:
    """Return the balancedness per minute, of all layers together and of the most and the least even one."""
    rows = []
    for minute in model["minutes"]:
        known = [value for value in minute["balancedness_by_layer"] if value is not None]
        if known:
            slot = datetime.fromisoformat(minute["at"])
            values = {ALL: minute["balancedness"], MOST: max(known), LEAST: min(known)}
            rows += [{"slot": slot, "series": name, "balancedness": value} for name, value in values.items()]
    return pd.DataFrame(rows, columns=["slot", "series", "balancedness"])


def active_frame(model: Model) -> pd.DataFrame:
    """Return the experts of a layer that a step used, per minute."""
    rows = [
        {"slot": datetime.fromisoformat(minute["at"]), "series": ALL, "active": minute["active_experts"]}
        for minute in model["minutes"]
        if minute["active_experts"] is not None
    ]
    return pd.DataFrame(rows, columns=["slot", "series", "active"])


def bytes_frame(groups: Sequence[Model]) -> pd.DataFrame:
    """Return one row per tenant with bytes of experts, the most read first; `groups` are usage sums by tenant.

    `share` is of all bytes read; `per_token` is read per token of prompt (not cached) and answer, None without one.
    """
    totals = [(one["group"]["tenant_name"] or one["group"]["tenant_id"], one["totals"]) for one in groups]
    totals = [(name, one) for name, one in totals if one["expert_read_bytes"]]
    all_read = sum(one["expert_read_bytes"] for _, one in totals)
    rows = []
    for name, one in totals:
        tokens = one["prompt_tokens"] - one["cached_tokens"] + one["output_tokens"]
        rows.append(
            {
                "tenant": name,
                "read": float(one["expert_read_bytes"]),
                "share": one["expert_read_bytes"] / all_read,
                "per_token": one["expert_read_bytes"] / tokens if tokens else None,
                "moved": float(one["expert_moved_bytes"]),
            }
        )
    frame = pd.DataFrame(rows, columns=["tenant", "read", "share", "per_token", "moved"])
    return frame.sort_values(["read", "tenant"], ascending=[False, True], ignore_index=True)


def plan_frame(plan: Model) -> pd.DataFrame:
    """Return one row per layer of a plan: its ranks' balancedness before and after, and its replicated experts."""
    rows = []
    for layer, before, after, replicas in zip(
        plan["layers"], plan["by_layer_before"], plan["by_layer_after"], plan["replicas"], strict=True
    ):
        more = sorted(((count, -expert) for expert, count in enumerate(replicas) if count > 1), reverse=True)
        shown = ", ".join(f"{-expert} ×{count}" for count, expert in more)
        rows.append({"layer": layer, "before": before, "after": after, "replicated": len(more), "replicas": shown})
    return pd.DataFrame(rows, columns=["layer", "before", "after", "replicated", "replicas"])


def hottest(frame: pd.DataFrame) -> Mapping[Any, Any] | None:
    """Return the expert with the highest load relative to the mean of its layer."""
    known = frame[frame["times_mean"].notna()].sort_values("times_mean")
    return None if known.empty else known.iloc[-1].to_dict()


def is_thin(model: Model) -> bool:
    """Return whether chance alone would make an even load look uneven."""
    return bool(model["tokens"] * model["experts_per_token"] < MIN_TOKENS_PER_EXPERT * model["num_experts"])


def models_with_experts(models: Sequence[Model]) -> list[Model]:
    return [one for one in models if one["layers"]]
