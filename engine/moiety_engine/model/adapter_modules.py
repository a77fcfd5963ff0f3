"""LoRA factors by module of the checkpoint, and their arrangement as a rank's factors of products.

A module is a projection as the checkpoint names it. A rank has the rows of B that belong to its rows of a weight, and
the columns of A that belong to its columns of a weight; the sum over ranks then contains each adapter once.

E experts of the rank, P parts of a fused product, r rank of the adapter, D input and N output width.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from moiety_engine.distribution.layout import SINGLE_RANK
from moiety_engine.errors import AdapterError
from moiety_engine.model.adapter_stacks import AdapterWeights, Product, RankForms, form_of
from moiety_engine.model.names import placements
from moiety_engine.model.names.sublayers import stored_prefixes
from moiety_engine.model.names.tensor_mapping import TensorMapping, whole
from moiety_engine.model.spec import AttentionSpec, MoeSpec
from moiety_engine.model.tensor_shards import own_places, own_range, own_spec, whole_places
from moiety_engine.model.weights import AttentionWeights, DenseWeights, ModelWeights, MoeWeights, allocate

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from moiety_engine.distribution.layout import RankPosition
    from moiety_engine.model.adapter_stacks import Form, Key
    from moiety_engine.model.names.tensor_mapping import Shares
    from moiety_engine.model.spec import LayerSpec, ModelSpec

Module = tuple[int, str]  # layer of the whole model, name within the layer in this engine's form

MODULE = re.compile(
    r"(?:self_attn\.(q|k|v|o|g|qkv)_proj|mlp\.(?:(shared)_experts\.|experts\.(\d{1,6})\.)?(gate|up|down)_proj)"
)
_FUSED = "self_attn.qkv_proj"
_PLACES: dict[str, tuple[Product, int | slice]] = {  # product of a module's rows, and its part, or all of its parts
    "qkv": (Product.QKV, slice(None)),
    "q": (Product.QKV, 0),
    "k": (Product.QKV, 1),
    "v": (Product.QKV, 2),
    "o": (Product.OUTPUT, 0),
    "g": (Product.OUTPUT_GATE, 0),
    "gate": (Product.GATE_UP, 0),
    "up": (Product.GATE_UP, 1),
    "down": (Product.DOWN, 0),
    "shared gate": (Product.SHARED_GATE_UP, 0),
    "shared up": (Product.SHARED_GATE_UP, 1),
    "shared down": (Product.SHARED_DOWN, 0),
}


@dataclass(frozen=True, slots=True)
class AdapterModules:
    """One adapter in host memory: A [r, D] and B [N, r] of each module; B includes the scale."""

    rank: int
    factors: Mapping[Module, tuple[Tensor, Tensor]]


def module_name(module: Module) -> str:
    return f"layers.{module[0]}.{module[1]}"


def products_of_modules(modules: AdapterModules, spec: ModelSpec) -> dict[Key, list[Module]]:
    """Return the modules of each product that the adapter modifies, of all ranks.

    Raises AdapterError for a product that takes no adapters.
    """
    found: dict[Key, list[Module]] = defaultdict(list)
    for module in modules.factors:
        for product in _products_of(spec, module):
            found[module[0], product].append(module)
    for (layer, product), of_product in found.items():
        if form_of(spec.layers[layer], product, spec.hidden_size) is None:
            raise AdapterError(
                f"adapters on {module_name(of_product[0])} of a {spec.family} model are not supported: train without it"
            )
    return dict(found)


def rank_factors(
    modules: AdapterModules,
    spec: ModelSpec,
    rank_position: RankPosition = SINGLE_RANK,
    held_by: Callable[[int], Sequence[int] | None] = lambda _: None,
) -> AdapterWeights:
    """Return the rank's factors of the products as this engine fuses them.

    `spec`: that of the whole model. `held_by`: the experts in the rank's slots of a layer, by the layer's index in the
    model; None: those of the start. The position of output rows follows from the checkpoint's tensor mapping: an
    [outputs, rank] matrix is placed like the weight. Raises AdapterError if the adapter does not fit the whole model.
    """
    found = products_of_modules(modules, spec)
    arrangement = _Arrangement(modules, spec, rank_position, held_by)
    for (layer, product), of_product in found.items():
        form = form_of(spec.layers[layer], product, spec.hidden_size)
        assert form is not None, "checked above"
        for module in of_product:
            arrangement.check(module, form)
    factors = {key: arrangement.factors(key, of_product) for key, of_product in found.items()}
    return AdapterWeights(modules.rank, {key: one for key, one in factors.items() if one is not None})


class _Arrangement:
    """Arrangement of one adapter's matrices in the products of a rank."""

    def __init__(
        self,
        modules: AdapterModules,
        spec: ModelSpec,
        rank_position: RankPosition,
        held_by: Callable[[int], Sequence[int] | None],
    ) -> None:
        self._modules, self._spec, self._rank_position, self._rank = modules, spec, rank_position, modules.rank
        self._first_layer = rank_position.layers_of(len(spec.layers)).start
        own = own_spec(spec, rank_position)
        self._held = [self._experts_of(layer, held_by(self._first_layer + i)) for i, layer in enumerate(own.layers)]
        own = own if own is spec else replace(own, layers=tuple(map(_with_held, own.layers, self._held)))
        self._own, self._forms = own, RankForms(own, self._first_layer)
        self._outputs = allocate(
            own,
            device=torch.device("cpu"),
            dtype=torch.float32,
            product_dtype=torch.float32,
            groups=lambda _: modules.rank,
        )
        present = _block_names(spec)
        self._wholes: Mapping[str, TensorMapping | Shares]
        if own is spec:
            self._wholes = self._places = placements(spec, self._outputs, present)
        else:
            self._wholes = whole_places(spec, present, lambda _: modules.rank)
            self._places = own_places(own, self._outputs, rank_position, self._first_layer, self._wholes)

    @staticmethod
    def _experts_of(layer: LayerSpec, held: Sequence[int] | None) -> tuple[int, ...]:
        """Return the experts in the rank's slots of a layer; () for a layer without experts on the rank."""
        if not isinstance(layer.ffn, MoeSpec):
            return ()
        return tuple(held or layer.ffn.held or range(layer.ffn.num_held))

    def check(self, module: Module, form: Form) -> None:
        """Raise AdapterError unless the module's matrices have the shapes of the whole model. `form`: its product's."""
        down, up = self._modules.factors[module]
        place = self._wholes.get(_weight_name(self._spec, module))
        shape = None if place is None else place.shape
        if self._joins_rows_in_order(module):
            shape = (sum(form.widths), self._rank)
        if shape is None:
            raise AdapterError(
                f"the model has no module {module_name(module)}: check that the adapter was trained on this model"
            )
        if down.shape != (self._rank, form.width) or up.shape != shape:
            wanted = f"{(self._rank, form.width)} and {shape}"
            shapes = f"{tuple(down.shape)} and {tuple(up.shape)}"
            raise AdapterError(
                f"{module_name(module)} has factors of shapes {shapes}, but the model needs {wanted}: "
                "check that the adapter was trained on this model"
            )

    def factors(self, key: Key, modules: list[Module]) -> tuple[Tensor, Tensor] | None:
        """Return down_EPrD and up_ErN of a product; None if the rank has no part of it."""
        form = self._forms.of(key)
        if form is None:
            return None
        (layer, product), rank = key, self._rank
        of_whole = form_of(self._spec.layers[layer], product, self._spec.hidden_size)
        assert of_whole is not None, "a rank's part is that of a product"
        place = layer - self._first_layer
        is_moe = isinstance(self._own.layers[place].ffn, MoeSpec) and product in (Product.GATE_UP, Product.DOWN)
        held = tuple(dict.fromkeys(self._held[place])) if is_moe else (0,)
        local = {expert: index for index, expert in enumerate(held)}
        columns = own_range(of_whole.width, form.width, self._rank_position, of_experts=is_moe)
        up_ENr = _output_of(self._outputs, place, product)
        up_ENr.zero_()
        down_EPrD = torch.zeros(form.num_experts, len(form.widths), rank, form.width)
        for module in modules:
            own_product, part, expert = _place_of(module[1])
            if expert not in local:
                continue
            down, up = self._modules.factors[module]
            self._fill(module, up.float(), up_ENr, of_whole, form)
            down_EPrD[local[expert], part if product is own_product else 0] = down[:, columns].float()
        up_ErN = up_ENr.view(form.num_experts, -1, rank).mT.contiguous()
        if is_moe and held != self._held[place]:  # several slots hold one expert
            slots = [local[expert] for expert in self._held[place]]
            return down_EPrD[slots], up_ErN[slots]
        return down_EPrD, up_ErN

    def _fill(self, module: Module, up: Tensor, up_ENr: Tensor, of_whole: Form, form: Form) -> None:
        """Write the rank's rows of a module's B into the rows of its product."""
        if self._joins_rows_in_order(module):
            sections = zip(torch.split(up, list(of_whole.widths)), form.widths, strict=True)
            parts = [rows[own_range(len(rows), width, self._rank_position)] for rows, width in sections]
            whole(up_ENr).fill(torch.cat(parts))
        else:
            self._places[_weight_name(self._spec, module)].fill(up)

    def _joins_rows_in_order(self, module: Module) -> bool:
        return module[1] == _FUSED and _in_order(self._spec.layers[module[0]].attention)


