"""The expert layer in Triton: group → gather, gate and up, activation → down, routing weight → combine.

T tokens, K experts per token, R = T · K routed rows, E experts, D model width, F expert width.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from moiety_kernels.gpu.devices import device_model
from moiety_kernels.grouped_gemm.kernels.cases import compile_cases
from moiety_kernels.grouped_gemm.kernels.down import combine, down
from moiety_kernels.grouped_gemm.kernels.launching import WORD, kind_of_scales
from moiety_kernels.grouped_gemm.kernels.rounding import round_rows
from moiety_kernels.grouped_gemm.kernels.rows import down_rows, up_rows
from moiety_kernels.grouped_gemm.kernels.up import up, up_rounded
from moiety_kernels.grouped_gemm.launch_config import configuration
from moiety_kernels.grouped_gemm.tile_cost_model import Four, Problem, Scales, TileConfig, Weights, choose
from moiety_kernels.input_order import gather_expert_inputs
from moiety_kernels.moe.activation import SILU, Activation
from moiety_kernels.quantization.weight import GPU_PACK, SCALE_BLOCK
from moiety_kernels.route import group

__all__ = ["combine", "compile_cases", "experts", "unfit"]

_NARROW: dict[torch.dtype, Weights] = {torch.int8: "int8", torch.float8_e4m3fn: "fp8"}
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def unfit(
    x_TD: Tensor,
    expert_TK: Tensor,
    w_gate_up_E2FD: Tensor,
    w_down_EDF: Tensor,
    gate_up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
) -> str | None:
    """Return why `experts` does not support these tensors; None if it does."""
    if x_TD.dtype not in _DTYPES:
        return f"activations are {x_TD.dtype}"
    if expert_TK.dtype is not torch.int32:
        return f"experts' numbers are {expert_TK.dtype}, not int32"
    if any(tensor.stride(-1) != 1 for tensor in (x_TD, w_gate_up_E2FD, w_down_EDF)):
        return "values of a row do not lie next to each other"
    if (gate_up_scale is None) != (down_scale is None):
        return "only one of the two weights has scales"
    return _unfit_weight(w_gate_up_E2FD, gate_up_scale, x_TD) or _unfit_weight(w_down_EDF, down_scale, x_TD)


def _unfit_weight(w_ENK: Tensor, scale: Tensor | None, x_TD: Tensor) -> str | None:
    if scale is None:
        return None if w_ENK.dtype is x_TD.dtype else f"weights are {w_ENK.dtype} and activations {x_TD.dtype}"
    if w_ENK.dtype is torch.uint8:
        return _unfit_four(w_ENK, scale, x_TD)
    if w_ENK.dtype not in _NARROW:
        return f"weights with scales are {w_ENK.dtype}, not int8, float8_e4m3fn or packed uint8"
    experts, rows, inner = w_ENK.shape
    blocks = (experts, rows, -(-inner // SCALE_BLOCK))
    if tuple(scale.shape) not in ((experts, rows), blocks) or not scale.is_contiguous():
        return f"scales {tuple(scale.shape)} are neither {(experts, rows)} for rows nor {blocks} for blocks, contiguous"
    return None


def _unfit_four(w_ENK: Tensor, scale: Tensor, x_TD: Tensor) -> str | None:
    experts, rows, inner = w_ENK.shape[0], w_ENK.shape[1], 2 * w_ENK.shape[2]
    if x_TD.element_size() != 2:
        return f"beside weights of 4 bits activations are {x_TD.dtype}, not of 16 bits"
    if inner % GPU_PACK:
        return f"rows of 4 bits have {inner} inputs, not a multiple of {GPU_PACK}"
    if w_ENK.data_ptr() % WORD or any(stride % WORD for stride in w_ENK.stride()[:2]):
        return f"rows of 4 bits do not begin at multiples of {WORD} bytes"
    if tuple(scale.shape) != (experts, rows, inner // 32) or not scale.is_contiguous():
        return f"scales {tuple(scale.shape)} of 4 bits are not {(experts, rows, inner // 32)}, contiguous"
    return None


def experts(
    x_TD: Tensor,
    weight_TK: Tensor,
    expert_TK: Tensor,
    w_gate_up_E2FD: Tensor,
    w_down_EDF: Tensor,
    *,
    activation: Activation = SILU,
    gate_up_bias_E2F: Tensor | None = None,
    down_bias_ED: Tensor | None = None,
    gate_up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
    down_order_EF: Tensor | None = None,
    four: Four = "",
    invariant: bool = False,
    config: TileConfig | None = None,
) -> Tensor:
    """Compute Σ_k weight · expert(x) for each token, with the same bits every time and no device synchronisation.

    A negative number stands for an expert on another rank and adds nothing.

    Weights of int8 or float8_e4m3fn have scales, contiguous and float32: of rows, [E, N], or of blocks of 128 × 128,
    [E, N, K ÷ 128], where the rows of a block, counted from the first of gate and of up, have the same scale.
    `four`-bit weights are uint8, packed by 64, with scales [E, N, K ÷ 32]. `down_order`, int32: the order in which each
    expert's down weight stores its inputs, if another one. With `invariant`, a token's bits do not
    depend on the other tokens. With many rows and float8 weights, rows are also rounded to float8. Without `config`,
    the configuration is the one tuned for this GPU, else the cost model's choice.
    """
    tokens, top_k = expert_TK.shape
    if tokens == 0:
        return torch.empty_like(x_TD)
    expert_TK, weight_TK = expert_TK.contiguous(), weight_TK.float().contiguous()
    num_experts, width, hidden = *w_down_EDF.shape[:2], w_gate_up_E2FD.shape[1] // activation.num_inputs
    if config is None:
        weights: Weights = four or _NARROW.get(w_down_EDF.dtype, "wide")
        kinds = weights, "group" if four else kind_of_scales(down_scale)
        problem = _problem(num_experts, top_k, width, hidden, tokens, x_TD.element_size(), invariant, *kinds)
        config = (choose if x_TD.is_cpu else configuration)(problem, device_model(x_TD.device))
    assert config.four == four, "a choice for other weights"
    if config.BM == 1:
        inner_RF = up_rows(
            x_TD, expert_TK, w_gate_up_E2FD, gate_up_scale, gate_up_bias_E2F, activation, config.up, four
        )
        inner_RF = _in_order(inner_RF, down_order_EF, expert_TK.flatten())
        return down_rows(inner_RF, expert_TK, weight_TK, w_down_EDF, down_scale, down_bias_ED, config.down, four)
    groups = group(expert_TK, num_experts, config.BM)
    gate_up, downwards = (w_gate_up_E2FD, gate_up_scale, gate_up_bias_E2F), (w_down_EDF, down_scale, down_bias_ED)
    if config.eight:
        assert down_order_EF is None, "weights of 8 bits have their inputs in order"
        rounded_TD, x_scale_TG = round_rows(x_TD)
        inner_RF, inner_scale_RG = up_rounded(rounded_TD, x_scale_TG, groups, top_k, *gate_up, activation, config)
        weighted = down(inner_RF, groups, weight_TK, *downwards, config, inner_scale_RG, x_TD.dtype)
    else:
        inner_RF = up(x_TD, groups, top_k, *gate_up, activation, config)
        if down_order_EF is not None:
            sorted_R = expert_TK.flatten()[groups.order_R.long().clamp(0, expert_TK.numel() - 1)]
            inner_RF = _in_order(inner_RF, down_order_EF, sorted_R)
        weighted = down(inner_RF, groups, weight_TK, *downwards, config)
    return combine(weighted, expert_TK)


def _in_order(inner_RF: Tensor, order_EF: Tensor | None, expert_R: Tensor) -> Tensor:
    """Return each row in the order of its expert's down weight."""
    return inner_RF if order_EF is None else gather_expert_inputs(inner_RF, order_EF, expert_R)


@functools.lru_cache(maxsize=4096)
def _problem(
    num_experts: int,
    top_k: int,
    width: int,
    hidden: int,
    tokens: int,
    element_bytes: int,
    invariant: bool,
    weights: Weights,
    scales: Scales,
) -> Problem:
    """Return the problem with the number of tokens rounded up to three binary digits, which keeps the cache small."""
    unit = 1 << max(0, tokens.bit_length() - 3)
    return Problem(
        num_experts, top_k, width, hidden, -(-tokens // unit) * unit, element_bytes, invariant, weights, scales
    )
