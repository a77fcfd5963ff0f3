"""Expert slots, dispatch and dimensions of a model's experts on one rank, determined once when the model is created."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moiety_engine.distribution.deep_ep_all_to_all import DeepEpAllToAll
from moiety_engine.distribution.expert_all_to_all import ExactAllToAll, PaddedAllToAll
from moiety_engine.model.dispatch import Dispatch
from moiety_engine.model.spec import MoeSpec
from moiety_engine.model.weight_offload import named_tensors
from moiety_engine.model.weights import MoeWeights
from moiety_engine.moe.expert_slots import ExpertSlots
from moiety_engine.moe.shape import ExpertShape
from moiety_wire.engine_choices import ExpertAll2All

if TYPE_CHECKING:
    import torch

    from moiety_engine.distribution.collectives import Ranks
    from moiety_engine.distribution.expert_all_to_all import ExpertAllToAll
    from moiety_engine.distribution.layout import RankPosition
    from moiety_engine.model.spec import DenseSpec, ModelSpec
    from moiety_engine.model.weights import ModelWeights


def expert_slots(spec: DenseSpec | MoeSpec | None, ranks: Ranks, device: torch.device) -> ExpertSlots | None:
    """Return the expert slots of a layer; None if the layer has no experts or all of them are on this rank."""
    layout = ranks.rank_position.layout
    may_be_scaled = layout.ffn_ranks == layout.ep  # another number of expert ranks may follow
    if not isinstance(spec, MoeSpec) or (layout.ep == 1 and ranks.experts is None and not may_be_scaled):
        return None
    num_experts = spec.num_experts
    slots, counts = layout.slots(num_experts), False if ranks.crossings else None  # remote: no device sync
    own = {"num_parts": layout.ep, "own_part": ranks.rank_position.ep_rank}
    return ExpertSlots(slots, num_experts, **own, device=device, counts=counts)


def expert_dispatch(
    slots: ExpertSlots | None, ranks: Ranks, all_to_all: ExpertAllToAll | None, layer: int
) -> Dispatch | None:
    """Return the dispatch of a layer with these slots; None if its tokens are not exchanged between ranks.

    `layer`: its number among the MoE layers of this stage.
    """
    if ranks.experts is None or slots is None:
        return None
    assert all_to_all is not None, "ranks with different tokens need an all-to-all"
    return Dispatch(ranks.rank_position, ranks.experts, slots, all_to_all, layer)


def all_to_all_of(ranks: Ranks, device: torch.device, choice: ExpertAll2All) -> ExpertAllToAll | None:
    """Return the model's all-to-all between ranks with different tokens; None if there are none.

    `auto` is `torch` on a CPU, whose network is driven by the host, and `torch-padded` on a GPU.
    """
    if ranks.experts is None:
        return None
    if choice is ExpertAll2All.AUTO:
        choice = ExpertAll2All.TORCH_PADDED if device.type == "cuda" else ExpertAll2All.TORCH
    if choice is ExpertAll2All.DEEPEP:
        return DeepEpAllToAll(ranks.experts)
    return (PaddedAllToAll if choice is ExpertAll2All.TORCH_PADDED else ExactAllToAll)(
        ranks.experts, ranks.rank_position
    )


def expert_shape(
    spec: ModelSpec, weights: ModelWeights, rank_position: RankPosition, expert_bytes: int | None
) -> ExpertShape | None:
    """Return the dimensions of the model's experts for load counting; None if no layer has experts.

    Covers all layers on all ranks; all MoE layers have the same dimensions. `expert_bytes`: given if the rank may have
    no experts.
    """
    if not spec.moe_layers:
        return None
    index = spec.moe_layers[0]
    ffn = spec.layers[index].ffn
    assert isinstance(ffn, MoeSpec)
    routing = ffn.routing
    if expert_bytes is None:
        tensors = weights.layers[index].ffn
        assert isinstance(tensors, MoeWeights)
        num_held = tensors.down_EDF.shape[0]  # for offloaded experts: the slots
        held_bytes = sum(tensor.nbytes for _, tensor in named_tensors((tensors.gate_up_E2FD, tensors.down_EDF)))
        expert_bytes = held_bytes // num_held * rank_position.expert_cuts
    return ExpertShape(
        layers=spec.moe_layers,
        num_experts=routing.num_experts,
        top_k=routing.top_k,
        expert_bytes=expert_bytes,
        num_groups=routing.num_groups,
        zero_experts=ffn.zero_experts,
    )
