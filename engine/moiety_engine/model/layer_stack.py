"""Layers of one rank's pipeline stage: attentions, feed-forwards and the residual connections between them.

T tokens of the step, D model width, L layers, P width of a layer's embedding.
"""

from __future__ import annotations

from functools import partial
from operator import call
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moiety_engine.distribution.collectives import SINGLE_RANK_GROUPS
from moiety_engine.distribution.expert_all_to_all import run_complete_pass
from moiety_engine.model.expert_setup import all_to_all_of, expert_slots
from moiety_engine.model.feed_forwards import feed_forward
from moiety_engine.model.hyper_connections import residual_norms, split_streams
from moiety_engine.model.layer_embeddings import layer_embeddings
from moiety_engine.model.layers import MixtureOfExperts, attention, prefetch_in_turn, replayable_layers
from moiety_engine.model.normed_mixture import NormedMixture
from moiety_engine.model.norms import make_norm
from moiety_engine.model.remote_experts import take_turns
from moiety_engine.model.residuals import ResidualConnections
from moiety_engine.model.rotary import RotaryTable
from moiety_engine.model.router_mlp import RouterInputs
from moiety_engine.model.shared_cache import share_rows
from moiety_engine.model.shortcut_mixture import ShortcutMixture

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from moiety_engine.distribution.collectives import RankCollectives
    from moiety_engine.model.adapter_stacks import AdapterStacks
    from moiety_engine.model.batch import Batch, KvCache
    from moiety_engine.model.layers import FeedForward
    from moiety_engine.model.norm_weights import NormWeights
    from moiety_engine.model.spec import ModelSpec
    from moiety_engine.model.transformer_options import TransformerOptions
    from moiety_engine.model.weights import ModelWeights


