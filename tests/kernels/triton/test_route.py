"""The Triton kernels of routing agree with their definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.kernels.mutants import Edit, FailingMutant, mutants, mutants_by

from moiety_kernels.route import Groups, RoutingSpec, kernel, reference
from moiety_kernels.route.kernels import grouping
from moiety_kernels.route.spec import BIAS_SCORINGS

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


def assert_grouped_alike(kernels: Any, routing: str, tokens: int, num_experts: int, device: str, **sizes: int) -> None:
    expert = some_experts(routing, tokens, num_experts, 3, device)
    assert_same_groups(kernels.group(expert, num_experts, 4, **sizes), expert, num_experts)
    here = torch.where(expert == num_experts - 1, -1, expert)  # the last expert is elsewhere
    assert_same_groups(kernels.group(here, num_experts, 4, **sizes), here, num_experts)


def assert_same_groups(ours: Groups, expert: torch.Tensor, num_experts: int) -> None:
    theirs = reference.group(expert, num_experts, 4)
    for name in ("starts_E1", "num_tiles_1", "tiles_N2"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=0, atol=0, msg=name)
    num_pairs = int(theirs.starts_E1[-1])  # beyond these are pairs of experts that are elsewhere, in any order
    torch.testing.assert_close(ours.order_R[:num_pairs], theirs.order_R[:num_pairs], rtol=0, atol=0)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(("tokens", "num_experts"), [(0, 3), (1, 1), (1, 8), (65, 20), (1400, 3)])
def test_few_pairs_are_grouped(routing: str, tokens: int, num_experts: int, device: str) -> None:
    assert_grouped_alike(grouping, routing, tokens, num_experts, device)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(("tokens", "num_experts"), [(1, 8), (65, 3), (100, 20)])
def test_many_pairs_are_grouped_block_by_block(routing: str, tokens: int, num_experts: int, device: str) -> None:
    assert_grouped_alike(grouping, routing, tokens, num_experts, device, few_pairs=0, block=64)


@mutants(
    {
        "place + tl.cumsum(mine, axis=0) - 1": "place + tl.sum(mine, axis=0) - 1",
        "place + i_tile)\n        tl.store(p_tile, tl.full": "i_tile)\n        tl.store(p_tile, tl.full",
        "row + i_tile * TILE_ROWS": "row + i_tile",
        "tl.cumsum(counts, axis=0) - counts + before": "tl.cumsum(counts, axis=0) - counts",
        "tl.sort(expert * BLOCK + i_here)": "tl.sort(expert * BLOCK + BLOCK - 1 - i_here)",
    }
)
def test_a_mutant_that_groups_is_found(failing_mutant: FailingMutant, edit: Edit, device: str) -> None:
    with failing_mutant(grouping, edit) as mutant:
        assert_grouped_alike(mutant, "skewed", 65, 3, device)
        assert_grouped_alike(mutant, "skewed", 65, 3, device, few_pairs=0, block=64)


SPECS = {
    "softmax": RoutingSpec(20, 3, renormalize=True),
    "softmax as it is": RoutingSpec(3, 1, renormalize=False, scale=2.5),
    "the only expert": RoutingSpec(1, 1, renormalize=False, scoring="sigmoid"),
    "all experts": RoutingSpec(8, 8, renormalize=True, least_sum=2.0),
    "softmax of the chosen": RoutingSpec(32, 4, renormalize=False, scoring="softmax_chosen"),
    "best groups": RoutingSpec(40, 6, renormalize=False, num_groups=8, top_groups=3, scale=16.0),
    "best groups by two": RoutingSpec(
        64, 8, renormalize=True, scoring="sigmoid", num_groups=8, top_groups=4, group_score="best_two", scale=2.5
    ),
    "sigmoid": RoutingSpec(128, 8, renormalize=True, scoring="sigmoid", added_sum=0.5),
    "square root of softplus": RoutingSpec(40, 6, renormalize=True, scoring="sqrt_softplus", scale=1.5),
    "sigmoid of the chosen": RoutingSpec(24, 3, renormalize=True, scoring="sigmoid_chosen", scale=1.5),
    "sparse mixer": RoutingSpec(16, 2, renormalize=False, scoring="sparse_mixer", jitter=0.1),
}


def assert_routed_alike(kernels: Any, name: str, tokens: int, dtype: torch.dtype, biased: bool, device: str) -> None:
    """On rows that lie apart, whose logits all differ: which of equals comes first is not defined."""
    spec = SPECS[name]
    values = torch.rand(tokens, spec.num_experts + 3, device=device).argsort(dim=1) / 16 - spec.num_experts / 32
    logits = values.to(dtype)[:, : spec.num_experts]
    takes_bias = spec.scoring in BIAS_SCORINGS
    bias = torch.randn(spec.num_experts, device=device) if biased and takes_bias else None
    weight, expert = reference.route(logits, spec, bias)
    ours = kernels.route(logits, spec, bias)
    torch.testing.assert_close(ours[1], expert, rtol=0, atol=0)
    torch.testing.assert_close(ours[0], weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("tokens", "dtype", "biased"), [(1, torch.float32, False), (7, torch.float16, True), (17, torch.float32, False)]
)
@pytest.mark.parametrize("name", SPECS)
def test_tokens_are_routed(name: str, tokens: int, dtype: torch.dtype, biased: bool, device: str) -> None:
    assert_routed_alike(kernel, name, tokens, dtype, biased, device)


def test_addresses_go_beyond_32_bits(untouched: Any, device: str) -> None:
    spec, apart = SPECS["softmax"], 1 << 31
    near = torch.rand(2, spec.num_experts, device=device)
    far = untouched(apart + spec.num_experts, torch.float32).as_strided(near.shape, (apart, 1)).copy_(near)
    weight, expert = reference.route(near, spec)
    ours = kernel.route(far, spec)
    torch.testing.assert_close(ours[1], expert, rtol=0, atol=0)
    torch.testing.assert_close(ours[0], weight, rtol=1e-5, atol=1e-6)


def test_equal_scores_choose_the_lower_expert_first(device: str) -> None:
    for name, expected in (("sigmoid", [0, 1, 2, 3, 4, 5, 6, 7]), ("best groups", [0, 1, 2, 3, 4, 5])):
        spec = SPECS[name]
        assert kernel.route(torch.zeros(2, spec.num_experts, device=device), spec)[1].tolist() == [expected] * 2


@pytest.mark.parametrize("name", SPECS)
def test_rows_with_nan_are_routed_to_existing_experts_each_once(name: str, device: str) -> None:
    spec = SPECS[name]
    logits = torch.randn(2, spec.num_experts, device=device)
    logits[:, ::2] = float("nan")
    for chosen in kernel.route(logits, spec)[1].tolist():
        assert len(set(chosen)) == spec.top_k
        assert set(chosen) <= set(range(spec.num_experts))


@mutants_by(
    "name",
    {
        "best groups": {
            "(best // SP * SIZE + best % SP)": "best",
            "kept[:, :, None] == 1": "kept[:, :, None] >= 0",
        },
        "softmax": {
            "powers / tl.sum(powers, axis=1)[:, None]": "powers",
            "        free = tl.where(hit, 0, free)\n    if": "        free = tl.where(hit & (k > 0), 0, free)\n    if",
        },
        "sigmoid": {
            "mask=m_expert, other=0.0)[None, :]": "mask=m_expert, other=0.0)[None, :] * 0",
            "total + added_sum": "total",
        },
        "best groups by two": {"score += tl.max(": "score += 0 * tl.max("},
        "all experts": {"tl.maximum(total + added_sum, least_sum)": "(total + added_sum)"},
        "sparse mixer": {"<= 2 * jitter": "<= jitter"},
        "softmax of the chosen": {"weight /= tl.sum(tl.where": "weight /= 2 * tl.sum(tl.where"},
    },
)
def test_a_mutant_that_routes_is_found(failing_mutant: FailingMutant, name: str, edit: Edit, device: str) -> None:
    with failing_mutant(kernel, edit) as mutant:
        assert_routed_alike(mutant, name, 17, torch.float32, True, device)
