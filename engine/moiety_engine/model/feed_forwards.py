"""Construction of a layer's feed-forward from its spec: dense, with experts, with experts that have norms, or none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moiety_engine.model.continued_mixture import ContinuedMixture
from moiety_engine.model.expert_setup import expert_dispatch
from moiety_engine.model.layers import DenseFeedForward, MixtureOfExperts, MoeContext
from moiety_engine.model.normed_mixture import NormedMixture
from moiety_engine.model.remote_experts import RemoteExperts
from moiety_engine.model.shortcut_mixture import ShortcutMixture
from moiety_engine.model.spec import DenseSpec, MoeSpec
from moiety_engine.model.weights import DenseWeights, MoeWeights

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from moiety_engine.distribution.collectives import Ranks
    from moiety_engine.distribution.expert_all_to_all import ExpertAllToAll
    from moiety_engine.model.adapter_stacks import LayerFactors
    from moiety_engine.model.arithmetic import Arithmetic
    from moiety_engine.model.layers import FeedForward
    from moiety_engine.model.router_mlp import RouterInputs
    from moiety_engine.moe.expert_slots import ExpertSlots
    from moiety_engine.offload.layer import LayerExperts


def feed_forward(
    spec: DenseSpec | MoeSpec | None,
    weights: DenseWeights | MoeWeights | None,
    chosen: list[Tensor],
    arithmetic: Arithmetic,
    adapters: LayerFactors,
    slots: ExpertSlots | None = None,
    cached: Iterator[LayerExperts] | None = None,
    *,
    norm_eps: float,
    ranks: Ranks,
    router_inputs: RouterInputs,
    defers: bool = False,
    all_to_all: ExpertAllToAll | None = None,
    layer: int = 0,
) -> FeedForward | None:
    """Return the feed-forward that the spec describes, if any; an MoE layer appends its choices to `chosen`.

    `slots`: see MoeContext. `cached`: iterator over the cached experts of the remaining MoE layers. `norm_eps`: see
    NormedMixture. `ranks`: the ranks that share the layer, or have its experts. `router_inputs`: those of the
    model's routers. `defers`: see LayerSpec. `all_to_all`: that of the model, if ranks with different tokens share
    experts. `layer`: the layer's number in this stage.
    """
    if spec is None:
        return None
    if isinstance(spec, MoeSpec):
        assert isinstance(weights, MoeWeights)
        if ranks.crossings:
            return RemoteExperts(spec, weights, MoeContext(chosen, arithmetic, adapters, slots), ranks)
        own = next(cached) if cached else None
        context = MoeContext(chosen, arithmetic, adapters, slots, expert_dispatch(slots, ranks, all_to_all, layer), own)
        return _mixture(
            spec, weights, context, norm_eps=norm_eps, ranks=ranks, router_inputs=router_inputs, defers=defers
        )
    assert isinstance(weights, DenseWeights)
    return DenseFeedForward(spec, weights, arithmetic, adapters)


def _mixture(
    spec: MoeSpec,
    weights: MoeWeights,
    context: MoeContext,
    *,
    norm_eps: float,
    ranks: Ranks,
    router_inputs: RouterInputs,
    defers: bool,
) -> MixtureOfExperts:
    if spec.router_mlp is not None:
        return ContinuedMixture(spec, weights, context, router_inputs)
    if defers:
        return ShortcutMixture(spec, weights, context, group=ranks.tensor)
    if spec.normed:
        return NormedMixture(spec, weights, context, norm_eps=norm_eps, group=ranks.tensor)
    return MixtureOfExperts(spec, weights, context)
