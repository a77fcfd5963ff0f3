"""The whole expert layer, router scores to combined rows, as a timed call: ours and its rivals on the same tensors.

T tokens, K experts per token, R = T · K routed rows, E experts, D model width, F expert width.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moiety_kernels.bench.clocks import Call
from moiety_kernels.bench.routings import draw_logits, spec_of
from moiety_kernels.bench.shapes import LayerShape
from moiety_kernels.grouped_gemm import tile_cost_model
from moiety_kernels.moe import experts, grouped
from moiety_kernels.moe.reference import activate
from moiety_kernels.quantization import FP8, INT4, MXFP4, QuantizedWeight, WeightFormat, quantize
from moiety_kernels.quantization.weight import GPU_PACK
from moiety_kernels.route import route
from moiety_kernels.route.reference import route as route_in_torch

_CONTENDERS = 6
FLOAT8 = "float8"
# Quantized layers: the weight format and its display name.
NARROW: dict[str, tuple[WeightFormat, str]] = {
    "moe_layer_fp8": (FP8, FLOAT8),
    "moe_layer_int4": (INT4, "int4"),
    "moe_layer_mxfp4": (MXFP4, "mxfp4"),
}
NarrowWeights = tuple[QuantizedWeight, QuantizedWeight]
# Names of the formats in the expert layer's cost model.
_WIDE: tuple[tile_cost_model.Weights, tile_cost_model.Scales, tile_cost_model.Four] = ("wide", "none", "")
_KINDS: dict[str, tuple[tile_cost_model.Weights, tile_cost_model.Scales, tile_cost_model.Four]] = {
    "fp8": ("fp8", "row", ""),
    "int4": ("int4", "group", "int4"),
    "mxfp4": ("mxfp4", "group", "mxfp4"),
}


@dataclass(frozen=True, slots=True)
class Weights:
    gate_up_E2FD: Tensor
    down_EDF: Tensor


@dataclass(frozen=True, slots=True)
class Inputs:
    """Inputs of one point.

    `x_TD` has the type that our layer gets on the device; `narrow_TD` is the same in the weights' type, for rivals.
    """

    shape: LayerShape
    weights: Weights
    x_TD: Tensor
    narrow_TD: Tensor
    logits_TE: Tensor
    active: int  # experts that receive a row


def weight_bytes(shape: LayerShape) -> int:
    return 2 * 3 * shape.num_experts * shape.width * shape.hidden


def scratch_bytes(shape: LayerShape, tokens: int) -> int:
    """Return the memory that the contenders need beside the weights; each keeps all of its intermediate values."""
    rows = tokens * shape.top_k + shape.num_experts
    return _CONTENDERS * rows * (3 * shape.width + 4 * shape.hidden) * 4


def make_weights(shape: LayerShape, device: torch.device) -> Weights:
    """Return random weights, scaled to keep values near one; products of zeros would be faster than real ones."""
    experts_, width, hidden = shape.num_experts, shape.width, shape.hidden
    gate_up_E2FD = torch.empty(experts_, 2 * hidden, width, dtype=torch.bfloat16, device=device)
    down_EDF = torch.empty(experts_, width, hidden, dtype=torch.bfloat16, device=device)
    return Weights(gate_up_E2FD.normal_(std=width**-0.5), down_EDF.normal_(std=hidden**-0.5))


def make_inputs(shape: LayerShape, weights: Weights, tokens: int, routing: str, seed: int) -> Inputs:
    """Draw rows and router scores from `seed`."""
    device = weights.down_EDF.device
    generator = torch.Generator().manual_seed(seed)
    logits_TE = draw_logits(routing, tokens, shape.num_experts, generator).to(device)
    on_device = torch.Generator(device).manual_seed(seed)
    narrow_TD = torch.randn(tokens, shape.width, generator=on_device, device=device).bfloat16()
    x_TD = narrow_TD if device.type == "cuda" else narrow_TD.float()
    _, expert_TK = route_in_torch(logits_TE, spec_of(shape))
    active = int((expert_TK.flatten().long().bincount() > 0).sum())
    return Inputs(shape, weights, x_TD, narrow_TD, logits_TE, active)


def ours(inputs: Inputs) -> Callable[[], Tensor]:
    """Return our layer as a call.

    On a GPU it names the Triton kernels, so that inputs they do not support fail instead of running a fallback.
    """
    kernel = "triton" if inputs.x_TD.is_cuda else "auto"
    spec, weights = spec_of(inputs.shape), inputs.weights

    def run() -> Tensor:
        weight_TK, expert_TK = route(inputs.logits_TE, spec)
        return experts(inputs.x_TD, weight_TK, expert_TK, weights.gate_up_E2FD, weights.down_EDF, kernel=kernel)

    return run


def ours_narrow(inputs: Inputs, narrow: NarrowWeights) -> Callable[[], Tensor]:
    """Return the same layer with quantized weights; 8-bit weights have scales per row, as with `--quantization fp8`."""
    kernel = "triton" if inputs.x_TD.is_cuda else "auto"
    spec = spec_of(inputs.shape)

    def run() -> Tensor:
        weight_TK, expert_TK = route(inputs.logits_TE, spec)
        return experts(inputs.x_TD, weight_TK, expert_TK, *narrow, kernel=kernel)

    return run


def ours_by_tiles(inputs: Inputs, narrow: NarrowWeights | None) -> Callable[[], Tensor] | None:
    """Return the same layer on a GPU with few rows computed in tiles; None where tiles are used anyway."""
    if not inputs.x_TD.is_cuda:
        return None
    from moiety_kernels.gpu.devices import device_model  # noqa: PLC0415 - Triton, which only a GPU has a use for
    from moiety_kernels.grouped_gemm.kernel import experts as triton_experts  # noqa: PLC0415

    shape, spec, model = inputs.shape, spec_of(inputs.shape), device_model(inputs.x_TD.device)
    weights, scales, four = _WIDE if narrow is None else _KINDS[narrow[0].format.name]
    layer = shape.num_experts, shape.top_k, shape.width, shape.hidden, inputs.x_TD.shape[0]
    problem = tile_cost_model.Problem(*layer, weights=weights, scales=scales)
    if tile_cost_model.choose(problem, model).BM > 1:
        return None
    tiled = [config for config in tile_cost_model.candidates(problem, model) if config.BM > 1]
    config = min(tiled, key=lambda one: tile_cost_model.seconds(problem, one, model))
    gate_up, gate_up_scale, down, down_scale = _held(inputs.weights, narrow)

    def run() -> Tensor:
        weight_TK, expert_TK = route(inputs.logits_TE, spec)
        held = inputs.x_TD, weight_TK, expert_TK, gate_up, down
        return triton_experts(*held, gate_up_scale=gate_up_scale, down_scale=down_scale, four=four, config=config)

    return run


def _held(weights: Weights, narrow: NarrowWeights | None) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Return gate and up with their scales, and down with its scale, in the layout of the Triton kernels."""
    if narrow is None:
        return weights.gate_up_E2FD, None, weights.down_EDF, None
    scales = [one.scales_NG.squeeze(-1) if one.format.group is None else one.scales_NG for one in narrow]
    return narrow[0].values_NK, scales[0], narrow[1].values_NK, scales[1]


