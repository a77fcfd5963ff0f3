"""Devices of the simulator, as engines have learned them: their step times and limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moiety_platform.engine_client.base import EngineState
from moiety_platform.errors import Conflict, NotFound
from moiety_wire.engine_load import StepCosts

LIMITS = ("kv_blocks_total", "block_size", "max_batch_tokens", "max_running")  # an engine's, in its load


def device_fields(
    engine_id: str, costs: StepCosts, *, kv_blocks_total: int, block_size: int, max_batch_tokens: int, max_running: int
) -> dict[str, Any]:
    """Return the device of an engine, with the fields of a device file of `moiety bench engine --calibrate`."""
    return {
        "name": f"as {engine_id} has learned",
        "overhead_s": costs.step_s,
        "token_s": costs.row_s,
        "bends": costs.bends,
        "kv_token_s": costs.context_token_s,
        "pair_s": costs.pair_s,
        "prefill_step_s": costs.prefill_step_s,
        "exponent": 1.0,
        "kv_tokens": kv_blocks_total * block_size,
        "block_size": block_size,
        "max_batch_tokens": max_batch_tokens,
        "max_running": max_running,
        "kv_token_bytes": 0,
        "fit_error": costs.relative_error,
    }


def device_of_engine(engines: Sequence[EngineState], engine_id: str) -> dict[str, Any]:
    """Return an engine's step-time model and limits, as a device of the simulator. Raises NotFound, Conflict."""
    load = next((one.load for one in engines if one.load is not None and one.load.engine_id == engine_id), None)
    if load is None:
        raise NotFound("There is no engine with this id; list them with GET /admin/v1/engines.", param="engine_id")
    costs = load.step_costs
    if costs is None:
        raise Conflict(
            "This engine has not learned yet what its steps take, or is none of ours: let it serve some requests, or "
            "give 'device'.",
            code="no_step_time_model",
        )
    return device_fields(engine_id, costs, **{name: getattr(load, name) for name in LIMITS})
