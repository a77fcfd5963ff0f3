"""What the expert layer is launched with: tuned for the GPU that it runs on, or by the cost model. Knows no tensors."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

from moiety_kernels.grouped_gemm.tiles import Problem, TileConfig, candidates, choose
from moiety_kernels.tuning.choices import tuned

if TYPE_CHECKING:
    from moiety_kernels.gpu.targets import DeviceModel

OPERATION = "grouped_gemm"


@functools.lru_cache(maxsize=4096)
def configuration(problem: Problem, device: DeviceModel) -> TileConfig:
    """The candidate that was fastest when somebody timed this problem on such a device, else the cost model's."""
    found = tuned(OPERATION, key(problem), candidates(problem, device), device.name)
    return choose(problem, device) if found is None else found


def key(problem: Problem) -> str:
    """What a choice is kept under: the layer, and the power of two that its tokens are nearest to by ratio."""
    tokens = 1 << round(math.log2(max(1, problem.tokens)))
    layer = f"E{problem.num_experts} K{problem.top_k} D{problem.width} F{problem.hidden}"
    invariant = " invariant" if problem.invariant else ""
    scales = "" if problem.scales == "none" else f" scaled by {problem.scales}"
    weights = (
        f"weights of {8 * problem.element_bytes} bits" if problem.weights == "wide" else f"{problem.weights} weights"
    )
    return f"{layer}, {weights}{scales}{invariant}, {tokens} tokens"
