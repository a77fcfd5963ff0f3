"""The expert layer's part of `moiety kernels tune`: problems, candidates by predicted time, a call that runs one.

T tokens, K experts per token, E experts, D model width, F expert width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moiety_kernels.grouped_gemm import kernel, launch_config, tile_cost_model
from moiety_kernels.grouped_gemm.tile_cost_model import Problem, Scales, TileConfig, Weights
from moiety_kernels.quantization.weight import BLOCK, SCALE_BLOCK

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moiety_kernels.bench.clocks import Call
    from moiety_kernels.bench.shapes import LayerShape
    from moiety_kernels.gpu.targets import DeviceModel

_DTYPES = {2: torch.bfloat16, 4: torch.float32}
_NARROW_SCALE = 1e-3  # for random quantized weights, whose values lie within ±448
KINDS: dict[str, tuple[tuple[Weights, Scales], ...]] = {
    "bf16": (("wide", "none"),),
    "fp8": (("fp8", "row"), ("fp8", "block")),
    "int8": (("int8", "row"),),
    "int4": (("int4", "group"),),
    "mxfp4": (("mxfp4", "group"),),
}


class GroupedGemmTunable:
    """Tunable expert layer.

    It holds the weights of the last prepared layer, since all its problems need the same ones.
    """

    operation = launch_config.OPERATION

    def __init__(self) -> None:
        self._layer: tuple[object, ...] = ()
        self._weights: tuple[Tensor, Tensor] | None = None

    def problems(self, shape: LayerShape, tokens: Sequence[int], weights: str) -> list[Problem]:
        layer = shape.num_experts, shape.top_k, shape.width, shape.hidden
        return [
            Problem(*layer, count, weights=kind, scales=scales) for kind, scales in KINDS[weights] for count in tokens
        ]

    def key(self, problem: Problem) -> str:
        return launch_config.key(problem)

    def candidates(self, problem: Problem, model: DeviceModel) -> Sequence[TileConfig]:
        every = tile_cost_model.candidates(problem, model)
        return sorted(every, key=lambda config: tile_cost_model.seconds(problem, config, model))

    def prepare(self, problem: Problem, device: torch.device) -> Callable[[TileConfig], Call]:
        """Draw even routing; the first experts of a token are drawn without replacement."""
        gate_up_E2FD, down_EDF = self._make_weights(problem, device)
        up_scale, down_scale = _make_scales(problem, device)
        x_TD = torch.randn(problem.tokens, problem.width, device=device).to(_DTYPES[problem.element_bytes])
        scores_TE = torch.rand(problem.tokens, problem.num_experts, device=device)
        weight_TK, chosen_TK = scores_TE.topk(problem.top_k, dim=-1)
        expert_TK = chosen_TK.to(torch.int32)

        def make(config: TileConfig) -> Call:
            inputs = x_TD, weight_TK, expert_TK, gate_up_E2FD, down_EDF
            return lambda: kernel.experts(
                *inputs,
                gate_up_scale=up_scale,
                down_scale=down_scale,
                four=config.four,
                invariant=problem.invariant,
                config=config,
            )

        return make

    def _make_weights(self, problem: Problem, device: torch.device) -> tuple[Tensor, Tensor]:
        layer = problem.num_experts, problem.width, problem.hidden, problem.weights, problem.element_bytes, device
        if self._weights is None or self._layer != layer:
            self._weights = None  # freed before the next are made: two layers may not fit
            self._weights = (
                _random((problem.num_experts, 2 * problem.hidden, problem.width), problem, device),
                _random((problem.num_experts, problem.width, problem.hidden), problem, device),
            )
            self._layer = layer
        return self._weights


def _random(size: tuple[int, int, int], problem: Problem, device: torch.device) -> Tensor:
    """Return random weights without zeros, whose products would be faster than real ones."""
    if problem.scales == "none":
        wide = torch.empty(size, dtype=_DTYPES[problem.element_bytes], device=device)
        return wide.normal_(std=size[2] ** -0.5)
    if problem.scales == "group":  # two numbers per byte
        return torch.randint(0, 256, (*size[:2], size[2] // 2), dtype=torch.uint8, device=device)
    if problem.weights == "int8":
        return torch.randint(1, 128, size, dtype=torch.int8, device=device)
    return torch.randint(1, 127, size, dtype=torch.int8, device=device).view(torch.float8_e4m3fn)  # 127 is NaN


def _make_scales(problem: Problem, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """Return the scales of gate and up, and of down."""
    experts, width, hidden = problem.num_experts, problem.width, problem.hidden
    if problem.scales == "none":
        return None, None
    if problem.scales == "row":
        up, down = [experts, 2 * hidden], [experts, width]
    else:
        block = SCALE_BLOCK if problem.scales == "block" else BLOCK
        up = [experts, 2 * hidden, -(-width // block)]
        down = [experts, width, -(-hidden // block)]
    return torch.full(up, _NARROW_SCALE, device=device), torch.full(down, _NARROW_SCALE, device=device)


TUNABLE = GroupedGemmTunable()
