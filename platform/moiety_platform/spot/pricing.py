"""Price of a spot class as a share of the class's price, from the load that engines report. Pure.

The prediction is that of quotes: the time to the first token of a request of the class that arrives now.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from moiety_platform.quotes.prediction import predict_timing
from moiety_wire.engine_load import ClassLoad, Load

PROMPT_TOKENS = 256  # of the request whose time to the first token is predicted
WAIT_S = 10.0  # predicted time to the first token at which half of the free capacity counts as idle


def idle_capacity(loads: Sequence[Load], service_class: str) -> float | None:
    """Return the predicted idle part of the engines' capacity, from 0 to 1; None without engines.

    It is the mean over the engines of their free part of batch slots or of KV blocks, whichever is less, reduced by the
    time that a request of the class would wait.
    """
    if not loads:
        return None
    return sum(_idle_of_engine(load, service_class) for load in loads) / len(loads)


def spot_percent(idle: float, floor_percent: int, ceiling_percent: int) -> int:
    """Return the percentage of the class's price: the ceiling without idle capacity, the floor if all is idle."""
    percent = ceiling_percent - (ceiling_percent - floor_percent) * min(1.0, max(0.0, idle))
    return min(ceiling_percent, max(floor_percent, math.ceil(percent - 1e-9)))


def _idle_of_engine(load: Load, service_class: str) -> float:
    used = [load.num_running / load.max_running] if load.max_running else []
    if load.kv_blocks_total:
        used.append(load.kv_blocks_used / load.kv_blocks_total)
    free = 1.0 - min(1.0, max(used, default=0.0))
    of_class = next((one for one in load.classes if one.name == service_class), None)
    return free * WAIT_S / (WAIT_S + _wait_s(load, of_class))


def _wait_s(load: Load, of_class: ClassLoad | None) -> float:
    timing = predict_timing(load, of_class, [PROMPT_TOKENS], 1)
    if timing is not None:
        return timing.first_token_s
    return 0.0 if of_class is None else of_class.predicted_ttft_s  # before the engine has learned its step times
