"""Each rank's part of an adapter is that of the weights which the adapter modifies."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moiety_engine.adapters.dummy import ATTENTION, write_adapter
from moiety_engine.adapters.peft import TENSORS, read_adapter
from moiety_engine.distribution.collectives import SINGLE_RANK_GROUPS
from moiety_engine.distribution.layout import Layout, RankPosition
from moiety_engine.errors import InvalidConfig
from moiety_engine.model.adapter_modules import rank_factors
from moiety_engine.model.adapter_stacks import AdapterStacks, Key, Product
from moiety_engine.model.checkpoint import load
from moiety_engine.model.families import read_spec
from moiety_engine.model.spec import ModelSpec
from moiety_engine.model.weights import AttentionWeights, LayerWeights, MoeWeights
from moiety_engine.moe.expert_slots import ExpertSlots
from moiety_engine.runner.adapter_loading import AdapterArranger
from moiety_placement.transition import Write

CPU = torch.device("cpu")
LAYOUTS = [Layout(tp=2), Layout(tp=2, ep=2), Layout(dp=2, ep=2), Layout(pp=2), Layout(tp=2, ffn_ranks=2, ep=2)]
LAYOUTS += [Layout(tp=4), Layout(dp=2, tp=2, ep=2, redundant_experts=2)]
NAMES = ("gate_proj", "up_proj", "down_proj")
VARIANTS = {
    "qwen3_moe": NAMES,
    "mixtral": ("w1", "w2", "w3"),
    "qwen3_next": (),  # gates of attention's output are projected with the queries
    "dbrx": ("Wqkv",),
    "laguna": ("g_proj",),
    "nemotron_h": (),
}


def change_of(checkpoint: Path, adapter: Path, into: Path) -> Path:
    """Write a checkpoint whose weights are what the adapter adds to them."""
    shutil.copytree(checkpoint, into)
    config = json.loads((adapter / "adapter_config.json").read_text())
    weights = {name: torch.zeros_like(one) for name, one in load_file(checkpoint / "model.safetensors").items()}
    factors = load_file(adapter / TENSORS)
    for name in [name for name in factors if name.endswith(".lora_A.weight")]:
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        up = factors[name.replace("lora_A", "lora_B")]
        weights[f"{module}.weight"] = (config["lora_alpha"] / config["r"] * up @ factors[name]).to(torch.float32)
    save_file(weights, into / "model.safetensors", metadata={"format": "pt"})
    return into


def weight_of(layer: LayerWeights, product: Product) -> Tensor:
    """Return a layer's weight of the product, [E, N, D]."""
    attention, ffn = layer.attention, layer.ffn
    if product in (Product.QKV, Product.OUTPUT_GATE, Product.OUTPUT):
        assert isinstance(attention, AttentionWeights)
        of = {Product.QKV: attention.qkv_CD, Product.OUTPUT_GATE: attention.gate_CD}
        found: Any = of.get(product, attention.output_DC)
    elif isinstance(ffn, MoeWeights):
        found = ffn.gate_up_E2FD if product is Product.GATE_UP else ffn.down_EDF
    else:
        assert ffn is not None
        found = ffn.gate_up_2FD if product is Product.GATE_UP else ffn.down_DF
    return found if found.dim() == 3 else found.unsqueeze(0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_factors_of_a_rank_are_its_part_of_what_the_adapter_adds(
    make_checkpoint: Any, tmp_path: Path, variant: str
) -> None:
    folder = make_checkpoint(variant).folder
    adapter = write_adapter(tmp_path / "adapter", folder, modules=(*ATTENTION, *VARIANTS[variant]), rank=3)
    spec = read_spec(folder)
    modules = read_adapter(adapter, spec, max_rank=8)
    change = change_of(folder, adapter, tmp_path / "change")
    products_of_whole = set(rank_factors(modules, spec).factors)
    num_checked = 0
    for layout in LAYOUTS:
        found: set[Key] = set()
        for rank in range(layout.num_ranks):
            position = RankPosition(layout, rank)
            try:
                weights = load(change, spec, device=CPU, dtype=torch.float32, rank_position=position)
            except InvalidConfig:  # this model cannot be divided so
                break
            part = rank_factors(modules, spec, position)
            first = position.layers_of(len(spec.layers)).start
            for (layer, product), (down_EPrD, up_ErN) in part.factors.items():
                weight_END = weight_of(weights.layers[layer - first], product)
                widths = [weight_END.shape[1]] if down_EPrD.shape[1] == 1 else None
                widths = widths or _widths(spec, position, (layer, product))
                ups = torch.split(up_ErN, widths, dim=2)
                added = [up.mT @ down_EPrD[:, place] for place, up in enumerate(ups)]
                torch.testing.assert_close(torch.cat(added, dim=1), weight_END, atol=1e-5, rtol=1e-4)
            found |= part.factors.keys()
        else:
            assert found == products_of_whole
            num_checked += 1
    assert num_checked >= 2


def _widths(spec: Any, position: RankPosition, key: Key) -> list[int]:
    """Return the widths of the parts of a product on the rank."""
    form = AdapterStacks(spec, position, CPU, torch.float32)._forms.of(key)
    assert form is not None
    return list(form.widths)


def test_slots_that_hold_other_experts_get_the_factors_of_these(make_checkpoint: Any, tmp_path: Path) -> None:
    folder = make_checkpoint("mixtral").folder
    spec = read_spec(folder)
    modules = read_adapter(write_adapter(tmp_path / "adapter", folder, modules=VARIANTS["mixtral"]), spec, max_rank=8)
    whole = rank_factors(modules, spec).factors
    moved = rank_factors(modules, spec, RankPosition(Layout(dp=2, ep=2), 1), lambda _: (3, 0, 3)).factors
    assert whole.keys() == moved.keys()
    for key, (down, up) in moved.items():
        assert torch.equal(down, whole[key][0][[3, 0, 3]])
        assert torch.equal(up, whole[key][1][[3, 0, 3]])


class Share:
    """Part of a model on the second of two ranks with experts, as far as adapters are concerned."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.ranks = replace(SINGLE_RANK_GROUPS, rank_position=RankPosition(Layout(dp=2, ep=2), 1))
        self.adapters = AdapterStacks(spec, self.ranks.rank_position, CPU, torch.float32)
        held = range(8)
        self.slots = [ExpertSlots(held, len(held), num_parts=2, own_part=1, device=CPU) for _ in spec.layers]

    def slots_of(self, layer: int) -> ExpertSlots:
        return self.slots[layer]


@pytest.mark.parametrize("moves", [True, False])
def test_experts_that_move_while_an_adapter_is_arranged_get_its_factors(
    make_checkpoint: Any, tmp_path: Path, moves: bool
) -> None:
    folder = make_checkpoint("mixtral").folder
    spec = read_spec(folder)
    modules = read_adapter(write_adapter(tmp_path / "adapter", folder, modules=VARIANTS["mixtral"]), spec, max_rank=8)
    whole = rank_factors(modules, spec).factors
    share: Any = Share(spec)
    share.adapters.lay_out(frozenset(whole), 1, modules.rank, {})
    arranger = AdapterArranger(share)
    arranger.begin(7, modules)
    if moves:
        share.slots[0].write([Write(slot=4, source=0, expert=0), Write(slot=0, source=4, expert=4)])
    arranger.fill(7, 0)
    arranger.begin(8, modules)
    arranger.drop(8)
    arranger.drop(8)
    arranger.close()
    for (layer, product), (_, up_ErN) in whole.items():
        expected = [0 if moves and layer == 0 else 4, 5, 6, 7]
        assert torch.equal(share.adapters.layers[layer].of[product].up_SrN, up_ErN[expected])


def test_memory_for_adapters_is_that_of_the_rank_that_needs_most(make_checkpoint: Any) -> None:
    spec = read_spec(make_checkpoint("mixtral").folder)
    keys: set[Key] = {(layer, product) for layer in range(len(spec.layers)) for product in Product}
    keys = {key for key in keys if key[1] is not Product.OUTPUT_GATE}
    last = {key for key in keys if key[0] == len(spec.layers) - 1}

    def num_bytes(layout: Layout, some: set[Key], rank: int = 0) -> int:
        return AdapterStacks(spec, RankPosition(layout, rank), CPU, torch.float32).num_bytes(some, 2, 4)

    whole = num_bytes(Layout(), keys)
    assert num_bytes(Layout(pp=2), last) == num_bytes(Layout(), last)  # although the first rank has none of these
    assert whole / 2 < num_bytes(Layout(tp=2), keys) < whole
    of_experts = {key for key in keys if key[1] in (Product.GATE_UP, Product.DOWN)}
    apart = Layout(dp=2, ep=2, ffn_ranks=2)
    assert num_bytes(apart, of_experts) == num_bytes(Layout(), of_experts) / 2
    stacks = AdapterStacks(spec, RankPosition(apart, 0), CPU, torch.float32)
    stacks.lay_out(frozenset(keys), 2, 4, {})
    assert {product for layer in stacks.layers for product in layer.of} == {Product.QKV, Product.OUTPUT}
