"""Choices between nearly equal scores in a pass of transformers, and the same pass with one of them decided otherwise.

A router or an indexer chooses the entries with the highest scores. If the last chosen score and the first one that is
not chosen differ by no more than rounding, both choices are right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

MARGIN = 1e-5  # of the row's largest score: several times what float32 rounds in a few layers
MOST_EXCHANGED = 3


class Choices(TorchFunctionMode):
    """Record the near ties of all top-k choices, and decide those in `exchanged` otherwise.

    A tie is the number of the choice in the pass, and the row.
    """

    def __init__(self, exchanged: frozenset[tuple[int, int]] = frozenset()) -> None:
        super().__init__()
        self._exchanged, self._number = exchanged, 0
        self.near_ties: list[tuple[int, int]] = []
        self.num_rows: list[int] = []

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") != "topk":
            return func(*args, **kwargs)
        return self._choose(*args, **kwargs)

    def _choose(self, scores: Tensor, k: int, dim: int = -1, **_order: bool) -> Any:
        assert dim in (-1, scores.dim() - 1)
        if k == scores.shape[-1]:
            return torch.Tensor.topk(scores, k)
        values, indices = torch.Tensor.topk(scores, k + 1)
        rows = values.view(-1, k + 1)
        is_masked = rows <= torch.finfo(rows.dtype).min / 2
        largest = rows.masked_fill(is_masked, 0).abs().amax(dim=1)
        near = (rows[:, k - 1] - rows[:, k] <= MARGIN * largest) & ~is_masked[:, k]
        self.near_ties += [(self._number, row) for row in near.nonzero().flatten().tolist()]
        self.num_rows.append(len(rows))
        for number, row in self._exchanged:
            if number == self._number:
                for one in (rows, indices.view(-1, k + 1)):
                    one[row, k - 1] = one[row, k].clone()
        self._number += 1
        return torch.return_types.topk((values[..., :k], indices[..., :k]))


def agreeing_logprobs(logprobs: Callable[[], Tensor], ours: Tensor, tolerance: float) -> Tensor:
    """Return transformers' log probabilities, with as few near ties decided otherwise as let them agree with `ours`.

    `logprobs` runs transformers on one prompt. A choice is exchanged only if it is a near tie in that pass, and only if
    that makes the first token that differs agree.
    """
    exchanged: frozenset[tuple[int, int]] = frozenset()
    for _ in range(MOST_EXCHANGED + 1):
        with Choices(exchanged) as choices:
            expected = logprobs()
        differing = _first_difference(ours, expected, tolerance)
        if differing is None:
            return expected
        for tie in choices.near_ties:
            rows_per_token = choices.num_rows[tie[0]] // len(ours)
            if tie in exchanged or tie[1] // rows_per_token != differing:
                continue
            with Choices(exchanged | {tie}):
                other = _first_difference(ours, logprobs(), tolerance)
            if other is None or other > differing:
                exchanged |= {tie}
                break
        else:
            break
    return expected


def _first_difference(ours: Tensor, expected: Tensor, tolerance: float) -> int | None:
    differing = ((ours - expected).abs().amax(dim=1) > tolerance).nonzero().flatten()
    return int(differing[0]) if len(differing) else None
