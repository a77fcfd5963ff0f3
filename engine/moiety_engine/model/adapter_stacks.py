"""LoRA factors of all loaded adapters, by layer and product, with one slot per adapter.

S slots, E experts, P parts of a fused product, r rank, D input and N output width.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import torch

from moiety_engine.model.spec import AttentionSpec, MoeSpec
from moiety_kernels.low_rank import Factors, FeedForwardFactors, add_low_rank

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

    from moiety_engine.model.spec import LayerSpec, ModelSpec


class Product(StrEnum):
    """Matrix product of a layer that an adapter may modify."""

    QKV = "qkv"
    OUTPUT_GATE = "output_gate"
    OUTPUT = "output"
    GATE_UP = "gate_up"
    DOWN = "down"


Key = tuple[int, Product]  # layer, product


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
    """One adapter in host memory, float32: down_EPrD and up_ErN of each product; up_ErN includes the scale."""

    rank: int
    factors: Mapping[Key, tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class AdaptedRows:
    """Adapter slot of each token of a step, int64; -1 for no adapter."""

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
        gate_up, down = self.of.get(Product.GATE_UP), self.of.get(Product.DOWN)
        if rows is None or (gate_up is None and down is None):
            return None
        return FeedForwardFactors(rows.slot_T, gate_up, down)


def form_of(layer: LayerSpec, product: Product, hidden_size: int) -> Form | None:
    """Return the dimensions of a layer's product; None if the product does not exist or takes no adapters."""
    if product in (Product.QKV, Product.OUTPUT_GATE, Product.OUTPUT):
        attention = layer.attention
        return _form_of_attention(attention, product, hidden_size) if isinstance(attention, AttentionSpec) else None
    ffn = layer.ffn
    if ffn is None or (isinstance(ffn, MoeSpec) and ffn.normed):
        return None  # the names of the dense feed-forward beside the experts are those of another model's experts
    if not ffn.activation.gated:
        return None
    experts = ffn.num_experts if isinstance(ffn, MoeSpec) else 1
    if product is Product.GATE_UP:
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


class AdapterStacks:
    """Owner of the device memory of adapters. Used between steps only.

    All slots have the same products and the same rank; those that an adapter lacks are zero.
    """

    def __init__(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> None:
        self.layers = [LayerFactors() for _ in spec.layers]
        self.num_slots = self.rank = 0
        self.keys: frozenset[Key] = frozenset()
        self.dtype = dtype  # of all factors
        self._spec, self._device = spec, device

    def num_bytes(self, keys: Iterable[Key], num_slots: int, rank: int) -> int:
        """Return the memory of `num_slots` slots, in bytes."""
        return sum(self._form(key).values(rank) for key in keys) * num_slots * self.dtype.itemsize

    @torch.inference_mode()
    def lay_out(self, keys: frozenset[Key], num_slots: int, rank: int, moves: Mapping[int, int]) -> None:
        """Reallocate the slots with this layout, and move old slots to new ones as `moves` says.

        Other old slots are discarded. A new slot that nothing moves to holds zeros.
        """
        for index, layer in enumerate(self.layers):
            for product in Product:
                if (index, product) in keys:
                    layer.of[product] = self._moved(
                        layer.of.get(product), self._form((index, product)), num_slots, rank, moves
                    )
                else:
                    layer.of.pop(product, None)
        self.keys, self.num_slots, self.rank = keys, num_slots, rank

    @torch.inference_mode()
    def fill(self, slot: int, weights: AdapterWeights) -> None:
        """Write an adapter into a slot; the layout must be large enough."""
        for index, product in self.keys:
            factors = self.layers[index].of[product]
            down_EPRD, up_ERN = _slot_of(factors, slot)
            down_EPRD.zero_()
            up_ERN.zero_()
            own = weights.factors.get((index, product))
            if own is not None:
                down_EPRD[:, :, : weights.rank].copy_(own[0])
                up_ERN[:, : weights.rank].copy_(own[1])

    def _form(self, key: Key) -> Form:
        form = form_of(self._spec.layers[key[0]], key[1], self._spec.hidden_size)
        assert form is not None, "what an adapter has was checked when it was read"
        return form

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
