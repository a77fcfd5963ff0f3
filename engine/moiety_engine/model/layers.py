"""Parts of a decoder layer: attention and feed-forward, each built from kernels and its weights.

T tokens, D model width, H query heads, G key-value heads, d head width, E experts, K experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import torch

from moiety_engine.model.adapter_stacks import LayerFactors, Product
from moiety_engine.model.cached_experts import CachedExperts
from moiety_engine.model.compressed_attention import CompressedAttention
from moiety_engine.model.constant_weights import ConstantWeights
from moiety_engine.model.context_parallel import paged_attention_over
from moiety_engine.model.conv_attention import ConvAttention
from moiety_engine.model.divided_norm import DividedNorm
from moiety_engine.model.latent_attention import LatentAttention
from moiety_engine.model.recurrent_layers import recurrent_layer
from moiety_engine.model.recurrent_mixer import RecurrentMixer
from moiety_engine.model.recurrent_weights import RecurrentWeights
from moiety_engine.model.residuals import times
from moiety_engine.model.rotary import GrowthTable
from moiety_engine.model.routed_attention import RoutedAttention
from moiety_engine.model.routed_attention_spec import RoutedAttentionSpec, RoutedAttentionWeights
from moiety_engine.model.shared_cache import share_rows
from moiety_engine.model.spec import AttentionSpec, LatentAttentionSpec, MoeSpec
from moiety_engine.model.weights import (
    AttentionWeights,
    DenseWeights,
    LatentAttentionWeights,
    MoeWeights,
)
from moiety_kernels.attention_input import AttentionInputPlan, attention_input
from moiety_kernels.kv_store.caches import LayerCache
from moiety_kernels.linear import linear
from moiety_kernels.moe import dense_glu, experts
from moiety_kernels.output_gate import output_gate
from moiety_kernels.paged_attention.inputs import AttentionParameters
from moiety_kernels.route import RoutingSpec, route, weigh_experts
from moiety_kernels.scaled_sum import scale_rows, scaled_sum

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from torch import Tensor

    from moiety_engine.distribution.collectives import RankCollectives
    from moiety_engine.model.adapter_stacks import AdaptedRows
    from moiety_engine.model.arithmetic import Arithmetic
    from moiety_engine.model.batch import Batch, Cache, RecurrentRows, RecurrentStateCache
    from moiety_engine.model.dispatch import Dispatch
    from moiety_engine.model.recurrent_specs import RecurrentSpec
    from moiety_engine.model.rope_spec import RopeSpec
    from moiety_engine.model.rotary import RotaryTable
    from moiety_engine.model.spec import DenseSpec, SharedSpec
    from moiety_engine.model.weights import LatentProjections, SharedWeights
    from moiety_engine.moe.expert_slots import ExpertSlots
    from moiety_engine.offload.layer import LayerExperts
    from moiety_kernels.low_rank import FeedForwardFactors


class Attention(Protocol):
    """Attention, the first half of a layer."""

    def __call__(self, x_TD: Tensor, batch: Batch, cache: Cache) -> Tensor: ...


class RecurrentLayer(Protocol):
    """Attention of a recurrent layer that can replay tokens, which its spec says by `input_widths`."""

    def replay(self, inputs_TC: Sequence[Tensor], rows: RecurrentRows, cache: RecurrentStateCache) -> None:
        """Advance the states in the rows' slots by tokens with these recorded inputs."""
        ...


class FeedForward(Protocol):
    """Feed-forward, the second half of a layer. `token_ids_T`, int64, is needed where a hash chooses experts."""

    def __call__(self, x_TD: Tensor, rows: AdaptedRows | None, token_ids_T: Tensor | None = None) -> Tensor: ...


