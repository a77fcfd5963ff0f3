"""Each rank reads its own part of a checkpoint: the parts of all ranks together are the whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moiety_engine.distribution.collectives import SINGLE_RANK_GROUPS
from moiety_engine.distribution.layout import Layout, RankPosition, without
from moiety_engine.errors import InvalidConfig
from moiety_engine.model.checkpoint import load
from moiety_engine.model.families import read_spec
from moiety_engine.model.loading import load_share
from moiety_engine.model.spec import MoeSpec
from moiety_engine.model.tensor_shards import check_cuts, own_places, own_spec, whole_places
from moiety_engine.model.weight_offload import named_tensors
from moiety_engine.model.weights import allocate, products_of
from moiety_engine.quantize.writing import write_quantized
from moiety_kernels.quantization import INT4, MXFP4, WeightFormat, dequantize
from moiety_kernels.quantization.weight import GPU_PACK

CPU = torch.device("cpu")
LAYOUTS = [Layout(tp=2), Layout(tp=2, ep=2), Layout(tp=4, ep=2), Layout(dp=2, tp=2, ep=2), Layout(dp=2, ep=2)]
LAYOUTS += [Layout(dp=2, ep=2, ffn_ranks=2), Layout(tp=2, ffn_ranks=2)]


def weights_of(folder: Path, rank_position: RankPosition | None = None) -> list[tuple[str, Tensor]]:
    given = {} if rank_position is None else {"rank_position": rank_position}
    weights = load(folder, read_spec(folder), device=CPU, dtype=torch.float32, **given)
    return list(named_tensors(weights))


def total(tensor: Tensor) -> Tensor:
    """Return the sum and the sum of squares, which differ for a part of another tensor."""
    wide = tensor.double()
    return torch.stack((wide.sum(), wide.square().sum()))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_parts_of_all_ranks_are_the_whole(checkpoint: Any, layout: Layout) -> None:
    try:
        ranks = [weights_of(checkpoint.folder, RankPosition(layout, rank)) for rank in range(layout.num_ranks)]
    except InvalidConfig as exc:
        assert any(option in str(exc) for option in ("--tp", "--ep", "dp-attention", "ffn-ranks"))
        pytest.skip(f"this model cannot be divided so: {exc}")
    num_checked = 0
    for index, (name, whole) in enumerate(weights_of(checkpoint.folder)):
        parts = [rank[index][1] for rank in ranks]
        projects = name.endswith(("qkv_CD", "qkv_bias_C", "input_CD", "input_bias_C", "low_rank_GD"))
        common = projects and parts[0].shape[0] * layout.tp > whole.shape[0]  # some rows are on several ranks
        if common or all(torch.equal(part, whole) for part in parts):
            continue
        copies = sum(part.numel() for part in parts) / whole.numel()
        if name.endswith("down_bias_ED"):
            copies = 1  # of each expert one piece adds it
        elif name.startswith(("embedding", "head")) or name.endswith(("output_bias_D", "down_bias_D")):
            copies = layout.dp
        if name.startswith(("embedding", "head")):  # rows beyond the vocabulary stand for no token
            parts = [part[: len(whole) - len(part) * (rank % layout.tp)] for rank, part in enumerate(parts)]
        torch.testing.assert_close(sum(map(total, parts)), copies * total(whole), rtol=1e-9, atol=1e-9, msg=name)
        num_checked += 1
    assert num_checked > 0


def test_products_in_few_bits_are_cut_with_their_scales_or_not_at_all(make_checkpoint: Any, tmp_path: Path) -> None:
    folder = tmp_path / "narrow"
    write_quantized(make_checkpoint("mixtral").folder, folder, INT4, lambda *_: None)

    def products(rank_position: RankPosition, form: WeightFormat | None) -> list[Any]:
        weights = load(
            folder, read_spec(folder), device=CPU, dtype=torch.float32, form=form, rank_position=rank_position
        )
        return list(products_of(weights))

    for layout in (Layout(tp=2), Layout(tp=2, ep=2), Layout(dp=2, tp=2, ep=2)):
        for rank in range(layout.num_ranks):
            rank_position = RankPosition(layout, rank)
            for kept, wide in zip(products(rank_position, INT4), products(rank_position, None), strict=True):
                assert torch.equal(dequantize(kept), wide), "the very numbers and scales of the checkpoint"
    four = replace(SINGLE_RANK_GROUPS, rank_position=RankPosition(Layout(tp=4, ep=4)))
    with pytest.raises(InvalidConfig, match="--tp 4 cuts the model's 64 columns of all heads into pieces of 16"):
        load_share(folder, device="cpu", dtype="bfloat16", ranks=four)


def test_scales_of_larger_groups_are_repeated_for_kernels_that_read_groups_of_32(
    make_checkpoint: Any, tmp_path: Path
) -> None:
    folder, form = tmp_path / "narrow", replace(INT4, pack=GPU_PACK)
    write_quantized(make_checkpoint("mixtral").folder, folder, WeightFormat("int4", 4, 64), lambda *_: None)
    spec = read_spec(folder)
    assert form.is_stored_as(spec.weight_format)
    kept, wide = (
        list[Any](products_of(load(folder, spec, device=CPU, dtype=torch.float32, form=one))) for one in (form, None)
    )
    for one, plain in zip(kept, wide, strict=True):
        assert one.scales_NG.shape[-1] == plain.shape[-1] // 32
        assert torch.equal(dequantize(one), plain)
    assert not form.is_stored_as(WeightFormat("int4", 4, 64, offsets=True))
    assert not WeightFormat("int4", 4, 64).is_stored_as(INT4)


BLOCKS = WeightFormat("fp8", 8, 128, floating=True, rows=128)


@pytest.mark.parametrize(
    ("form", "width", "layout", "possible"),
    [
        (BLOCKS, 768, Layout(tp=4), "1, 2, 3, 6"),
        (BLOCKS, 1408, Layout(tp=2), "1, 11"),
        (INT4, 96, Layout(tp=4, ep=2), "1, 3"),
        (MXFP4, 2880, Layout(dp=4, tp=1), "1, 2, 3, 5, 6"),
        (replace(MXFP4, pack=GPU_PACK), 2880, Layout(tp=2), "1, 3, 5, 9"),
    ],
    ids=str,
)
def test_experts_that_would_be_cut_inside_of_a_block_are_refused_with_what_can_be_had(
    make_checkpoint: Any, form: WeightFormat, width: int, layout: Layout, possible: str
) -> None:
    spec = read_spec(make_checkpoint("mixtral").folder)
    layer = spec.layers[0]
    assert layer.ffn is not None
    attention, ffn = replace(layer.attention, head_dim=256), replace(layer.ffn, width=width)
    wider = replace(spec, layers=(replace(layer, attention=attention, ffn=ffn),))
    with pytest.raises(InvalidConfig, match=f"{width} columns of an expert.* numbers of pieces: {possible}"):
        check_cuts(form, wider, layout)
    check_cuts(form, wider, replace(layout, ep=layout.stage_size))
    check_cuts(BLOCKS, spec, Layout(tp=2))  # of 64 columns in one block, each half lies inside


def test_slots_of_several_experts_and_stacks_of_them_are_read_from_where_they_are(make_checkpoint: Any) -> None:
    layout = Layout(tp=4, ep=2, redundant_experts=8)  # each rank has all, the second one's half first
    for variant in ("qwen3_moe", "gpt_oss"):
        folder = make_checkpoint(variant).folder
        first, second = (dict(weights_of(folder, RankPosition(layout, rank))) for rank in (0, 2))
        of_experts = [name for name in first if name.endswith(("E2FD", "_EDF", "E2F", "_ED")) and "router" not in name]
        assert len(of_experts) >= 2
        for name in of_experts:
            assert first[name].shape[0] == 8
            assert torch.equal(first[name].roll(4, 0), second[name]), name


def test_each_slot_of_ranks_that_do_without_another_is_filled_and_none_would_stay_empty(make_checkpoint: Any) -> None:
    folder = make_checkpoint("deepseek_v3").folder
    whole = dict(weights_of(folder))
    layout = without(Layout(dp=4, ep=4, redundant_experts=16), (3,))
    rank_positions = [RankPosition(layout, rank) for rank in range(3)]
    for rank_position in rank_positions:
        held = list(rank_position.slots_of(16))
        for name, tensor in weights_of(folder, rank_position):
            if name.endswith(OF_EXPERTS):
                assert torch.equal(tensor, whole[name][held]), name
    spec = read_spec(folder)
    own = own_spec(spec, rank_positions[0])
    *layers, last = own.layers
    assert isinstance(last.ffn, MoeSpec) and last.ffn.held is not None
    twice = replace(own, layers=(*layers, replace(last, ffn=replace(last.ffn, held=(5,) * len(last.ffn.held)))))
    weights = allocate(twice, device=CPU, dtype=torch.float32)
    with pytest.raises(AssertionError, match=r"experts\.5\..* must be cut like its counterpart"):
        own_places(twice, weights, rank_positions[0], 0, whole_places(spec, set()))


OF_EXPERTS = ("gate_up_E2FD", "down_EDF", "gate_up_bias_E2F", "down_bias_ED")


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_a_rank_has_either_its_share_of_the_experts_and_nothing_else_or_none_of_them(
    make_checkpoint: Any, family: str
) -> None:
    def sizes_of(rank_position: RankPosition | None = None) -> tuple[int, int]:
        """Return the bytes of experts and of everything else."""
        named = weights_of(make_checkpoint(family).folder, rank_position)
        experts = sum(tensor.nbytes for name, tensor in named if name.endswith(OF_EXPERTS))
        return experts, sum(tensor.nbytes for _, tensor in named) - experts

    layout = Layout(dp=2, ep=2, ffn_ranks=2)
    experts, rest = sizes_of()
    assert [sizes_of(RankPosition(layout, rank)) for rank in range(4)] == [(0, rest)] * 2 + [(experts // 2, 0)] * 2
