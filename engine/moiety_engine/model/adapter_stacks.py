"""LoRA factors of all loaded adapters, by layer and product, with one slot per adapter.

S slots, E experts, P parts of a fused product, r rank, D input and N output width.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from moiety_engine.distribution.layout import RankPosition
from moiety_engine.model.routed_attention_spec import RoutedAttentionSpec
from moiety_engine.model.spec import AttentionSpec, MoeSpec
from moiety_engine.model.tensor_shards import own_spec
from moiety_kernels.low_rank import Factors, FeedForwardFactors, add_low_rank

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import Tensor

    from moiety_engine.model.spec import DenseSpec, LayerSpec, ModelSpec


class Product(StrEnum):
    """Matrix product of a layer that an adapter may modify."""

    QKV = "qkv"
    OUTPUT_GATE = "output_gate"
    OUTPUT = "output"
    GATE_UP = "gate_up"
    DOWN = "down"
    SHARED_GATE_UP = "shared_gate_up"
    SHARED_DOWN = "shared_down"


Key = tuple[int, Product]  # layer of the whole model, product


@dataclass(frozen=True, slots=True)
class Form:
    """Dimensions of a product: input `width`, and output `widths` of its parts."""

    width: int
    widths: tuple[int, ...]
    num_experts: int = 1

    def values(self, rank: int) -> int:
        """Return the number of values in an adapter's factors of this rank."""
        return self.num_experts * rank * (len(self.widths) * self.width + sum(self.widths))


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """A rank's part of an adapter in host memory, float32: down_EPrD and up_ErN of each product of this rank.

    up_ErN includes the scale.
    """

    rank: int
    factors: Mapping[Key, tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class AdaptedRows:
    """Adapter slot of each token of a step, int64; -1 for no adapter.

    A step has these rows in all groups of ranks, or in none.
    """

    slot_T: Tensor


class LayerFactors:
    """LoRA factors of one layer; a product that no loaded adapter modifies has none."""

    def __init__(self) -> None:
        self.of: dict[Product, Factors] = {}

    def add(self, product: Product, out_TN: Tensor, x_TD: Tensor, rows: AdaptedRows | None) -> Tensor:
        """Add the low-rank products of x with the rows' adapters to out in place, and return out."""
        factors = None if rows is None else self.of.get(product)
        if factors is not None and rows is not None:
            add_low_rank(out_TN, x_TD, factors, rows.slot_T)
        return out_TN

    def of_feed_forward(self, rows: AdaptedRows | None) -> FeedForwardFactors | None:
        """Return the factors of a dense feed-forward or of routed experts for the rows; None if no row has any."""
        return self._both(rows, Product.GATE_UP, Product.DOWN)

    def of_shared_experts(self, rows: AdaptedRows | None) -> FeedForwardFactors | None:
        """Return the factors of shared experts for the rows; None if no row has any."""
        return self._both(rows, Product.SHARED_GATE_UP, Product.SHARED_DOWN)

    def _both(self, rows: AdaptedRows | None, first: Product, second: Product) -> FeedForwardFactors | None:
        gate_up, down = self.of.get(first), self.of.get(second)
        if rows is None or (gate_up is None and down is None):
            return None
        return FeedForwardFactors(rows.slot_T, gate_up, down)

    def of_held_experts(self, num_held: int) -> tuple[Tensor, ...]:
        """Return views of the factors of `num_held` experts, one expert per row, each with all adapter slots."""
        factors = (self.of.get(product) for product in (Product.GATE_UP, Product.DOWN))
        tensors = [tensor for one in factors if one is not None for tensor in (one.down_SRD, one.up_SrN)]
        return tuple(tensor.view(-1, num_held, *tensor.shape[1:]).transpose(0, 1) for tensor in tensors)


def form_of(layer: LayerSpec, product: Product, hidden_size: int) -> Form | None:
    """Return the dimensions of a layer's product; None if the product does not exist or takes no adapters."""
    if product in (Product.QKV, Product.OUTPUT_GATE, Product.OUTPUT):
        attention = layer.attention
        if isinstance(attention, RoutedAttentionSpec) or not isinstance(attention, AttentionSpec):
            return None
        return _form_of_attention(attention, product, hidden_size)
    return _form_of_feed_forward(layer.ffn, product, hidden_size)


def _form_of_feed_forward(ffn: DenseSpec | MoeSpec | None, product: Product, hidden_size: int) -> Form | None:
    if ffn is None or not ffn.activation.gated or (isinstance(ffn, MoeSpec) and ffn.normed):
        return None  # the names of the dense feed-forward beside normed experts are those of another model's experts
    experts = ffn.num_held if isinstance(ffn, MoeSpec) else 1
    if product in (Product.SHARED_GATE_UP, Product.SHARED_DOWN):
        if not isinstance(ffn, MoeSpec) or ffn.shared is None:
            return None
        ffn, experts = ffn.shared.dense, 1
    if product in (Product.GATE_UP, Product.SHARED_GATE_UP):
        return Form(hidden_size, (ffn.width, ffn.width), experts)
    return Form(ffn.width, (hidden_size,), experts)


def _form_of_attention(attention: AttentionSpec, product: Product, hidden_size: int) -> Form | None:
    if product is Product.OUTPUT_GATE:
        return None if attention.gate is None else Form(hidden_size, (attention.gate_width,))
    if product is Product.OUTPUT:
        return Form(attention.output_width, (hidden_size,))
    if attention.kv_layer is not None:
        return Form(hidden_size, (attention.q_width,))
    # Where values share the projection of keys, its adapter would have the rows of both.
    return None if attention.keys_are_values else Form(hidden_size, attention.qkv_widths)


class RankForms:
    """Dimensions of the products on one rank. `own`: the spec of the rank's part of the model."""

    def __init__(self, own: ModelSpec, first_layer: int) -> None:
        """Create the view. `first_layer`: index in the model of the first layer of `own`."""
        self._own, self._first_layer = own, first_layer

    def of(self, key: Key) -> Form | None:
        """Return the dimensions of the rank's part of a product; None if it has none."""
        place, product = key[0] - self._first_layer, key[1]
        if not 0 <= place < len(self._own.layers):
            return None
        layer = self._own.layers[place]
        if layer.only_experts and not (isinstance(layer.ffn, MoeSpec) and product in (Product.GATE_UP, Product.DOWN)):
            return None
        form = form_of(layer, product, self._own.hidden_size)
        return form if form is not None and form.num_experts else None

    def num_values(self, keys: Iterable[Key], rank: int) -> int:
        """Return the number of values of one adapter's factors of these products on the rank."""
        return sum(form.values(rank) for form in map(self.of, keys) if form is not None)


@dataclass(frozen=True, slots=True)
class PreparedSlots:
    """Newly allocated slots, which take the place of the old ones at `AdapterStacks.commit`."""

    keys: frozenset[Key]
    num_slots: int
    rank: int
    layers: list[dict[Product, Factors]]


class AdapterStacks:
    """Owner of the device memory of adapters on one rank. Used between steps only.

    All slots have the same products and the same rank; those that an adapter lacks are zero. Keys and sizes are those
    of the whole model, on every rank; a rank has memory for its parts of the products only.
    """

    def __init__(self, spec: ModelSpec, rank_position: RankPosition, device: torch.device, dtype: torch.dtype) -> None:
        """Create the stacks without any slot. `spec`: that of the whole model."""
        own, first_layer = own_spec(spec, rank_position), rank_position.layers_of(len(spec.layers)).start
        self.layers = [LayerFactors() for _ in own.layers]
        self.num_slots = self.rank = 0
        self.num_changes = 0  # of the content of slots; the same on all ranks between two steps
        self.keys: frozenset[Key] = frozenset()
        self.dtype = dtype  # of all factors
        self._spec, self._rank_position, self._device = spec, rank_position, device
        self._forms, self._first_layer = RankForms(own, first_layer), first_layer

    def move_to(self, rank_position: RankPosition) -> None:
        """Use another layout of expert ranks for the sizes of slots to come. There must be no slots."""
        assert not self.num_slots, "slots are laid out for the expert ranks of before"
        self._rank_position = rank_position
        self._forms = RankForms(own_spec(self._spec, rank_position), self._first_layer)
        self.__dict__.pop("_all_forms", None)

    def num_bytes(self, keys: Iterable[Key], num_slots: int, rank: int) -> int:
        """Return the memory of `num_slots` slots, in bytes, on the rank that needs most."""
        wanted = tuple(keys)
        num_values = max(forms.num_values(wanted, rank) for forms in self._all_forms)
        return num_values * num_slots * self.dtype.itemsize

    @torch.inference_mode()
    def lay_out(self, keys: frozenset[Key], num_slots: int, rank: int, moves: Mapping[int, int]) -> None:
        """Reallocate the slots with this layout, and move old slots to new ones as `moves` says, layer by layer.

        Other old slots are discarded. A new slot that nothing moves to holds zeros.
        """
        for layer, of in zip(self.layers, self._relaid(keys, num_slots, rank, moves), strict=True):
            layer.of = of
        self.keys, self.num_slots, self.rank = keys, num_slots, rank
        self.num_changes += 1

    @torch.inference_mode()
    def prepare(self, keys: frozenset[Key], num_slots: int, rank: int, moves: Mapping[int, int]) -> PreparedSlots:
        """Return the slots of a new layout, as `lay_out` makes them, and leave the present ones as they are.

        Until `commit` both are in memory.
        """
        return PreparedSlots(keys, num_slots, rank, list(self._relaid(keys, num_slots, rank, moves)))

    def commit(self, prepared: PreparedSlots) -> None:
        """Replace the slots by prepared ones."""
        for layer, of in zip(self.layers, prepared.layers, strict=True):
            layer.of = of
        self.keys, self.num_slots, self.rank = prepared.keys, prepared.num_slots, prepared.rank
        self.num_changes += 1

    @torch.inference_mode()
    def fill(self, slot: int, weights: AdapterWeights) -> None:
        """Write an adapter into a slot; the layout must be large enough."""
        self.num_changes += 1
        for place, layer in enumerate(self.layers):
            for product, factors in layer.of.items():
                down_EPRD, up_ERN = _slot_of(factors, slot)
                down_EPRD.zero_()
                up_ERN.zero_()
                own = weights.factors.get((place + self._first_layer, product))
                if own is not None:
                    down_EPRD[:, :, : weights.rank].copy_(own[0])
                    up_ERN[:, : weights.rank].copy_(own[1])

    @cached_property
    def _all_forms(self) -> list[RankForms]:
        """Forms of one rank of each stage, and of one expert rank; others have parts of the same size."""
        spec, layout = self._spec, self._rank_position.layout
        ranks = [stage * layout.stage_size for stage in range(layout.pp)]
        ranks += [layout.attention_ranks] if layout.ffn_ranks else []
        positions = [RankPosition(layout, rank) for rank in ranks]
        return [RankForms(own_spec(spec, one), one.layers_of(len(spec.layers)).start) for one in positions]

    def _relaid(
        self, keys: frozenset[Key], num_slots: int, rank: int, moves: Mapping[int, int]
    ) -> Iterator[dict[Product, Factors]]:
        """Yield the factors of each layer in a new layout."""
        for place, layer in enumerate(self.layers):
            forms = {
                product: self._forms.of((place + self._first_layer, product))
                for product in Product
                if (place + self._first_layer, product) in keys
            }
            yield {
                product: self._moved(layer.of.get(product), form, num_slots, rank, moves)
                for product, form in forms.items()
                if form is not None
            }

    def _moved(
        self, before: Factors | None, form: Form, num_slots: int, rank: int, moves: Mapping[int, int]
    ) -> Factors:
        places, parts = num_slots * form.num_experts, len(form.widths)
        down = torch.zeros(places, parts * rank, form.width, dtype=self.dtype, device=self._device)
        up = torch.zeros(places, rank, sum(form.widths), dtype=self.dtype, device=self._device)
        after = Factors(down, up, form.widths, form.num_experts)
        for source, target in moves.items() if before is not None else ():
            assert before is not None
            for old, new in zip(_slot_of(before, source), _slot_of(after, target), strict=True):
                kept = min(old.shape[-2], new.shape[-2])  # ranks to copy; the others stay zero
                new[..., :kept, :].copy_(old[..., :kept, :])
        return after


def _slot_of(factors: Factors, slot: int) -> tuple[Tensor, Tensor]:
    """Return views of down_EPrD and up_ErN of one slot."""
    experts, parts = factors.num_experts, len(factors.widths)
    some = slice(slot * experts, (slot + 1) * experts)
    down = factors.down_SRD[some].view(experts, parts, factors.rank, -1)
    return down, factors.up_SrN[some]
