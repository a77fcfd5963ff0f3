"""Launch configuration of the expert layer: tuned for this GPU, or from the cost model. Handles no tensors."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

from moiety_kernels.grouped_gemm.tile_cost_model import Problem, TileConfig, candidates, choose
from moiety_kernels.tuning.choices import tuned

if TYPE_CHECKING:
    from moiety_kernels.gpu.targets import DeviceModel

OPERATION = "grouped_gemm"


@functools.lru_cache(maxsize=4096)
def configuration(problem: Problem, device: DeviceModel) -> TileConfig:
    """Return the candidate that was fastest in tuning for this problem and device, else the cost model's choice."""
    found = tuned(OPERATION, key(problem), candidates(problem, device), device.name)
    return choose(problem, device) if found is None else found


def key(problem: Problem) -> str:
    """Return the key of a choice: the layer, and the power of two nearest to its number of tokens by ratio."""
    tokens = 1 << round(math.log2(max(1, problem.tokens)))
    layer = f"E{problem.num_experts} K{problem.top_k} D{problem.width} F{problem.hidden}"
    invariant = " invariant" if problem.invariant else ""
    scales = "" if problem.scales == "none" else f" scaled by {problem.scales}"
    weights = (
        f"weights of {8 * problem.element_bytes} bits" if problem.weights == "wide" else f"{problem.weights} weights"
    )
    return f"{layer}, {weights}{scales}{invariant}, {tokens} tokens"