def in_few_bits(weights: Weights, form: WeightFormat) -> NarrowWeights:
    """Quantize gate, up and down, packed in the layout of the device's kernels."""
    if form.bits == 4 and weights.down_EDF.is_cuda:
        form = replace(form, pack=GPU_PACK)
    return quantize(weights.gate_up_E2FD, form), quantize(weights.down_EDF, form)


def rivals(inputs: Inputs, *, is_bound_by_memory: bool) -> dict[str, Call]:
    """Return the rival implementations that are available here, by name."""
    found: dict[str, Call] = {
        "torch_grouped_mm": grouped_mm(inputs),
        "cublas_batched" if inputs.x_TD.is_cuda else "torch_batched": batched(inputs),
    }
    if not is_bound_by_memory:  # else a rival without routing would win by doing less work
        found["cublas_dense" if inputs.x_TD.is_cuda else "torch_dense"] = dense(inputs)
    if importlib.util.find_spec("transformers") is not None:
        found["transformers_grouped_mm"] = in_transformers(inputs)
    if inputs.x_TD.is_cuda and importlib.util.find_spec("vllm") is not None:
        found["vllm_fused_moe"] = in_vllm(inputs)
    return found


def grouped_mm(inputs: Inputs) -> Callable[[], Tensor]:
    """Return torch's grouped product, with sorting, activation and sum in torch."""

    def run() -> Tensor:
        weight_TK, expert_TK = route_in_torch(inputs.logits_TE, spec_of(inputs.shape))
        weights = inputs.weights
        return grouped.experts(inputs.narrow_TD, weight_TK, expert_TK, weights.gate_up_E2FD, weights.down_EDF)

    return run


