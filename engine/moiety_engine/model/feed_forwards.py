"""Construction of a layer's feed-forward from its spec: dense, with experts, or with experts that have norms."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moiety_engine.model.layers import DenseFeedForward, MixtureOfExperts, MoeContext
from moiety_engine.model.normed_mixture import NormedMixture
from moiety_engine.model.spec import DenseSpec, MoeSpec
from moiety_engine.model.weights import DenseWeights, MoeWeights

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from moiety_engine.distribution.collectives import RankCollectives
    from moiety_engine.model.adapter_stacks import LayerFactors
    from moiety_engine.model.arithmetic import Arithmetic
    from moiety_engine.model.dispatch import Dispatch
    from moiety_engine.model.layers import FeedForward
    from moiety_engine.moe.expert_slots import ExpertSlots
    from moiety_engine.offload.layer import LayerExperts


def feed_forward(
    spec: DenseSpec | MoeSpec,
    weights: DenseWeights | MoeWeights,
    chosen: list[Tensor],
    arithmetic: Arithmetic,
    adapters: LayerFactors,
    slots: ExpertSlots | None = None,
    dispatch: Dispatch | None = None,
    cached: Iterator[LayerExperts] | None = None,
    *,
    norm_eps: float,
    group: RankCollectives,
) -> FeedForward:
    """Return the feed-forward that the spec describes; an MoE layer appends its choices to `chosen`.

    `slots`, `dispatch`: see MoeContext. `cached`: iterator over the cached experts of the remaining MoE layers.
    `norm_eps`, `group`: see NormedMixture.
    """
    if isinstance(spec, MoeSpec):
        assert isinstance(weights, MoeWeights)
        own = next(cached) if cached else None
        context = MoeContext(chosen, arithmetic, adapters, slots, dispatch, own)
        if spec.normed:
            return NormedMixture(spec, weights, context, norm_eps=norm_eps, group=group)
        return MixtureOfExperts(spec, weights, context)
    assert isinstance(weights, DenseWeights)
    return DenseFeedForward(spec, weights, arithmetic, adapters)
