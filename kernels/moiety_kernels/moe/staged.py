"""The expert layer in stages, for experts that are not all in memory at once.

Each stage computes the pairs whose experts are present. All stages' rows are then weighted and summed exactly as in
`experts`, so that the result has the same bits.

T tokens, K experts per token, R = T · K pairs, N pairs of a stage, S device_state experts, D model width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moiety_kernels.lazy_imports import lazy_import
from moiety_kernels.moe import experts, grouped, unfit_for_triton

if TYPE_CHECKING:
    from collections.abc import Iterable

    from moiety_kernels.quantization import Weight

_cpu = lazy_import("moiety_kernels.moe", "cpu")
_triton = lazy_import("moiety_kernels.grouped_gemm", "kernel")


def experts_in_stages(
    x_TD: Tensor,
    weight_TK: Tensor,
    stages: Iterable[Tensor],
    w_gate_up_S2FD: Weight,
    w_down_SDF: Weight,
    *,
    kernel: str = "auto",
    **options: Any,
) -> Tensor:
    """Return Σ_k weight · expert(x) for each token.

    Each of `stages` gives for every pair, [T, K] int32, the index of its expert among the weights, negative for pairs
    of other stages. The weights may change when the next stage is requested; on a GPU that change must be queued after
    the work so far. A pair in no stage adds nothing. `options` are those of `experts` except adapters.
    """
    tokens, top_k = weight_TK.shape
    by = _computed_by(x_TD, weight_TK, w_gate_up_S2FD, w_down_SDF, kernel, options)
    rows_RD = x_TD.new_zeros(tokens * top_k, x_TD.shape[1])
    place_R = torch.full((tokens * top_k,), -1, dtype=torch.int32, device=x_TD.device)
    for slot_TK in stages:
        slot_R = slot_TK.flatten()
        pair_N = (slot_R >= 0).nonzero().flatten()
        if not len(pair_N):
            continue
        place_R[pair_N] = 0
        # Triton's kernels round a row after weighting it, the others round only the sum.
        weight_N = weight_TK.flatten()[pair_N] if by == "triton" else torch.ones(len(pair_N), device=x_TD.device)
        rows_RD[pair_N] = experts(
            x_TD[pair_N // top_k],
            weight_N.unsqueeze(1),
            slot_R[pair_N].unsqueeze(1),
            w_gate_up_S2FD,
            w_down_SDF,
            kernel="auto" if by == "cpu" else by,
            **options,
        )
    if by == "cpu":
        summed: Tensor = _cpu().combine(rows_RD, weight_TK)
        return summed
    if by == "triton":
        combined: Tensor = _triton().combine(rows_RD, place_R.view(tokens, top_k))
        return combined
    return torch.sum(rows_RD.view(tokens, top_k, -1) * weight_TK.unsqueeze(-1).to(x_TD.dtype), dim=1)


def _computed_by(
    x_TD: Tensor, weight_TK: Tensor, up: Weight, down: Weight, kernel: str, options: dict[str, Any]
) -> str:
    """Return the implementation that `experts` would use for all pairs at once; the stages use the same."""
    chosen_TK = torch.empty(weight_TK.shape, dtype=torch.int32, device=x_TD.device)
    biases = options.get("gate_up_bias_E2F"), options.get("down_bias_ED")
    if kernel != "auto":
        return kernel
    if x_TD.is_cpu:
        return "cpu" if _cpu().fits(x_TD, chosen_TK, up, down, *biases) else "reference"
    if unfit_for_triton(x_TD, chosen_TK, up, down) is None:
        return "triton"
    plain = isinstance(up, Tensor) and isinstance(down, Tensor) and grouped.fits(x_TD, down)
    return "grouped" if plain else "reference"