class GroupedQueryAttention:
    """Causal attention with a paged cache; query heads share key-value heads in groups."""

    def __init__(
        self,
        spec: AttentionSpec,
        weights: AttentionWeights,
        rotary: RotaryTable,
        norm_eps: float,
        arithmetic: Arithmetic,
        adapters: LayerFactors,
        *,
        rounds: bool,
        group: RankCollectives,
        context: RankCollectives,
        copies: RankCollectives,
    ) -> None:
        """Create the layer.

        `rounds`: attention may round its inputs to bfloat16, the type of the model's weights. `group`: the ranks that
        share the heads. `context`: those that divide the positions of a sequence. `copies`: those with the same cache.
        """
        self._copies = copies
        self._spec, self._weights, self._rotary, self._adapters = spec, weights, rotary, adapters
        self._linear = partial(linear, invariant=arithmetic.invariant)
        parameters = AttentionParameters(spec.scale, spec.window, weights.sinks_H, chunked=spec.chunked, rounds=rounds)
        self._attend = paged_attention_over(context, parameters)
        device = rotary.device
        self._growth = None if spec.query_growth is None else GrowthTable(spec.query_growth, device)
        self._divided_norm = None if spec.divided_norm is None else DividedNorm(spec, weights, norm_eps, group)
        norms = (weights.q_norm, weights.k_norm) if self._divided_norm is None else (None, None)
        if spec.kv_layer is not None:
            norms = (weights.q_norm,) * 2  # no keys are normalized
        if spec.qk_norm == "unit":
            norms = (torch.ones(spec.head_dim, device=device),) * 2
        v_norm = torch.ones(spec.value_width, device=device) if spec.value_norm else None
        self._plan = AttentionInputPlan(*norms, norm_eps, spec.clip, rotates_first=spec.rotates_first, v_norm=v_norm)

    def __call__(self, x_TD: Tensor, batch: Batch, cache: Cache) -> Tensor:
        assert isinstance(cache, LayerCache)
        spec, weights, adapted = self._spec, self._weights, batch.adapted
        qkv_TC = self._linear(x_TD, weights.qkv_CD, weights.qkv_bias_C)
        if adapted is not None:
            self._adapters.add(Product.QKV, qkv_TC, x_TD, adapted)
        if self._divided_norm is not None:
            self._divided_norm(qkv_TC)
        written = cache if self._spec.kv_layer is None else cache.without_heads()  # it reads that of another layer
        q_THd = attention_input(qkv_TC, self._plan, self._rotary.of_batch(batch), written, batch.slots_T)
        if self._growth is not None:
            q_THd = scale_rows(q_THd, self._growth.upto(batch.max_context), batch.positions_T)
        if batch.rank_slots:
            share_rows(self._copies, cache, batch.rank_slots)
        out_THd = self._attend(q_THd, cache, batch.attention)
        if spec.value_scale != 1.0:  # attention is linear in values
            out_THd = scaled_sum(out_THd, spec.value_scale)
        if spec.gate is not None and weights.gate_CD is not None:
            gate_TC = self._linear(x_TD, weights.gate_CD)
            self._adapters.add(Product.OUTPUT_GATE, gate_TC, x_TD, adapted)
            out_THd = output_gate(out_THd, gate_TC, spec.gate.kind)
        heads_TC = out_THd.view(out_THd.shape[0], -1)
        out_TD = self._linear(heads_TC, weights.output_DC, weights.output_bias_D)
        return out_TD if adapted is None else self._adapters.add(Product.OUTPUT, out_TD, heads_TC, adapted)


class DenseFeedForward:
    """Dense feed-forward, with gates or without."""

    def __init__(self, spec: DenseSpec, weights: DenseWeights, arithmetic: Arithmetic, adapters: LayerFactors) -> None:
        self._activation, self._weights, self._adapters = spec.activation, weights, adapters
        self._factor, self._invariant = spec.factor, arithmetic.invariant

    def __call__(self, x_TD: Tensor, rows: AdaptedRows | None, token_ids_T: Tensor | None = None) -> Tensor:
        return times(self._factor, self.glu(x_TD, adapters=self._adapters.of_feed_forward(rows)))

    def glu(
        self,
        x_TD: Tensor,
        *,
        weight_T1: Tensor | None = None,
        onto_TD: Tensor | None = None,
        adapters: FeedForwardFactors | None = None,
    ) -> Tensor:
        """Return the output for x, weighted and added to another one if these are given; see `dense_glu`."""
        w = self._weights
        return dense_glu(
            x_TD,
            w.gate_up_2FD,
            w.down_DF,
            w.gate_up_bias_2F,
            w.down_bias_D,
            activation=self._activation,
            weight_T1=weight_T1,
            onto_TD=onto_TD,
            invariant=self._invariant,
            adapters=adapters,
        )


