"""Products with adapters equal those with merged weights, in every implementation, for odd ranks and rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moiety_kernels.checks import KernelInputError
from moiety_kernels.low_rank import Factors, FeedForwardFactors, add_low_rank
from moiety_kernels.low_rank import reference as low_rank_reference
from moiety_kernels.moe import SILU, dense_glu, experts
from moiety_kernels.moe import adapted as experts_adapted
from moiety_kernels.moe.reference import experts as experts_reference

SLOTS = 3


@pytest.fixture(autouse=True)
def same_numbers_every_time() -> None:
    torch.manual_seed(0)


def make_factors(width: int, widths: tuple[int, ...], rank: int, num_experts: int = 1) -> Factors:
    places = SLOTS * num_experts
    down = torch.randn(places, len(widths) * rank, width) * width**-0.5
    return Factors(down, torch.randn(places, rank, sum(widths)) * rank**-0.5, widths, num_experts)


def merged(weight: Tensor, factors: Factors, place: int) -> Tensor:
    """Return weight + up · down for each part."""
    down = factors.down_SRD[place].split(factors.rank)
    up = factors.up_SrN[place].split(factors.widths, dim=1)
    return weight + torch.cat([u.T @ d for u, d in zip(up, down, strict=True)])


@pytest.mark.parametrize("rank", [4, 16, 12])
@pytest.mark.parametrize(("width", "widths"), [(64, (32, 16, 16)), (48, (80,)), (160, (64, 64)), (50, (20, 12))])
@pytest.mark.parametrize("rows", [1, 5, 70])
def test_each_row_gets_the_product_of_its_own_merged_weight(
    rows: int, width: int, widths: tuple[int, ...], rank: int
) -> None:
    factors, x, weight = make_factors(width, widths, rank), torch.randn(rows, width), torch.randn(sum(widths), width)
    slot_T = torch.randint(-1, SLOTS, (rows,))
    out = x @ weight.T
    expected = torch.stack(
        [row @ (weight if slot < 0 else merged(weight, factors, slot)).T for row, slot in zip(x, slot_T, strict=True)]
    )
    add_low_rank(out, x, factors, slot_T)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    by_definition = x @ weight.T
    low_rank_reference.add(by_definition, x, factors, slot_T)
    torch.testing.assert_close(by_definition, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width", "hidden"), [(1, 64, 32), (9, 64, 32), (130, 48, 80), (6, 40, 24)])
def test_experts_with_adapters_are_those_of_merged_weights(
    rows: int, width: int, hidden: int, dtype: torch.dtype
) -> None:
    num_experts, top_k, rank = 5, 2, 4
    up = (torch.randn(num_experts, 2 * hidden, width) * width**-0.5).to(dtype)
    down = (torch.randn(num_experts, width, hidden) * hidden**-0.5).to(dtype)
    x, weight = torch.randn(rows, width).bfloat16().float(), torch.rand(rows, top_k)
    chosen = torch.stack([torch.randperm(num_experts)[:top_k] for _ in range(rows)]).to(torch.int32)
    chosen[0, 0] = -1
    slot_T = torch.randint(-1, SLOTS, (rows,))
    of_up = make_factors(width, (hidden, hidden), rank, num_experts)
    of_down = make_factors(hidden, (width,), rank, num_experts)
    expected = []
    for t in range(rows):
        e_up, e_down, slot = up.float(), down.float(), int(slot_T[t])
        if slot >= 0:
            first = slot * num_experts
            e_up = torch.stack([merged(e_up[e], of_up, first + e) for e in range(num_experts)])
            e_down = torch.stack([merged(e_down[e], of_down, first + e) for e in range(num_experts)])
        expected.append(experts_reference(x[t : t + 1], weight[t : t + 1], chosen[t : t + 1], e_up, e_down))
    adapters = FeedForwardFactors(slot_T, of_up, of_down)
    bound = {"rtol": 1e-4, "atol": 1e-4} if dtype is torch.float32 else {"rtol": 3e-2, "atol": 3e-2}
    computed = experts(x, weight, chosen, up, down, adapters=adapters)
    torch.testing.assert_close(computed, torch.cat(expected), **bound)
    in_torch = experts_adapted.experts(x, weight, chosen, up, down, SILU, None, None, adapters)
    torch.testing.assert_close(in_torch, torch.cat(expected), **bound)


@pytest.mark.parametrize(("width", "hidden"), [(64, 32), (40, 24)])
def test_a_dense_feed_forward_takes_adapters_of_either_product(width: int, hidden: int) -> None:
    up, down = torch.randn(2 * hidden, width) * 0.1, torch.randn(width, hidden) * 0.1
    x, slot_T = torch.randn(7, width), torch.tensor([0, -1, 2, 1, 1, -1, 0])
    of_up, of_down = make_factors(width, (hidden, hidden), 4), make_factors(hidden, (width,), 4)
    for one, other in ((of_up, None), (None, of_down), (of_up, of_down)):
        out = dense_glu(x, up, down, adapters=FeedForwardFactors(slot_T, one, other))
        for t, slot in enumerate(slot_T.tolist()):
            own_up = up if one is None or slot < 0 else merged(up, one, slot)
            own_down = down if other is None or slot < 0 else merged(down, other, slot)
            torch.testing.assert_close(out[t : t + 1], dense_glu(x[t : t + 1], own_up, own_down), rtol=1e-4, atol=1e-4)


def test_a_rows_bits_do_not_depend_on_its_neighbours() -> None:
    factors, x = make_factors(64, (32, 32), 8), torch.randn(40, 64)
    slot_T = torch.arange(40) % SLOTS
    together = torch.zeros(40, 64)
    add_low_rank(together, x, factors, slot_T)
    for t in (0, 7, 39):
        alone = torch.zeros(1, 64)
        add_low_rank(alone, x[t : t + 1], factors, slot_T[t : t + 1])
        assert torch.equal(alone[0], together[t])


def test_factors_of_another_width_are_refused() -> None:
    factors = make_factors(64, (32,), 4)
    with pytest.raises(KernelInputError, match="down has shape"):
        add_low_rank(torch.zeros(2, 32), torch.zeros(2, 48), factors, torch.zeros(2, dtype=torch.int64))