def batched(inputs: Inputs) -> Call:
    """Return a lower bound on a layer: the same weights and products, equal rows per active expert, no routing."""
    rows = -(-inputs.logits_TE.shape[0] * inputs.shape.top_k // inputs.active)
    gate_up_A2FD = inputs.weights.gate_up_E2FD[: inputs.active]
    down_ADF = inputs.weights.down_EDF[: inputs.active]
    x_ARD = torch.randn(inputs.active, rows, inputs.shape.width, device=gate_up_A2FD.device).to(gate_up_A2FD.dtype)
    return lambda: torch.bmm(activate(torch.bmm(x_ARD, gate_up_A2FD.transpose(1, 2))), down_ADF.transpose(1, 2))


def dense(inputs: Inputs) -> Call:
    """Return the same number of operations as two products with one expert's weights."""
    gate_up_2FD, down_DF = inputs.weights.gate_up_E2FD[0], inputs.weights.down_EDF[0]
    rows = inputs.logits_TE.shape[0] * inputs.shape.top_k
    x_RD = torch.randn(rows, inputs.shape.width, device=down_DF.device).to(down_DF.dtype)
    return lambda: activate(x_RD @ gate_up_2FD.T) @ down_DF.T


def in_transformers(inputs: Inputs) -> Call:
    """Return Mixtral's experts in transformers, which hold their weights as we do, with its grouped product."""
    from transformers import MixtralConfig  # noqa: PLC0415 - only where it is installed
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts  # noqa: PLC0415

    shape = inputs.shape
    config = MixtralConfig(
        hidden_size=shape.width, intermediate_size=shape.hidden, num_local_experts=shape.num_experts, hidden_act="silu"
    )
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        module = MixtralExperts(config)
    module.gate_up_proj = torch.nn.Parameter(inputs.weights.gate_up_E2FD, requires_grad=False)
    module.down_proj = torch.nn.Parameter(inputs.weights.down_EDF, requires_grad=False)

    def run() -> object:
        weight_TK, expert_TK = route_in_torch(inputs.logits_TE, spec_of(shape))
        return module(inputs.narrow_TD, expert_TK.long(), weight_TK.to(inputs.narrow_TD.dtype))

    return run


def in_vllm(inputs: Inputs) -> Call:
    """Return vLLM's fused experts in Triton, whose weights have the same layout as ours."""
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts  # noqa: PLC0415 - where it is installed

    def run() -> object:
        weight_TK, expert_TK = route_in_torch(inputs.logits_TE, spec_of(inputs.shape))
        weights = inputs.weights
        return fused_experts(inputs.narrow_TD, weights.gate_up_E2FD, weights.down_EDF, weight_TK, expert_TK)

    return run
