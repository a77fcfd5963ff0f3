"""Devices of the simulator, as engines have learned them: their step times and limits."""

from __future__ import annotations

from typing import Any

from moiety_wire.engine_load import StepCosts


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
