"""Attention–FFN disaggregation: experts on dedicated ranks (MegaScale-Infer, arXiv 2504.02263).

Attention ranks send a layer's rows to the expert ranks, and process other micro-batches in the meantime. They compute
shared experts themselves: this needs no communication and overlaps with the exchange. A token is sent once to each rank
that has any of its experts, or a shard of one, with its routing; the result is the sum over that rank's experts.

T tokens of a group, S one rank's share of them, D model width, K experts per token, R ranks with experts, N rows sent
to them, B bytes per row.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch

from moiety_engine.distribution.expert_all_to_all import ExpertRows, add_given, destinations
from moiety_engine.model.adapter_stacks import AdaptedRows, AdapterStacks
from moiety_engine.model.dispatch import adapter_columns, share_of
from moiety_engine.model.expert_migration import SlotWeights
from moiety_engine.model.layers import MixtureOfExperts, MoeContext
from moiety_engine.model.spec import MoeSpec
from moiety_engine.model.tensor_shards import own_spec
from moiety_engine.model.weight_offload import OffloadableModel, WeightOffload
from moiety_engine.model.weights import MoeWeights
from moiety_engine.moe.expert_slots import ExpertSlots

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from torch import Tensor

    from moiety_engine.distribution.collectives import ExpertExchange, PendingRowCounts, PendingRows, Ranks, Waited
    from moiety_engine.model.arithmetic import Arithmetic
    from moiety_engine.model.spec import ModelSpec
    from moiety_engine.model.weights import ModelWeights
    from moiety_engine.offload.cache import ExpertCache

Result = TypeVar("Result")


class RemoteExperts(MixtureOfExperts):
    """MoE layer on an attention rank, which has no routed experts.

    All ranks of the stage begin and end their parts of each micro-batch in the same order, including parts without
    tokens.
    """

    def __init__(self, spec: MoeSpec, weights: MoeWeights, context: MoeContext, ranks: Ranks) -> None:
        """Create the layer. The context's slots are None if each expert rank has a shard of every expert."""
        super().__init__(spec, weights, context)
        (self._crossing,) = ranks.crossings
        self._waited = ranks.waited
        self._ranks = ranks
        self._num_experts = spec.routing.num_experts

    @property
    def is_remote(self) -> bool:
        """Return True."""
        return True

    def stages(
        self, x_TD: Tensor, rows: AdaptedRows | None, token_ids_T: Tensor | None = None, *, bound: int | None = None
    ) -> Generator[None, None, Callable[[], Tensor]]:
        """Begin the layer, and yield while its rows are on the expert ranks; see MixtureOfExperts."""
        end = self.begin(x_TD, rows, token_ids_T)
        yield
        return end

    def begin(self, x_TD: Tensor, rows: AdaptedRows | None, token_ids_T: Tensor | None = None) -> Callable[[], Tensor]:
        """Send the rows of this rank's share to the experts, compute the shared experts, and return without waiting.

        `token_ids_T`, int64, is needed where a hash chooses experts. The returned function waits for the experts'
        results of this rank's share, adds them, and returns the sum.
        """
        weight_TK, expert_TK = self._route(x_TD, token_ids_T)
        self._chosen.append(expert_TK)
        input_TD, weight_TK = self._weighed(x_TD, weight_TK)
        rank_position, crossing = self._ranks.rank_position, self._crossing
        share, num_held = share_of(rank_position, len(x_TD)), self._num_experts
        x_SD, weight_SK, slot_SK = input_TD[share], weight_TK[share], expert_TK[share]
        if self._slots is not None:
            slot_SK, num_held = self._slots.of(slot_SK, num_ranks=crossing.num_attention), self._slots.num_held
        goes_RS = destinations(rank_position, num_held, slot_SK)
        num_sent, row_N = goes_RS.sum(1).tolist(), goes_RS.nonzero()[:, 1]
        packed_NB = ExpertRows(x_SD, weight_SK, slot_SK, *adapter_columns(rows, share)).pack().index_select(0, row_N)
        none = [0] * crossing.there.size
        to_experts = none[: crossing.num_attention] + num_sent
        crossing.there.send_row_counts(to_experts)
        gone = crossing.there.exchange_rows(packed_NB, to_experts, none)
        coming = crossing.back.exchange_rows(x_SD[:0], none, to_experts)
        out_TD = self._add_shared(torch.zeros_like(x_TD), x_TD, rows)

        def end() -> Tensor:
            add_given(out_TD[share], row_N, self._waited.on(coming), num_sent)
            gone.wait()
            return out_TD

        return end


