"""Choice of a replica: a pure function of the engines' states and of the prompt's prefix.

Bounded loads (Mirrokni, Thorup, Zadimoghaddam: Consistent hashing with bounded loads, 2018), by the engines'
predictions: a prompt goes to the engine that its prefix prefers unless that engine clearly has more work than the least
loaded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from moiety_platform.engine_client.base import EngineState
from moiety_platform.errors import NotFound, Unavailable
from moiety_platform.routing.affinity import weight
from moiety_platform.routing.roles import Need, first_engines
from moiety_wire.classes import ServiceClass
from moiety_wire.figures import SleepState
from moiety_wire.messages import ModelCard

MODEL_NOT_FOUND = "model_not_found"
WAIT_GRAIN = 0.25  # share of the SLO's wait: predictions that differ by less count as equal
SLEEP_S = 30  # retry interval for a model whose engines sleep
SPARE_REQUESTS = 4  # a prefix hit is worth this many requests more than the least loaded engine has …
SPARE_SHARE = 0.25  # … or this share more


def choose(
    engines: Sequence[EngineState],
    model: str,
    service: ServiceClass | None = None,
    prefix: Iterable[bytes] = (),
    need: Need = Need.ANSWER,
    context_tokens: int = 0,
) -> EngineState:
    """Return the healthy engine of the model that the prefix prefers and that is not overloaded against the others.

    `prefix` are keys by depth, the shallowest first. If the engine of one depth has much more work than the least
    loaded, the next depth decides; finally, and for a prompt without a prefix, it is the least loaded: the shortest
    predicted wait in the class, then the least work, then the first listed.

    Where engines have roles, it is one that may first receive a request with that need; where their contexts differ,
    one whose context holds `context_tokens`.

    Raises NotFound if no engine has that model, Unavailable if no engine of the model can take a request.
    """
    able = first_engines(able_engines(engines, model, context_tokens), need)
    if len(able) == 1:
        return able[0]
    least = min(able, key=lambda engine: (_wait(engine, service), *_work(engine)))
    for key in prefix:
        preferred = max(able, key=lambda engine: weight(key, engine.address))
        if _is_near(preferred, least, service):
            return preferred
    return least


def card_of(engines: Sequence[EngineState], model: str, allowed: frozenset[str] | None) -> ModelCard:
    """Return the card of the engine with the longest context among those that can take a request.

    The key may use the models `allowed`, None meaning all. Raises NotFound or Unavailable.
    """
    if allowed is not None and model not in allowed:
        served = sorted(allowed & cards_of(engines).keys())
        raise NotFound(model_not_found(model[:256], served), code=MODEL_NOT_FOUND, param="model")
    longest: ModelCard | None = None
    for engine in able_engines(engines, model):
        card = engine.card
        if card is not None and (longest is None or card.max_context_tokens > longest.max_context_tokens):
            longest = card
    assert longest is not None, "only engines that have a card are able"
    return longest


def cards_of(engines: Sequence[EngineState]) -> dict[str, ModelCard]:
    """Return the card of every model that an engine has reported, by model name; of healthy engines where possible."""
    ordered = sorted(engines, key=lambda engine: engine.healthy)
    return {engine.card.model: engine.card for engine in ordered if engine.card is not None}


def are_extensible(engines: Sequence[EngineState], model: str) -> bool:
    """Return whether every engine of the model accepts more credit later; else a request needs all of it at once."""
    for engine in engines:  # as in `able_engines`
        if engine.card is not None and engine.card.model == model and not engine.card.extensible:
            return False
    return True


def model_not_found(model: str, served: Sequence[str]) -> str:
    """Return the error message for a model that does not exist or that the key may not use."""
    return f"the model {model!r} does not exist or your key may not use it; available: {', '.join(served) or 'none'}"


def able_engines(engines: Sequence[EngineState], model: str, context_tokens: int = 0) -> list[EngineState]:
    """Return the model's engines that can take requests with so many tokens of prompt and output.

    Raises NotFound or Unavailable.
    """
    candidates, able = [], []
    for engine in engines:  # several times per request, and a comprehension would be a call
        if engine.card is not None and engine.card.model == model:
            candidates.append(engine)
            if engine.can_take and engine.card.max_context_tokens >= context_tokens:
                able.append(engine)
    if able:
        return able
    if not candidates:
        served = sorted({engine.card.model for engine in engines if engine.card is not None})
        if not served:
            raise Unavailable("no engine is ready yet; try again shortly", code="no_engine", retry_after_s=1)
        raise NotFound(model_not_found(model, served), code=MODEL_NOT_FOUND, param="model")
    if all(engine.sleep is not SleepState.AWAKE for engine in candidates):
        raise Unavailable(
            f"all engines for {model!r} sleep; an administrator can wake them", code="no_engine", retry_after_s=SLEEP_S
        )
    raise Unavailable(
        f"no engine for {model!r} can take a request now; try again shortly", code="no_engine", retry_after_s=1
    )


def _is_near(engine: EngineState, least: EngineState, service: ServiceClass | None) -> bool:
    if _wait(engine, service) > _wait(least, service) + 1:
        return False
    num_least = _work(least)[0]
    return _work(engine)[0] <= num_least + max(SPARE_REQUESTS, SPARE_SHARE * num_least)


def _wait(engine: EngineState, service: ServiceClass | None) -> float:
    """Return the predicted wait in units of the grain of the class's SLO.

    An engine without a report on the class has not served it yet; an engine without any recent report comes last.
    """
    if service is None or not engine.load_is_fresh:
        return math.inf
    load = engine.class_load(service.name)
    promised_s = service.max_queue_s if service.ttft_s is None else service.ttft_s
    return 0.0 if load is None else load.predicted_ttft_s // (WAIT_GRAIN * promised_s)


def _work(engine: EngineState) -> tuple[int, float]:
    """Return an engine's work. Its own report is up to one heartbeat old, so our count can be more recent."""
    load = engine.load
    if load is None:
        return engine.num_inflight, 0.0
    kv_use = load.kv_blocks_used / load.kv_blocks_total if load.kv_blocks_total else 0.0
    return max(load.num_running + load.num_waiting, engine.num_inflight), kv_use