def _with_held(layer: LayerSpec, held: tuple[int, ...]) -> LayerSpec:
    """Return a rank's layer with each of these experts once."""
    if not isinstance(layer.ffn, MoeSpec):
        return layer
    return replace(layer, ffn=replace(layer.ffn, held=tuple(dict.fromkeys(held))))


def _weight_name(spec: ModelSpec, module: Module) -> str:
    """Return the name of the module's weight among the placements of a model without a checkpoint."""
    index, name = module
    stored = f"{index}.{name}"
    if spec.block_starts:
        prefixes = stored_prefixes(spec, index)
        usual = next((one for one in prefixes if name.startswith(one)), None)
        stored = stored if usual is None else prefixes[usual] + name.removeprefix(usual)
    return f"model.layers.{stored}.weight"


def _block_names(spec: ModelSpec) -> set[str]:
    """Return prefixes of feed-forward tensors, by which placements use the engine's names of modules."""
    if not spec.block_starts:
        return {f"model.layers.{index}.mlp." for index in range(len(spec.layers))}
    prefixes = (stored_prefixes(spec, index).get("mlp.") for index in range(len(spec.layers)))
    return {f"model.layers.{stored}" for stored in prefixes if stored is not None}


def _in_order(attention: object) -> bool:
    """Return whether the rows of queries, keys and values are in the weight as a checkpoint would join them."""
    if not isinstance(attention, AttentionSpec) or attention.rope.interleaved:
        return False
    return attention.gate is None or not attention.gate.in_query_projection


