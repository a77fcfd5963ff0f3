"""Experts on ranks of their own: the ranks with attention send a layer's rows there and go on with others meanwhile
(MegaScale-Infer, 2504.02263).

What they compute for every token anyhow stays with them, shared experts as well: nothing of it would have to be sent,
and it fills the time that rows are away. A token goes once to each rank that has any of its experts, or a piece of one,
with its routing; what comes back is the sum over that rank's experts.

T tokens of a group, S one rank's share of them, D model width, K experts a token, R ranks with experts, N rows that go
to them, B bytes a row.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch

from moiety_engine.model.adapter_stacks import LayerFactors
from moiety_engine.model.dispatch import add_given, destinations, pack, share_of, unpack
from moiety_engine.model.expert_migration import SlotWeights
from moiety_engine.model.layers import MixtureOfExperts
from moiety_engine.model.spec import MoeSpec
from moiety_engine.model.tensor_shards import own_spec
from moiety_engine.model.weight_offload import WeightOffload
from moiety_engine.model.weights import MoeWeights
from moiety_engine.moe.expert_slots import ExpertSlots

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from torch import Tensor

    from moiety_engine.distribution.collectives import ExpertExchange, PendingRowCounts, PendingRows, Ranks, Waited
    from moiety_engine.model.arithmetic import Arithmetic
    from moiety_engine.model.spec import ModelSpec
    from moiety_engine.model.weights import ModelWeights
    from moiety_placement.transition import Write

Result = TypeVar("Result")


class RemoteExperts(MixtureOfExperts):
    """A layer of experts on a rank with attention, which has none of the routed ones. All ranks of the stage begin and
    end what they have of each micro-batch in the same order, also of one that has no token of theirs."""

    def __init__(
        self,
        spec: MoeSpec,
        weights: MoeWeights,
        chosen: list[Tensor],
        arithmetic: Arithmetic,
        ranks: Ranks,
        slots: ExpertSlots | None,
    ) -> None:
        """`slots`: None where each of those ranks has a piece of every expert."""
        super().__init__(spec, weights, chosen, arithmetic, LayerFactors(), slots)
        (self._crossing,) = ranks.crossings
        self._waited = ranks.waited
        self._seat = ranks.seat
        self._num_held = spec.routing.num_experts if slots is None else slots.num_held

    def begin(self, x_TD: Tensor) -> Callable[[], Tensor]:
        """Rows go, and what every token needs is computed here; returns at once. What it returns waits for what the
        experts give this rank's share of the tokens, and adds it."""
        weight_TK, expert_TK = self._route(x_TD)
        self._chosen.append(expert_TK)
        share, crossing = share_of(self._seat, len(x_TD)), self._crossing
        x_SD, weight_SK, slot_SK = x_TD[share], weight_TK[share], expert_TK[share]
        if self._slots is not None:
            slot_SK = self._slots.of(slot_SK, num_ranks=crossing.num_attention)
        goes_RS = destinations(self._seat, self._num_held, slot_SK)
        num_sent, row_N = goes_RS.sum(1).tolist(), goes_RS.nonzero()[:, 1]
        packed_NB = pack(*(one.index_select(0, row_N) for one in (x_SD, weight_SK, slot_SK)))
        none = [0] * crossing.there.size
        to_experts = none[: crossing.num_attention] + num_sent
        crossing.there.announce(to_experts)
        gone = crossing.there.hand_out(packed_NB, to_experts, none)
        coming = crossing.back.hand_out(x_SD[:0], none, to_experts)
        out_TD = self._add_shared(torch.zeros_like(x_TD), x_TD)

        def end() -> Tensor:
            add_given(out_TD[share], row_N, self._waited.on(coming), num_sent)
            gone.wait()
            return out_TD

        return end


