"""Request and response bodies of the plan of an expert placement."""

from __future__ import annotations

from typing import Annotated

import msgspec

MAX_NODES, MAX_RANKS_PER_NODE, MAX_REDUNDANT, MAX_MINUTES = 64, 64, 4096, 60


class PlanRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Terms of a plan.

    A layer has a slot for each expert and `redundant_experts` more, rounded up so that all ranks have the same number;
    `minutes` is the load to plan for, 0 for all since the engines' start.
    """

    model: Annotated[str, msgspec.Meta(max_length=256)]
    nodes: Annotated[int, msgspec.Meta(ge=1, le=MAX_NODES)] = 1
    ranks_per_node: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS_PER_NODE)] = 8
    redundant_experts: Annotated[int, msgspec.Meta(ge=0, le=MAX_REDUNDANT)] = 0
    minutes: Annotated[int, msgspec.Meta(ge=0, le=MAX_MINUTES)] = MAX_MINUTES


class PlanView(msgspec.Struct, frozen=True):
    """Changes that a plan would make.

    Balancedness is that of ranks: their mean load ÷ the largest; 1 is even. `replicas` has a row per layer and a column
    per expert: its number of slots. `moved_bytes` are the weights that ranks would have to load because they do not
    hold them before; `slots_per_rank` are the experts of a layer that fit on a rank.
    """

    model: str
    layers: list[int]
    ranks: int
    nodes: int
    slots_per_rank: int
    tokens: int
    balancedness_before: float
    balancedness_after: float
    by_layer_before: list[float]
    by_layer_after: list[float]
    replicas: list[list[int]]
    moved_experts: int
    moved_bytes: int