def _place_of(module: str) -> tuple[Product, int | slice, int]:
    """Return the product, the part of it or all of its parts, and the expert of a module."""
    match = MODULE.fullmatch(module)
    assert match is not None, "unknown modules are rejected before"
    product, part = _PLACES[match[1] or f"{match[2] or ''} {match[4]}".strip()]
    return product, part, int(match[3] or 0)


def _products_of(spec: ModelSpec, module: Module) -> list[Product]:
    """Return the products that a module's rows belong to: queries, for instance, may be projected with a gate."""
    product, part, _ = _place_of(module[1])
    attention = spec.layers[module[0]].attention
    gate = attention.gate if isinstance(attention, AttentionSpec) else None
    with_gate = gate is not None and gate.in_query_projection and (product, part) == _PLACES["q"]
    return [product, Product.OUTPUT_GATE] if with_gate else [product]


def _output_of(outputs: ModelWeights, layer: int, product: Product) -> Tensor:
    attention, ffn = outputs.layers[layer].attention, outputs.layers[layer].ffn
    if product in (Product.QKV, Product.OUTPUT_GATE, Product.OUTPUT):
        assert isinstance(attention, AttentionWeights)
        of_attention = {Product.QKV: attention.qkv_CD, Product.OUTPUT_GATE: attention.gate_CD}
        found = of_attention.get(product, attention.output_DC)
    elif product in (Product.SHARED_GATE_UP, Product.SHARED_DOWN):
        assert isinstance(ffn, MoeWeights) and ffn.shared is not None
        found = ffn.shared.dense.gate_up_2FD if product is Product.SHARED_GATE_UP else ffn.shared.dense.down_DF
    elif isinstance(ffn, MoeWeights):
        found = ffn.gate_up_E2FD if product is Product.GATE_UP else ffn.down_EDF
    else:
        assert isinstance(ffn, DenseWeights)
        found = ffn.gate_up_2FD if product is Product.GATE_UP else ffn.down_DF
    assert isinstance(found, torch.Tensor)
    return found