class ExpertServer:
    """What a rank with experts alone has of a model. It answers the ranks with attention, layer by layer, and knows no
    request, position or cache."""

    def __init__(self, spec: ModelSpec, weights: ModelWeights, *, arithmetic: Arithmetic, ranks: Ranks) -> None:
        """`weights`: what the rank has of those of the spec."""
        own, self._ranks = own_spec(spec, ranks.seat), ranks
        self.device, dtype = weights.embedding_VD.device, weights.embedding_VD.dtype
        activation_dtype = torch.float32 if self.device.type == "cpu" else dtype
        self._residence = WeightOffload(weights)
        self._layers: list[_Answering] = []
        self._movable: dict[int, tuple[MoeWeights, ExpertSlots]] = {}
        for index in own.moe_layers:
            ffn, of_layer = own.layers[index].ffn, weights.layers[index].ffn
            assert isinstance(ffn, MoeSpec) and isinstance(of_layer, MoeWeights)
            slots = self._slots(ffn)
            self._movable[index] = of_layer, slots
            mixture = MixtureOfExperts(ffn, of_layer, [], arithmetic, LayerFactors(), slots)
            like_TD = torch.empty(0, spec.hidden_size, dtype=activation_dtype, device=self.device)
            like_TK = torch.empty(0, ffn.routing.top_k, dtype=torch.float32, device=self.device)
            crossing = ranks.crossings[ranks.seat.layout.stage_of(index, len(spec.layers))]
            self._layers.append(_Answering(mixture.routed, crossing, ranks.waited, like_TD, like_TK))

    def _slots(self, spec: MoeSpec) -> ExpertSlots:
        layout, num_experts = self._ranks.seat.layout, spec.routing.num_experts
        own_part = self._ranks.seat.ep_rank
        slots = layout.slots(num_experts)
        return ExpertSlots(slots, num_experts, num_parts=layout.ep, own_part=own_part, device=self.device)

    @torch.inference_mode()
    def answer(self, num_micro_batches: int) -> None:
        """A step that is cut into so many: of each layer the one's rows after the other's."""
        visits = [layer for layer in self._layers for _ in range(num_micro_batches)]
        given: deque[PendingRows] = deque()
        announced = visits[0].listen()
        for layer, following in zip(visits, [*visits[1:], None], strict=True):
            coming = layer.receive(announced)
            if following is not None:
                announced = following.listen()  # before these are computed: it may come meanwhile
            given.append(layer.give(coming))
            if len(given) > num_micro_batches:
                given.popleft().wait()  # has arrived: of the same tokens the next layer's rows have come
        for one in given:
            one.wait()

    @torch.inference_mode()
    def move_experts(self, layer: int, writes: Sequence[Write]) -> None:
        """Some slots of a layer are given other experts, on all ranks together, between the same two steps."""
        weights, slots = self._movable[layer]
        SlotWeights(weights, slots.num_held).write(writes, self._ranks.seat)
        slots.write(writes)

    @property
    def away(self) -> bool:
        """Whether the weights are in host memory, where they went with `leave`."""
        return self._residence.away

    def leave(self, on_progress: Callable[[], None]) -> int:
        """The weights go to host memory; returns the bytes that are free thereby. Raises OutOfMemory."""
        return self._residence.leave(on_progress)

    def come_back(self, on_progress: Callable[[], None]) -> None:
        """The weights are on the device again. Raises OutOfMemory."""
        self._residence.come_back(on_progress)


@dataclass(frozen=True, slots=True)
class _Answering:
    """One layer of an expert rank. `like_…`: no rows, as wide and of the type of those that come."""

    _routed: Callable[[Tensor, Tensor, Tensor], Tensor]
    _crossing: ExpertExchange
    _waited: Waited
    _like_TD: Tensor
    _like_TK: Tensor

    def listen(self) -> PendingRowCounts:
        return self._crossing.there.announce(self._none)

    def receive(self, announced: PendingRowCounts) -> tuple[Tensor, list[int]]:
        """Rows, packed, and how many come from each rank."""
        num_received = self._waited.on(announced)
        nothing_NB = pack(self._like_TD, self._like_TK, self._like_TK.int())
        return self._crossing.there.hand_out(nothing_NB, self._none, num_received).wait(), num_received

    def give(self, coming: tuple[Tensor, list[int]]) -> PendingRows:
        packed_NB, num_received = coming
        x_ND, weight_NK, expert_NK = unpack(packed_NB, self._like_TD, self._like_TK)
        given_ND = self._routed(x_ND, weight_NK, expert_NK) if len(x_ND) else x_ND
        return self._crossing.back.hand_out(given_ND.contiguous(), num_received, self._none)

    @property
    def _none(self) -> list[int]:
        return [0] * self._crossing.there.size


def take_turns(ways: Sequence[Generator[None, None, Result]]) -> list[Result]:
    """Each goes on until it yields, then the next one, again and again; all yield as often. What they return."""
    while True:
        ended = []
        for way in ways:
            try:
                next(way)
            except StopIteration as end:
                ended.append(end.value)
        if ended:
            return ended
