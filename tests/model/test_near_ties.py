"""Near ties are found by their margins, and nothing but a near tie is decided otherwise."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from .near_ties import MARGIN, Choices, agreeing_logprobs


def choosing(scores: Tensor) -> Callable[[], Tensor]:
    """Return a pass whose log probabilities are the sum of the two chosen indices of each row."""
    return lambda: scores.topk(2).indices.sum(dim=1, keepdim=True).float()


@pytest.mark.parametrize(("margin", "is_tie"), [(0.0, True), (0.5 * MARGIN, True), (3 * MARGIN, False)])
def test_only_a_near_tie_is_decided_otherwise(margin: float, is_tie: bool) -> None:
    scores = torch.tensor([[0.9, 0.5, 0.1, 0.2], [0.3, 1.0, 0.5 + margin, 0.5]])
    ours = torch.tensor([[1.0], [4.0]])  # 0 + 1, and 1 + 3 in place of 1 + 2
    expected = agreeing_logprobs(choosing(scores), ours, 0.1)
    assert torch.equal(expected, ours) == is_tie


def test_a_difference_without_a_tie_at_its_token_stays() -> None:
    scores = torch.tensor([[1.0, 0.5, 0.5, 0.0], [0.9, 0.5, 0.1, 0.2]])
    ours = torch.tensor([[1.0], [2.0]])
    assert agreeing_logprobs(choosing(scores), ours, 0.1).tolist() == [[1.0], [1.0]]


@pytest.mark.parametrize("mask", [-torch.inf, torch.finfo(torch.float32).min])
def test_masked_scores_are_no_ties(mask: float) -> None:
    masked = torch.tensor([[1.0, mask, mask, mask]])
    with Choices() as choices:
        masked.topk(2)
        masked.topk(4)
    assert not choices.near_ties