class LayerStack:
    """Layers of a stage with their weights.

    `chosen`: experts of the running pass, [T, K] of each of the stage's layers with experts. `slots`: expert slots of
    each layer, None where all experts are on this rank. `attentions`: first half of each layer. `recurrent`: those
    that can replay tokens, by index.
    """

    def __init__(
        self,
        own: ModelSpec,
        spec: ModelSpec,
        weights: ModelWeights,
        options: TransformerOptions,
        adapters: AdapterStacks,
    ) -> None:
        """Create the layers. `own`: the rank's part of `spec`, see `own_spec`. `weights`: those of `own`."""
        arithmetic, ranks = options.arithmetic, options.ranks
        embedding_VD = weights.embedding_VD
        device, rounds = embedding_VD.device, embedding_VD.dtype is torch.bfloat16
        rotaries = {rope: RotaryTable(rope, device) for rope in own.ropes}
        self._spec, self._ranks = spec, ranks
        self._first_layer = ranks.rank_position.layers_of(len(spec.layers)).start
        self._has_states = bool(spec.recurrent_layers)
        self.chosen: list[Tensor] = []
        attend = partial(attention, arithmetic=arithmetic, rounds=rounds, group=ranks.tensor)
        attend = partial(attend, context=ranks.context, copies=ranks.copies)
        halves = [
            attend(one.attention, w.attention, rotaries, spec.norm.eps, adapters=factors)
            for one, w, factors in zip(own.layers, weights.layers, adapters.layers, strict=True)
        ]
        self.recurrent = replayable_layers(halves)
        self.attentions = [
            self._whole(half, ranks.tensor, w.attention_post_norm)
            for half, w in zip(halves, weights.layers, strict=True)
        ]
        self._norms, self.final_norm = residual_norms(spec, weights, arithmetic)
        self._next_norms = [norm for norm, _ in self._norms[1:]] + [self.final_norm]
        self.router_inputs = RouterInputs(spec, ranks.pipeline)
        self._options, self._adapters = options, adapters
        self.use_experts(own, weights)
        self._layer_embeddings, self._added = layer_embeddings(spec, weights, arithmetic)
        self._residuals = [
            ResidualConnections(one, spec.residual_multiplier, w, input_is_shared=further.shares_input)
            for one, further, w in zip(own.layers, (*own.layers[1:], own.layers[0]), weights.layers, strict=True)
        ]

    def use_experts(self, own: ModelSpec, weights: ModelWeights) -> None:
        """Build the feed-forwards of these weights, which belong to `own`, for the ranks that have the experts now.

        Called between steps.
        """
        options, device = self._options, weights.embedding_VD.device
        ranks, expert_cache = options.ranks, options.expert_cache
        cached = None if expert_cache is None else iter(expert_cache.layers)
        self.slots = [expert_slots(one.ffn, ranks, device) for one in own.layers]
        self.all_to_all = all_to_all_of(ranks, device, options.expert_all2all)
        feed = partial(feed_forward, norm_eps=self._spec.norm.eps, ranks=ranks, router_inputs=self.router_inputs)
        feed = partial(feed, all_to_all=self.all_to_all)
        parts = zip(own.layers, weights.layers, self._adapters.layers, self.slots, strict=True)
        feeds = [
            feed(
                one.ffn,
                w.ffn,
                self.chosen,
                options.arithmetic,
                factors,
                slots,
                cached,
                defers=one.defers_experts,
                layer=number,
            )
            for number, (one, w, factors, slots) in enumerate(parts)
        ]
        self._mixture_of_layer = [half if isinstance(half, MixtureOfExperts) else None for half in feeds]
        self._mixtures = [half for half in self._mixture_of_layer if half is not None]
        if expert_cache is not None and expert_cache.prefetches:
            prefetch_in_turn(self._mixtures)
        self._in_stages = [half if isinstance(half, MixtureOfExperts) and half.is_remote else None for half in feeds]
        self._ffns = [self._fed(half, w.ffn_post_norm) for half, w in zip(feeds, weights.layers, strict=True)]

    def run(
        self, x_TD: Tensor, batch: Batch, kv: KvCache, on_stored: Callable[[int], None] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the output of all layers, and its final norm, both [T, D].

        `on_stored` is called with the number of each layer once its keys and values are stored. It must be None on all
        ranks or on none, because a pass with it is not run again.
        """
        repeatable = on_stored is None and not self._has_states  # a pass advances recurrent states
        run = partial(self._run_pass, batch=batch, kv=kv, on_stored=on_stored)
        return run_complete_pass(self.all_to_all, run, x_TD, repeatable=repeatable)

    def _run_pass(
        self, x_TD: Tensor, batch: Batch, kv: KvCache, on_stored: Callable[[int], None] | None
    ) -> tuple[Tensor, Tensor]:
        """Run all layers once; see `run`."""
        self.chosen.clear()
        tp, parts = self._ranks.rank_position.layout.tp, batch.micro_batches
        bounds = [None] * max(1, len(parts)) if batch.spread is None else batch.spread.share_bounds(tp, len(parts))
        parts_of_tokens = [part.token_ids_T for part in parts]
        self.router_inputs.begin_pass(batch.token_ids_T, parts_of_tokens)
        if parts:
            assert on_stored is None, "a step that sends KV is not split into micro-batches"
            ended = self._in_turns(x_TD, parts, kv, bounds)
            self.router_inputs.end_pass(batch.token_ids_T, parts_of_tokens)
            return ended
        return take_turns([self._way(x_TD, batch, kv, on_stored, bound=bounds[0])])[0]

    def _in_turns(
        self, x_TD: Tensor, parts: tuple[Batch, ...], kv: KvCache, bounds: Sequence[int | None]
    ) -> tuple[Tensor, Tensor]:
        """Run the layers on micro-batches: one computes attention while the others are at the experts."""
        of_parts = torch.split(x_TD, [len(part.token_ids_T) for part in parts])
        ways = zip(of_parts, parts, bounds, strict=True)
        ended = take_turns([self._way(part_TD, part, kv, bound=bound) for part_TD, part, bound in ways])
        by_layer = (self.chosen[i : i + len(parts)] for i in range(0, len(self.chosen), len(parts)))
        self.chosen[:] = [torch.cat(picks) for picks in by_layer]
        return torch.cat([x for x, _ in ended]), torch.cat([normed for _, normed in ended])

    def _way(
        self,
        x_TD: Tensor,
        batch: Batch,
        kv: KvCache,
        on_stored: Callable[[int], None] | None = None,
        *,
        bound: int | None,
    ) -> Generator[None, None, tuple[Tensor, Tensor]]:
        """Run a batch or a micro-batch through all layers; yields in MoE layers, while rows are on other ranks.

        `bound`: the most tokens of the part that any rank dispatches; None: unknown.
        """
        if not len(x_TD):
            return (yield from self._run_without_tokens(x_TD, batch, kv, on_stored, bound=bound))
        embeddings_LTP = None if self._layer_embeddings is None else self._layer_embeddings(batch.token_ids_T, x_TD)
        x_TD = split_streams(x_TD, self._spec.streams)
        normed_TD = self._norms[0][0](x_TD)
        views, groups, deferred_TD = batch.by_cache_group(), kv.groups, None
        for number, (attend, feed, mixture, (_, ffn_norm), cache, next_norm, residual) in enumerate(
            zip(
                self.attentions,
                self._ffns,
                self._in_stages,
                self._norms,
                kv.layers,
                self._next_norms,
                self._residuals,
                strict=True,
            )
        ):
            attended_TD = attend(normed_TD, views[groups[number]], cache)
            if on_stored is not None:
                on_stored(number)
            if feed is None:
                x_TD, fed_TD = residual.scale_attention(x_TD, normed_TD, attended_TD)
            else:
                x_TD, normed_TD = residual.add_attention(x_TD, normed_TD, attended_TD, ffn_norm)
                if mixture is None:
                    fed_TD = feed(normed_TD, batch.adapted, batch.token_ids_T)
                else:
                    stages = mixture.stages(normed_TD, batch.adapted, batch.token_ids_T, bound=bound)
                    fed_TD = feed((yield from stages))
                x_TD, fed_TD, deferred_TD = residual.scale_ffn(x_TD, normed_TD, fed_TD, deferred_TD)
            if batch.images is not None:
                fed_TD = batch.images.add_deepstack(fed_TD, self._first_layer + number)
            if embeddings_LTP is not None:
                x_TD, fed_TD = self._added[number](x_TD, fed_TD, embeddings_LTP[number])
            x_TD, normed_TD = residual.end(x_TD, normed_TD, fed_TD, next_norm)
        return x_TD, normed_TD

    def _run_without_tokens(
        self, x_TD: Tensor, batch: Batch, kv: KvCache, on_stored: Callable[[int], None] | None, *, bound: int | None
    ) -> Generator[None, None, tuple[Tensor, Tensor]]:
        """Run a batch without tokens of this group: those of other groups may use this rank's cache and experts."""
        normed_TD = x_TD.new_empty(0, self._spec.hidden_size)
        copies, views, groups = self._ranks.copies, batch.by_cache_group(), kv.groups
        for number, mixture in enumerate(self._mixture_of_layer):
            if copies.size > 1:  # the other copies' tokens; without copies, a group without tokens has no tables
                share_rows(copies, kv.layers[number], views[groups[number]].rank_slots)
            if on_stored is not None:
                on_stored(number)
            if mixture is not None:
                end = yield from mixture.stages(normed_TD, batch.adapted, bound=bound)
                end()
        return split_streams(x_TD, self._spec.streams), normed_TD

    def _whole(
        self, half: Callable[..., Tensor], group: RankCollectives, weights: NormWeights | None
    ) -> Callable[..., Tensor]:
        """Return half a layer with the sum over its ranks and the optional post-norm."""

        def summed(*args: Any) -> Tensor:
            return group.sum(half(*args))

        if weights is None:
            return half if group.size == 1 else summed
        norm = make_norm(self._spec.norm, weights)
        return lambda *args: norm(summed(*args))

    def _fed(self, half: FeedForward | None, weights: NormWeights | None) -> Callable[..., Tensor] | None:
        """Return `_whole` of a feed-forward; for one that runs in stages, of the function that ends them."""
        sums_itself = isinstance(half, NormedMixture | ShortcutMixture)
        group = SINGLE_RANK_GROUPS.tensor if sums_itself else self._ranks.tensor
        in_stages = isinstance(half, MixtureOfExperts) and half.is_remote
        return None if half is None else self._whole(call if in_stages else half, group, weights)