class SharedExperts:
    """Shared experts, which process every token.

    If they have a gate, its sigmoid is computed as the score of a router with one expert.
    """

    _ROUTING = RoutingSpec(num_experts=1, top_k=1, renormalize=False, scoring="sigmoid")

    def __init__(
        self, spec: SharedSpec, weights: SharedWeights, arithmetic: Arithmetic, adapters: LayerFactors
    ) -> None:
        assert spec.factor == 1.0 or not spec.gated, "a gate has no factor"
        self._dense = DenseFeedForward(spec.dense, weights.dense, arithmetic, LayerFactors())
        self._weights, self._factor, self._invariant = weights, spec.factor, arithmetic.invariant
        self._adapters = adapters
        self._constant = ConstantWeights(spec.factor)

    def added_to(self, routed_TD: Tensor, x_TD: Tensor, rows: AdaptedRows | None = None) -> Tensor:
        """Return the routed experts' output, which may be overwritten, plus the shared experts' output for x."""
        adapters = self._adapters.of_shared_experts(rows)
        return self._dense.glu(x_TD, weight_T1=self._share(x_TD), onto_TD=routed_TD, adapters=adapters)

    def alone(self, x_TD: Tensor) -> Tensor:
        """Return the shared experts' output for x."""
        return self._dense.glu(x_TD, weight_T1=self._share(x_TD)) if len(x_TD) else x_TD

    def _share(self, x_TD: Tensor) -> Tensor | None:
        gate_1D = self._weights.gate_1D
        if gate_1D is None:
            return None if self._factor == 1.0 else self._constant.of_tokens(len(x_TD), x_TD.device)
        return route(linear(x_TD, gate_1D, invariant=self._invariant), self._ROUTING)[0]


@dataclass(frozen=True, slots=True)
class MoeContext:
    """Objects of the model and the rank that an MoE layer works with.

    `chosen`: list to which each pass appends the experts of each token, expert_TK. `slots`: the experts' slots, if some
    experts are on other ranks. `dispatch`: all-to-all with ranks that have other tokens; all ranks call the layer
    together, even without tokens. `cached`: the experts that the weights hold, if experts are offloaded.
    """

    chosen: list[Tensor]
    arithmetic: Arithmetic
    adapters: LayerFactors
    slots: ExpertSlots | None = None
    dispatch: Dispatch | None = None
    cached: LayerExperts | None = None


