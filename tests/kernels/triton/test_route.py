"""The Triton kernels of routing agree with their definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moiety_kernels.route import kernel, reference

ROUTINGS = ["even", "skewed", "one expert", "none to some"]


def some_experts(routing: str, tokens: int, num_experts: int, top_k: int, device: str) -> torch.Tensor:
    share = torch.ones(num_experts)
    if routing == "skewed":
        share = 1 / torch.arange(1, num_experts + 1).float() ** 1.2
    if routing == "one expert":
        return torch.full((tokens, top_k), num_experts - 1, dtype=torch.int32, device=device)
    if routing == "none to some":
        share[: num_experts // 2] = 0
    chosen = torch.multinomial(share, tokens * top_k + 1, replacement=True)[:-1]
    return chosen.view(tokens, top_k).int().to(device)


def check_group(kernels: Any, routing: str, tokens: int, num_experts: int, device: str, **sizes: int) -> None:
    expert = some_experts(routing, tokens, num_experts, 3, device)
    ours, theirs = kernels.group(expert, num_experts, 16, **sizes), reference.group(expert, num_experts, 16)
    for name in ("order_R", "starts_E1", "num_tiles_1", "tiles_N2"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(("tokens", "num_experts"), [(0, 3), (1, 8), (7, 3), (65, 20), (1400, 3)])
def test_few_pairs_are_grouped(routing: str, tokens: int, num_experts: int, device: str) -> None:
    check_group(kernel, routing, tokens, num_experts, device)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(("tokens", "num_experts"), [(1, 8), (65, 3), (150, 20)])
def test_many_pairs_are_grouped_block_by_block(routing: str, tokens: int, num_experts: int, device: str) -> None:
    check_group(kernel, routing, tokens, num_experts, device, few_pairs=0, block=64)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("place + tl.cumsum(mine, axis=0) - 1", "place + tl.sum(mine, axis=0) - 1"),
        ("(counts + TILE_ROWS - 1) // TILE_ROWS", "counts // TILE_ROWS"),
        ("row + i_tile * TILE_ROWS", "row + i_tile"),
        ("tl.cumsum(counts, axis=0) - counts + before", "tl.cumsum(counts, axis=0) - counts"),
        ("tl.sort(expert * BLOCK + i_here)", "tl.sort(expert * BLOCK + BLOCK - 1 - i_here)"),
    ],
)
def test_a_mutant_that_groups_is_found(mutated: Any, noticed: Any, old: str, new: str, device: str) -> None:
    mutant = mutated(kernel, old, new)
    with pytest.raises(noticed):
        check_group(mutant, "skewed", 65, 3, device)
        check_group(mutant, "skewed", 65, 3, device, few_pairs=0, block=64)
