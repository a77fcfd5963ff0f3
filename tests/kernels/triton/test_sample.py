"""The Triton kernel that draws tokens agrees with its definition, token for token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.kernels.mutants import Edit, FailingMutant, mutants, mutants_by

from moiety_kernels.sample import IN_PROMPT, Draws, Penalties, kernel, reference

# temperature, top-k, top-p, min-p
GREEDY, PLAIN = (0.0, 0, 1.0, 0.0), (0.7, 0, 1.0, 0.0)
FILTERS = [
    GREEDY,
    PLAIN,
    (1.0, 1, 1.0, 0.0),
    (1.3, 5, 1.0, 0.0),
    (1.0, 1000, 1.0, 0.0),
    (1.0, 0, 0.9, 0.0),
    (1.0, 0, 0.0, 0.0),
    (1.0, 0, 1.0, 0.2),
    (0.9, 20, 0.8, 0.05),
    (1.5, 3, 0.999, 0.001),
]


KINDS = ["random", "peaked", "tied", "equal"]


def draws(filters: list[tuple[float, int, float, float]], device: str) -> Draws:
    def column(place: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([row[place] for row in filters], dtype=dtype, device=device)

    uniform = torch.rand(len(filters), dtype=torch.float64, device=device)
    top_p = column(2, torch.float64)
    return Draws(column(0, torch.float32), column(1, torch.int32), top_p, column(3, torch.float32), uniform)


def some_logits(kind: str, rows: int, size: int, device: str) -> torch.Tensor:
    logits = torch.randn(rows, size + 3, device=device)[:, :size]
    if kind == "peaked":
        return logits * 8
    if kind == "tied":
        return (logits * 2).round()
    return logits * 0 if kind == "equal" else logits


def assert_drawn_alike(kernels: Any, kind: str, size: int, device: str) -> None:
    """Of tied tokens those at the very end of what is kept, which the smallest mistake in keeping moves."""
    asked = draws(FILTERS, device)
    if kind == "tied":
        asked.uniform_L.fill_(1 - 1e-5)
    logits = some_logits(kind, len(FILTERS), size, device)
    expected = reference.sample(logits.clone(), asked)
    assert kernels.sample(logits, asked, block=64).tolist() == expected.tolist()


def assert_penalised_alike(kernels: Any, device: str) -> None:
    size, asked = 70, draws([GREEDY, PLAIN, FILTERS[3], FILTERS[5]] * 2, device)
    rows = len(asked.uniform_L)
    place = torch.tensor([4, -1, 1, 0, 2, -1, 5, 3], dtype=torch.int32, device=device)
    times = torch.randint(0, 4, (6, size), device=device) * torch.randint(0, 2, (6, size), device=device)
    seen = (times + IN_PROMPT * torch.randint(0, 2, (6, size), device=device)).int()
    amounts = torch.tensor([1.0, 1.5, 0.8, 1.1, 1.3, 0.9], device=device), torch.rand(6, device=device)
    penalties = Penalties(place, seen, *amounts, torch.rand(6, device=device) - 0.3)
    logits = some_logits("peaked", rows, size, device)
    expected_logits = reference.penalised(logits, penalties)
    expected = reference.sample(logits.clone(), asked, penalties)
    assert kernels.sample(logits, asked, penalties, block=64).tolist() == expected.tolist()
    torch.testing.assert_close(logits[[0, 4]], expected_logits[[0, 4]])  # greedy rows are left as they were penalised


@pytest.mark.parametrize(("kind", "size"), [("random", 1), ("random", 3), *((kind, 100) for kind in KINDS)])
def test_tokens_are_drawn(kind: str, size: int, device: str) -> None:
    assert_drawn_alike(kernel, kind, size, device)


def test_addresses_go_beyond_32_bits(untouched: Any, device: str) -> None:
    size, apart, asked = 100, 1 << 31, draws(FILTERS[-2:], device)
    near = some_logits("random", 2, size, device).contiguous()
    far = untouched(apart + size, torch.float32).as_strided((2, size), (apart, 1)).copy_(near)
    seen = torch.randint(0, 3, (2, size), dtype=torch.int32, device=device)
    far_seen = untouched(apart + size, torch.int32).as_strided((2, size), (apart, 1)).copy_(seen)
    place = torch.arange(2, dtype=torch.int32, device=device)
    amounts = torch.tensor([1.5, 1.2], device=device), torch.rand(2, device=device), torch.rand(2, device=device)
    expected = reference.sample(near.clone(), asked, Penalties(place, seen, *amounts))
    ours = kernel.sample(far, asked, Penalties(place, far_seen, *amounts), block=64)
    assert ours.tolist() == expected.tolist()


def test_tokens_seen_before_are_penalised(device: str) -> None:
    assert_penalised_alike(kernel, device)


def test_the_whole_distribution_is_reached_in_its_proportions(device: str) -> None:
    """By every tenth of the uniform number, with both ends."""
    uniform = torch.linspace(0, 1 - 2**-53, 11, dtype=torch.float64, device=device)
    logits = torch.tensor([0.1, 0.2, 0.0, 0.3, 0.4], device=device).log().expand(11, 5)
    for top_p, shares in ((1.0, [1, 2, 0, 3, 5]), (0.85, [0, 2, 0, 4, 5])):
        asked = draws([(1.0, 0, top_p, 0.0)] * 11, device)
        drawn = Draws(asked.temperature_L, asked.top_k_L, asked.top_p_L, asked.min_p_L, uniform)
        counts = torch.bincount(kernel.sample(logits.clone(), drawn), minlength=5)
        assert (counts.cpu() - torch.tensor(shares)).abs().max() <= 1


@mutants_by(
    "kind",
    {
        "tied": {
            "highest + 1)": "highest)",
            "tl.full([], _ABOVE_ALL, tl.int32)": "tl.full([], _ABOVE_ALL - 1, tl.int32)",
            "mass > mass_wanted": "mass >= mass_wanted * 1.3",
            "tl.ceil((target - mass) / weight)": "tl.floor((target - mass) / weight)",
            "(top_k - above) * key": "key",
            "kept = tl.minimum(kept, _mass(": "kept = tl.maximum(kept, _mass(",
            "tl.cumsum(equal, axis=0) > place": "tl.cumsum(equal, axis=0) >= place",
        },
        "random": {
            "tl.sum((num >> 8) & 255": "tl.sum((num >> 16) & 255",
            "logits / temperature - highest / temperature": "logits - highest",
        },
        "equal": {"before + tl.cumsum(weights": "tl.cumsum(weights"},
    },
)
def test_a_mutant_is_found(failing_mutant: FailingMutant, kind: str, edit: Edit, device: str) -> None:
    with failing_mutant(kernel, edit) as mutant:
        assert_drawn_alike(mutant, kind, 100, device)


@mutants(
    {
        "times = seen % _IN_PROMPT": "times = seen",
        "logits / repetition": "logits * repetition",
        "p_seen + place * seen_stride": "p_seen + row * seen_stride",
        "p_presence + place": "p_presence",
    }
)
def test_a_mutant_that_penalises_is_found(failing_mutant: FailingMutant, edit: Edit, device: str) -> None:
    with failing_mutant(kernel, edit) as mutant:
        assert_penalised_alike(mutant, device)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), pytest.param(float("-inf"), marks=pytest.mark.thorough)])
@pytest.mark.parametrize("whole", [True, False], ids=["whole rows", "one number"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the numpy that interprets it
@pytest.mark.timeout(60)
def test_a_row_that_is_not_finite_ends_with_some_token_and_leaves_the_others_alone(
    value: float, whole: bool, device: str
) -> None:
    size, asked = 70, draws(FILTERS * 2, device)
    logits = some_logits("random", len(FILTERS) * 2, size, device)
    expected = kernel.sample(logits.clone(), asked, block=64)
    logits[1::2, slice(None) if whole else 69] = value
    found = kernel.sample(logits, asked, block=64)
    assert found[::2].tolist() == expected[::2].tolist()
    assert ((found >= 0) & (found < size)).all()
