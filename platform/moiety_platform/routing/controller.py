"""`/admin/v1/engines`: the replicas as administrators see them. The door is the admin router's."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import get
from litestar.handlers import HTTPRouteHandler

from moiety_platform.access.table import Action, needs
from moiety_platform.engine_client.base import EngineState
from moiety_platform.routing.replicas import Replicas


def engine_routes(replicas: Replicas) -> list[HTTPRouteHandler]:
    """The handlers, for the admin router to take in."""

    @get("/engines", name="list_engines", opt=needs(Action.READ_ENGINES))
    async def list_engines() -> dict[str, Any]:
        return {"data": [_describe(state) for state in replicas.states()]}

    return [list_engines]


def _describe(state: EngineState) -> dict[str, Any]:
    card, load = state.card, state.load
    return {
        "address": state.address,
        "healthy": state.healthy,
        "draining": state.draining,
        "reason": state.reason,
        "num_inflight": state.num_inflight,
        "card": None
        if card is None
        else {
            "engine_id": card.engine_id,
            "model": card.model,
            "family": card.family,
            "dtype": card.dtype,
            "device": card.device,
            "max_context_tokens": card.max_context_tokens,
            "vocab_size": card.vocab_size,
            "embedding_width": card.embedding_width,
            "created_unix_s": card.created_unix_s,
        },
        "load": None if load is None else msgspec.to_builtins(load),
    }
