"""Each rank reads its own part of a checkpoint: the parts of all ranks together are the whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moiety_engine.distribution.layout import Layout, Seat
from moiety_engine.errors import InvalidConfig
from moiety_engine.model.checkpoint import load
from moiety_engine.model.families import read_spec
from moiety_engine.model.residence import named_tensors

CPU = torch.device("cpu")
LAYOUTS = [Layout(tp=2), Layout(tp=2, ep=2), Layout(tp=4, ep=2), Layout(dp=2, tp=2, ep=2), Layout(dp=2, ep=2)]
LAYOUTS += [Layout(dp=2, ep=2, expert_ranks=2), Layout(tp=2, expert_ranks=2)]


def weights_of(folder: Path, seat: Seat | None = None) -> list[tuple[str, Tensor]]:
    given = {} if seat is None else {"seat": seat}
    weights = load(folder, read_spec(folder), device=CPU, dtype=torch.float32, **given)
    return list(named_tensors(weights))


def total(tensor: Tensor) -> Tensor:
    """The sum, and the sum of squares, which a part of another tensor would not have."""
    wide = tensor.double()
    return torch.stack((wide.sum(), wide.square().sum()))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_parts_of_all_ranks_are_the_whole(checkpoint: Any, layout: Layout) -> None:
    try:
        ranks = [weights_of(checkpoint.folder, Seat(layout, rank)) for rank in range(layout.num_ranks)]
    except InvalidConfig as exc:
        assert any(option in str(exc) for option in ("--tp", "--ep", "dp-attention", "expert-ranks"))
        pytest.skip(f"this model cannot be divided so: {exc}")
    num_checked = 0
    for index, (name, whole) in enumerate(weights_of(checkpoint.folder)):
        parts = [rank[index][1] for rank in ranks]
        projects = name.endswith(("qkv_CD", "qkv_bias_C", "input_CD", "input_bias_C"))
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


def test_slots_of_several_experts_and_stacks_of_them_are_read_from_where_they_are(make_checkpoint: Any) -> None:
    layout = Layout(tp=4, ep=2, redundant_experts=8)  # each rank has all, the second one's half first
    for variant in ("qwen3_moe", "gpt_oss"):
        folder = make_checkpoint(variant).folder
        first, second = (dict(weights_of(folder, Seat(layout, rank))) for rank in (0, 2))
        of_experts = [name for name in first if name.endswith(("E2FD", "_EDF", "E2F", "_ED")) and "router" not in name]
        assert len(of_experts) >= 2
        for name in of_experts:
            assert first[name].shape[0] == 8
            assert torch.equal(first[name].roll(4, 0), second[name]), name


OF_EXPERTS = ("gate_up_E2FD", "down_EDF", "gate_up_bias_E2F", "down_bias_ED")


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_a_rank_has_either_its_share_of_the_experts_and_nothing_else_or_none_of_them(
    make_checkpoint: Any, family: str
) -> None:
    def sizes_of(seat: Seat | None = None) -> tuple[int, int]:
        """Bytes of experts, and of all else."""
        named = weights_of(make_checkpoint(family).folder, seat)
        experts = sum(tensor.nbytes for name, tensor in named if name.endswith(OF_EXPERTS))
        return experts, sum(tensor.nbytes for _, tensor in named) - experts

    layout = Layout(dp=2, ep=2, expert_ranks=2)
    experts, rest = sizes_of()
    assert [sizes_of(Seat(layout, rank)) for rank in range(4)] == [(0, rest)] * 2 + [(experts // 2, 0)] * 2
