"""What `moiety kernels tune` needs of the expert layer: problems, candidates by predicted time, a way to run one.

T tokens, K experts a token, E experts, D model width, F expert width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moiety_kernels.grouped_gemm import choice, kernel, tiles
from moiety_kernels.grouped_gemm.tiles import Problem, TileConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moiety_kernels.bench.clocks import Call
    from moiety_kernels.bench.shapes import LayerShape
    from moiety_kernels.gpu.targets import DeviceModel

_DTYPES = {2: torch.bfloat16, 4: torch.float32}


class GroupedGemmTunable:
    """Holds the weights of the layer that was prepared last, since all its problems need the same ones."""

    operation = choice.OPERATION

    def __init__(self) -> None:
        self._layer: tuple[object, ...] = ()
        self._weights: tuple[Tensor, Tensor] | None = None

    def problems(self, shape: LayerShape, tokens: Sequence[int]) -> list[Problem]:
        layer = shape.num_experts, shape.top_k, shape.width, shape.hidden
        return [Problem(*layer, count) for count in tokens]

    def key(self, problem: Problem) -> str:
        return choice.key(problem)

    def candidates(self, problem: Problem, model: DeviceModel) -> Sequence[TileConfig]:
        every = tiles.candidates(problem, model)
        return sorted(every, key=lambda config: tiles.seconds(problem, config, model))

    def prepare(self, problem: Problem, device: torch.device) -> Callable[[TileConfig], Call]:
        """Even routing, the first experts of a token drawn without replacement."""
        gate_up_E2FD, down_EDF = self._make_weights(problem, device)
        x_TD = torch.randn(problem.tokens, problem.width, device=device).to(down_EDF.dtype)
        scores_TE = torch.rand(problem.tokens, problem.num_experts, device=device)
        weight_TK, chosen_TK = scores_TE.topk(problem.top_k, dim=-1)
        expert_TK = chosen_TK.to(torch.int32)

        def make(config: TileConfig) -> Call:
            return lambda: kernel.experts(
                x_TD, weight_TK, expert_TK, gate_up_E2FD, down_EDF, invariant=problem.invariant, config=config
            )

        return make

    def _make_weights(self, problem: Problem, device: torch.device) -> tuple[Tensor, Tensor]:
        layer = problem.num_experts, problem.width, problem.hidden, problem.element_bytes, device
        if self._weights is None or self._layer != layer:
            self._weights = None  # before the next are made: two layers may not fit
            dtype = _DTYPES[problem.element_bytes]
            up = torch.empty(problem.num_experts, 2 * problem.hidden, problem.width, dtype=dtype, device=device)
            down = torch.empty(problem.num_experts, problem.width, problem.hidden, dtype=dtype, device=device)
            self._weights = up.normal_(std=problem.width**-0.5), down.normal_(std=problem.hidden**-0.5)
            self._layer = layer
        return self._weights


TUNABLE = GroupedGemmTunable()
