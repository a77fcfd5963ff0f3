"""The choice of a replica: a pure function of what is known of the engines."""

from __future__ import annotations

import math
from collections.abc import Sequence

from moiety_platform.engine_client.base import EngineState
from moiety_platform.errors import NotFound, Unavailable
from moiety_wire.classes import ServiceClass

MODEL_NOT_FOUND = "model_not_found"
WAIT_GRAIN = 0.25  # of the promised wait: predictions that differ by less are the same


def choose(engines: Sequence[EngineState], model: str, service: ServiceClass | None = None) -> EngineState:
    """The healthy engine of that model with the shortest predicted wait in the class, then with the least to do; the
    earliest listed wins a tie.
    Raises NotFound if no engine has that model, Unavailable if none of those that have it can take a request."""
    candidates = [engine for engine in engines if engine.card is not None and engine.card.model == model]
    if not candidates:
        served = sorted({engine.card.model for engine in engines if engine.card is not None})
        if not served:
            raise Unavailable("no engine is ready yet; try again shortly", code="no_engine", retry_after_s=1)
        raise NotFound(model_not_found(model, served), code=MODEL_NOT_FOUND, param="model")
    able = [engine for engine in candidates if engine.healthy and not engine.draining]
    if not able:
        raise Unavailable(
            f"no engine for {model!r} can take a request now; try again shortly", code="no_engine", retry_after_s=1
        )
    return min(able, key=lambda engine: (_wait(engine, service), *_work(engine)))


def model_not_found(model: str, served: Sequence[str]) -> str:
    """What a client is told that asked for a model it cannot have."""
    return f"the model {model!r} does not exist or your key may not use it; available: {', '.join(served) or 'none'}"


def _wait(engine: EngineState, service: ServiceClass | None) -> float:
    """The predicted wait in grains of what the class promises. An engine that says nothing of the class has not had it
    yet; one that has said nothing at all for long comes last."""
    if service is None or not engine.load_is_fresh:
        return math.inf
    load = engine.class_load(service.name)
    promised_s = service.max_queue_s if service.ttft_s is None else service.ttft_s
    return 0.0 if load is None else load.predicted_ttft_s // (WAIT_GRAIN * promised_s)


def _work(engine: EngineState) -> tuple[int, float]:
    """What an engine has to do. Its own report is up to one heartbeat old, so our own count may know better."""
    load = engine.load
    if load is None:
        return engine.num_inflight, 0.0
    kv_use = load.kv_blocks_used / load.kv_blocks_total if load.kv_blocks_total else 0.0
    return max(load.num_running + load.num_waiting, engine.num_inflight), kv_use