class MixtureOfExperts:
    """MoE layer: router, weighted sum of each token's chosen experts, and shared experts, if there are any."""

    def __init__(self, spec: MoeSpec, weights: MoeWeights, context: MoeContext) -> None:
        self._spec, self._weights, self._chosen, self._adapters = spec, weights, context.chosen, context.adapters
        self._arithmetic, self._slots, self._dispatch = context.arithmetic, context.slots, context.dispatch
        self._cached = None if context.cached is None else CachedExperts(context.cached)
        self._following: MixtureOfExperts | None = None
        self._linear = partial(linear, invariant=context.arithmetic.invariant)
        self._one = ConstantWeights(1.0)
        self._shared: SharedExperts | None = None
        if spec.shared and weights.shared:
            self._shared = SharedExperts(spec.shared, weights.shared, context.arithmetic, context.adapters)

    def prefetch(self, following: MixtureOfExperts) -> None:
        """Prefetch in every pass the experts that the `following` layer would choose for this layer's input.

        The residual stream changes little from one layer to the next (Eliseev and Mazur 2023, arXiv 2312.17238).
        Experts that compute in a width of their own are not prefetched: their input is not the following router's.
        """
        self._following = following if self._spec.latent_width is None else None

    def __call__(self, x_TD: Tensor, rows: AdaptedRows | None, token_ids_T: Tensor | None = None) -> Tensor:
        weight_TK, expert_TK = self._route(x_TD, token_ids_T)
        self._chosen.append(expert_TK)
        latent, input_TD = self._weights.latent, x_TD
        if self._spec.weighs_input:
            input_TD, weight_TK = self._weighed(x_TD, weight_TK)
        if latent is not None:
            routed_TD = self._routed_in_latent_space(x_TD, weight_TK, expert_TK, latent)
        else:
            assert self._dispatch is None, "such a layer runs in stages"
            slot_TK = expert_TK if self._slots is None else self._slots.of(expert_TK)
            routed_TD = self.routed(input_TD, weight_TK, slot_TK, rows)
        return routed_TD if self._shared is None else self._add_shared(routed_TD, x_TD, rows)

    @property
    def is_remote(self) -> bool:
        """Return whether rows go to other ranks; the layer then runs by `stages`, and not by a call."""
        return self._dispatch is not None

    def stages(
        self, x_TD: Tensor, rows: AdaptedRows | None, token_ids_T: Tensor | None = None, *, bound: int | None = None
    ) -> Generator[None, None, Callable[[], Tensor]]:
        """Run the layer; yields while its rows, and then its results, are in flight, and returns what ends it.

        The returned function waits for the results and returns the sum. All ranks of the stage advance their parts of
        a step in the same order. `bound`: the most tokens that any rank dispatches; None: unknown.
        """
        assert self._dispatch is not None, "the layer's experts are on this rank"
        self._dispatch.bind(bound)
        if self._is_whole:
            out_TD = self(x_TD, rows, token_ids_T)
            yield
            return lambda: out_TD
        weight_TK, expert_TK = self._route(x_TD, token_ids_T)
        self._chosen.append(expert_TK)
        input_TD, weight_TK = self._weighed(x_TD, weight_TK)
        begun = self._dispatch.begin(input_TD, weight_TK, expert_TK, rows)
        out_TD = self._add_shared(torch.zeros_like(x_TD), x_TD, rows)
        yield
        begun.run_experts(self.routed)
        yield
        return partial(begun.add_to, out_TD)

    @property
    def _is_whole(self) -> bool:
        """Return whether all stages of the layer run at once, because it has further operations around its experts."""
        return self._weights.latent is not None

    def _routed_in_latent_space(
        self, x_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor, latent: LatentProjections
    ) -> Tensor:
        """Return the output of routed experts that compute in a width of their own.

        Ranks sum their outputs after the projection to the model's width, which is linear.
        """
        any_rows, width = bool(len(x_TD)), latent.down_LD.shape[0]
        x_TL = self._linear(x_TD, latent.down_LD) if any_rows else x_TD.new_empty(0, width)
        if self._dispatch is not None:
            routed_TL = self._dispatch(x_TL, weight_TK, expert_TK, self.routed, lambda: torch.zeros_like(x_TL))
        else:
            slot_TK = expert_TK if self._slots is None else self._slots.of(expert_TK)
            routed_TL = self.routed(x_TL, weight_TK, slot_TK)
        return self._linear(routed_TL, latent.up_DL) if any_rows else x_TD

    def _weighed(self, x_TD: Tensor, weight_TK: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts' input and the weights of their outputs."""
        if not self._spec.weighs_input:
            return x_TD, weight_TK
        return scale_rows(x_TD, weight_TK), self._one.of_tokens(len(x_TD), x_TD.device)

    def _route(self, x_TD: Tensor, token_ids_T: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the weight and the index of each token's experts, both [T, K]."""
        spec, weights = self._spec, self._weights
        if not len(x_TD):
            none_TK = x_TD.new_empty(0, spec.routing.top_k, dtype=torch.float32)
            return none_TK, none_TK.int()
        widen = spec.exact_router and x_TD.dtype is not torch.float32
        routed_by_TD = x_TD.float() if widen else x_TD
        logits_TE = linear(routed_by_TD, weights.router_ED, weights.router_bias_E, invariant=self._arithmetic.invariant)
        if weights.expert_of_token_VK is not None:
            assert token_ids_T is not None, "a hash of the token chooses these experts"
            expert_TK = weights.expert_of_token_VK.index_select(0, token_ids_T)
            return weigh_experts(logits_TE, expert_TK, spec.routing), expert_TK
        return route(logits_TE, spec.routing, weights.selection_bias_E)

    def routed(self, x_TD: Tensor, weight_TK: Tensor, slot_TK: Tensor, rows: AdaptedRows | None = None) -> Tensor:
        """Return the output of the experts with slots on this rank. `rows`: the adapter slots of the rows of x."""
        weights, arithmetic = self._weights, self._arithmetic
        here_TK = slot_TK if self._slots is None else self._slots.here(slot_TK)
        if self._cached is not None:
            products = weights.gate_up_E2FD, weights.down_EDF
            return self._cached(x_TD, weight_TK, here_TK, products, self._options(), self._expect)
        return experts(
            x_TD,
            weight_TK,
            here_TK,
            weights.gate_up_E2FD,
            weights.down_EDF,
            activation=self._spec.activation,
            gate_up_bias_E2F=weights.gate_up_bias_E2F,
            down_bias_ED=weights.down_bias_ED,
            kernel=arithmetic.moe_kernel,
            invariant=arithmetic.invariant,
            adapters=None if rows is None else self._adapters.of_feed_forward(rows),
        )

    def _options(self) -> dict[str, Any]:
        """Return the keyword arguments of the expert kernels for experts that are offloaded."""
        weights = self._weights
        return {
            "activation": self._spec.activation,
            "gate_up_bias_E2F": weights.gate_up_bias_E2F,
            "down_bias_ED": weights.down_bias_ED,
            "kernel": self._arithmetic.moe_kernel,
            "invariant": self._arithmetic.invariant,
        }

    def _expect(self, x_TD: Tensor) -> None:
        """Prefetch the experts of this rank that the following layer may choose for these tokens."""
        following = self._following
        if following is None or following._cached is None or following._spec.hashed_tokens:
            return
        expert_TK, slots = following._route(x_TD)[1], following._slots
        following._cached.expect(expert_TK if slots is None else slots.here(slots.of(expert_TK)))

    def _add_shared(self, routed_TD: Tensor, x_TD: Tensor, rows: AdaptedRows | None = None) -> Tensor:
        return routed_TD if self._shared is None or not len(x_TD) else self._shared.added_to(routed_TD, x_TD, rows)


def attention(
    spec: AttentionSpec | LatentAttentionSpec | RecurrentSpec,
    weights: AttentionWeights | RoutedAttentionWeights | LatentAttentionWeights | RecurrentWeights,
    rotaries: Mapping[RopeSpec, RotaryTable],
    norm_eps: float,
    arithmetic: Arithmetic,
    adapters: LayerFactors,
    *,
    rounds: bool,
    group: RankCollectives,
    context: RankCollectives,
    copies: RankCollectives,
) -> Attention:
    """Return the first half of a layer that the spec describes.

    `rounds`, `group`, `context`, `copies`: see GroupedQueryAttention.
    """
    if isinstance(spec, LatentAttentionSpec):
        assert isinstance(weights, LatentAttentionWeights)
        return LatentAttention(spec, weights, rotaries[spec.rope], arithmetic, context, copies)
    if isinstance(spec, RoutedAttentionSpec):
        assert isinstance(weights, RoutedAttentionWeights)
        return RoutedAttention(spec, weights, rotaries[spec.rope], norm_eps, arithmetic, rounds=rounds)
    if isinstance(spec, AttentionSpec):
        assert isinstance(weights, AttentionWeights)
        return GroupedQueryAttention(
            spec,
            weights,
            rotaries[spec.rope],
            norm_eps,
            arithmetic,
            adapters,
            rounds=rounds,
            group=group,
            context=context,
            copies=copies,
        )
    assert isinstance(weights, RecurrentWeights)
    return recurrent_layer(spec, weights, arithmetic, rotaries, group=group)


def replayable_layers(attentions: Sequence[Attention]) -> dict[int, RecurrentLayer]:
    """Return the layers that can replay tokens, by index."""
    return {
        i: one
        for i, one in enumerate(attentions)
        if isinstance(one, RecurrentMixer | CompressedAttention | ConvAttention)
    }


def prefetch_in_turn(mixtures: Sequence[MixtureOfExperts]) -> None:
    """Let each layer prefetch the experts of the next one."""
    for mixture, following in pairwise(mixtures):
        mixture.prefetch(following)
