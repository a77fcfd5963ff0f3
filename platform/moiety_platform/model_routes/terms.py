"""Terms of a route, and the order in which its models are tried. Pure.

Weighted choice: each target has a random or hashed number u in (0, 1) and the key -ln(u) / weight, and the smallest key
is first (Efraimidis, Spirakis: Weighted random sampling with a reservoir, 2006). With hashed numbers this is weighted
rendezvous hashing: a changed weight moves only as many keys as it must.
"""

from __future__ import annotations

import math
import random
from enum import StrEnum
from hashlib import blake2b

import msgspec


class Stickiness(StrEnum):
    """Object that keeps its target while the weights of a route stay the same."""

    NONE = "none"
    TENANT = "tenant"
    CONVERSATION = "conversation"


class RouteTarget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model with its weight among the targets of a route. With the weight 0 it gets no requests."""

    model: str
    weight: int = 1


class ModelRoute(msgspec.Struct, frozen=True, kw_only=True):
    """Route of a name that clients send.

    `downgrade_model` answers once `downgrade_percent` of a quota of the request is used. `shadow_percent` of the
    requests are copied to `shadow_model`.
    """

    name: str
    targets: tuple[RouteTarget, ...]
    fallbacks: tuple[str, ...] = ()
    sticky: Stickiness = Stickiness.NONE
    downgrade_model: str | None = None
    downgrade_percent: int | None = None
    shadow_model: str | None = None
    shadow_percent: float | None = None

    def models(self) -> tuple[str, ...]:
        """Return the models that can answer requests of the route, each once."""
        downgrade = () if self.downgrade_model is None else (self.downgrade_model,)
        weighted = (target.model for target in self.targets if target.weight)
        return tuple(dict.fromkeys((*weighted, *self.fallbacks, *downgrade)))


def models_in_order(route: ModelRoute, sticky_key: bytes | None) -> list[str]:
    """Return the models to try: the chosen target, the other weighted targets, then the fallbacks.

    With a key the choice depends on it alone; without one it is random.
    """
    chances = []
    for target in route.targets:
        if target.weight:
            number = random.random() if sticky_key is None else _hashed(sticky_key, route.name, target.model)
            chances.append((-math.log(max(number, 1e-300)) / target.weight, target.model))
    return list(dict.fromkeys([*(model for _, model in sorted(chances)), *route.fallbacks]))


def _hashed(key: bytes, route: str, model: str) -> float:
    """Return a number in (0, 1) that depends on the key, the route and the target."""
    digest = blake2b(f"{route}\0{model}\0".encode() + key, digest_size=8).digest()
    return (int.from_bytes(digest) + 0.5) / 2**64