class ExpertServer(OffloadableModel):
    """Part of a model on a rank with experts only.

    It serves the attention ranks, layer by layer, and knows no request, position or KV cache.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        *,
        arithmetic: Arithmetic,
        ranks: Ranks,
        expert_cache: ExpertCache | None = None,
    ) -> None:
        """Create the server.

        `weights`: the rank's part of the model's weights. `expert_cache`: the cache whose slots these are, if experts
        are offloaded; nothing is prefetched, since the routers are on other ranks.
        """
        own = own_spec(spec, ranks.rank_position)
        self.spec, self.ranks = spec, ranks
        self.device, dtype = weights.embedding_VD.device, weights.embedding_VD.dtype
        activation_dtype = torch.float32 if self.device.type == "cpu" else dtype
        self.adapters = AdapterStacks(spec, ranks.rank_position, self.device, activation_dtype)
        self._weight_offload = WeightOffload(weights)
        self.expert_cache = expert_cache
        cached = iter(() if expert_cache is None else expert_cache.layers)
        self._layers: list[_Answering] = []
        self._movable: dict[int, tuple[MoeWeights, ExpertSlots]] = {}
        for index in own.moe_layers:
            ffn, of_layer = own.layers[index].ffn, weights.layers[index].ffn
            assert isinstance(ffn, MoeSpec) and isinstance(of_layer, MoeWeights)
            slots = self._slots(ffn)
            self._movable[index] = of_layer, slots
            factors = self.adapters.layers[index]
            context = MoeContext([], arithmetic, factors, slots, cached=next(cached, None))
            mixture = MixtureOfExperts(ffn, of_layer, context)
            like_TD = torch.empty(0, spec.hidden_size, dtype=activation_dtype, device=self.device)
            like_TK = torch.empty(0, ffn.routing.top_k, dtype=torch.float32, device=self.device)
            crossing = ranks.crossings[ranks.rank_position.layout.stage_of(index, len(spec.layers))]
            self._layers.append(_Answering(mixture.routed, crossing, ranks.waited, like_TD, like_TK))

    def _slots(self, spec: MoeSpec) -> ExpertSlots:
        layout, num_experts = self.ranks.rank_position.layout, spec.routing.num_experts
        own_part = self.ranks.rank_position.ep_rank
        slots = layout.slots(num_experts)
        return ExpertSlots(slots, num_experts, num_parts=layout.ep, own_part=own_part, device=self.device)

    @torch.inference_mode()
    def answer(self, num_micro_batches: int, *, has_adapters: bool) -> None:
        """Process a step of `num_micro_batches` micro-batches: layer by layer, one micro-batch after another.

        `has_adapters`: tokens of the step have adapters.
        """
        visits = [layer for layer in self._layers for _ in range(num_micro_batches)]
        given: deque[PendingRows] = deque()
        announced = visits[0].listen()
        for layer, following in zip(visits, [*visits[1:], None], strict=True):
            coming = layer.receive(announced, has_adapters=has_adapters)
            if following is not None:
                announced = following.listen()  # before these are computed, so that it can arrive meanwhile
            given.append(layer.return_rows(coming, has_adapters=has_adapters))
            if len(given) > num_micro_batches:
                given.popleft().wait()  # already received: the same tokens' rows of the next layer have arrived
        for one in given:
            one.wait()

    def slot_weights(self, layer: int) -> SlotWeights:
        """Return the weights in this rank's expert slots of a layer."""
        weights, slots = self._movable[layer]
        of_experts = self.adapters.layers[layer].of_held_experts(slots.num_held)
        return SlotWeights(weights, slots.num_held, self.ranks.rank_position, of_experts)

    def slots_of(self, layer: int) -> ExpertSlots | None:
        """Return the expert slots of a layer; None for a layer without experts."""
        return self._movable[layer][1] if layer in self._movable else None


@dataclass(frozen=True, slots=True)
class _Answering:
    """One layer of an expert rank. `_like_…`: empty tensors with the width and dtype of received rows."""

    _routed: Callable[[Tensor, Tensor, Tensor, AdaptedRows | None], Tensor]
    _crossing: ExpertExchange
    _waited: Waited
    _like_TD: Tensor
    _like_TK: Tensor

    def listen(self) -> PendingRowCounts:
        return self._crossing.there.send_row_counts(self._none)

    def receive(self, announced: PendingRowCounts, *, has_adapters: bool) -> tuple[Tensor, list[int]]:
        """Return the received rows, packed, and the number of rows from each rank."""
        num_received = self._waited.on(announced)
        nothing_NB = self._like(has_adapters=has_adapters).pack()
        return self._crossing.there.exchange_rows(nothing_NB, self._none, num_received).wait(), num_received

    def return_rows(self, coming: tuple[Tensor, list[int]], *, has_adapters: bool) -> PendingRows:
        packed_NB, num_received = coming
        received = self._like(has_adapters=has_adapters).unpack(packed_NB)
        adapter_S1 = received.adapter_S1
        rows = None if adapter_S1 is None else AdaptedRows(adapter_S1.squeeze(1).long())
        given_ND = received.x_SD
        if len(given_ND):
            given_ND = self._routed(given_ND, received.weight_SK, received.slot_SK, rows)
        return self._crossing.back.exchange_rows(given_ND.contiguous(), num_received, self._none)

    def _like(self, *, has_adapters: bool) -> ExpertRows:
        slot_TK = self._like_TK.int()
        return ExpertRows(self._like_TD, self._like_TK, slot_TK, slot_TK[:, :1] if has_adapters else None)

    @property
    def _none(self) -> list[int]:
        return [0] * self._crossing.there.size


def take_turns(generators: Sequence[Generator[None, None, Result]]) -> list[Result]:
    """Advance the generators round-robin until they end, and return their results; all yield equally often."""
    while True:
        ended = []
        for generator in generators:
            try:
                next(generator)
            except StopIteration as end:
                ended.append(end.value)
        if ended:
            return ended
