"""Every variant that the cost model may choose, for the resource report.

Variants for Hopper and Blackwell use the copy engine (TMA), the others do not. One of the latter is also built for
Hopper, where the weights' layout may require it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from moiety_kernels.gpu.cases import CompileCase
from moiety_kernels.grouped_gemm import tile_cost_model
from moiety_kernels.grouped_gemm.kernels import down, rounding, rows, up
from moiety_kernels.grouped_gemm.kernels.launching import GROUP

if TYPE_CHECKING:
    from moiety_kernels.grouped_gemm.tile_cost_model import TileConfig

_OTHERS_HEIGHTS = (16, 128)  # tile heights whose variants are built for targets other than Hopper
_GROUPS = dict.fromkeys(("p_order", "p_starts", "p_tiles", "p_num_tiles", "p_expert"), "*i32")
_SIZES = dict.fromkeys(("top_k", "width", "hidden", "x_stride", "expert_stride", "row_stride"), "i32")
_FLOATS = {
    "p_scale": "*fp32",
    "p_bias": "*fp32",
    "p_weight": "*fp32",
    "p_x_scale": "*fp32",
    "p_inner_scale": "*fp32",
    "limit": "fp32",
    "alpha": "fp32",
}
_COMMON = _GROUPS | _SIZES | _FLOATS
_EIGHT_BITS: tuple[tuple[tile_cost_model.Weights, tile_cost_model.Scales], ...] = (
    ("int8", "row"),
    ("fp8", "row"),
    ("fp8", "block"),
)
_FOUR_BITS: tuple[tile_cost_model.Four, ...] = ("int4", "mxfp4")
_KEPT = {"int8": "i8", "fp8": "fp8e4nv", "int4": "u8", "mxfp4": "u8"}


def compile_cases() -> list[CompileCase]:
    """Return every variant for Hopper, each with biases and without, and some variants for other targets."""
    found = _row_cases()
    for special in (False, True):
        found += _hopper_cases(special=special)
    for config in tile_cost_model.PORTABLE[1:]:
        if config.BM in _OTHERS_HEIGHTS:
            found += _tile_cases(config, "bf16", ("sm_80", "gfx942"), engine=False)
    found += _tile_cases(tile_cost_model.HOPPER[1], "bf16", ("sm_90",), engine=False)
    found += _tile_cases(tile_cost_model.HOPPER[-1], "bf16", ("sm_90",), engine=True, activation="relu2")[:1]
    older = replace(tile_cost_model.PORTABLE[1], four="mxfp4")
    return found + _tile_cases(older, "bf16", ("sm_80", "gfx942"), engine=False, weights="mxfp4", scales="group")


def _hopper_cases(*, special: bool) -> list[CompileCase]:
    found = []
    for config in tile_cost_model.HOPPER[1:]:
        usual = config.BM in _OTHERS_HEIGHTS and config.up.flat and config.up.BK == 64 and not special
        targets = ("sm_90", "sm_100") if usual else ("sm_90",)
        found += _tile_cases(config, "bf16", targets, engine=True, special=special)
    for config in (*tile_cost_model.NARROW[1:], *tile_cost_model.EIGHT):
        for weights, scales in _EIGHT_BITS[1 if config.eight else 0 :]:
            if scales == "row" or config.eight or config.BM <= tile_cost_model.BLOCK_SCALED_ROWS:
                kind: dict[str, Any] = {"weights": weights, "scales": scales}
                found += _tile_cases(config, "bf16", ("sm_90",), engine=True, special=special, **kind)
    for config in tile_cost_model.FOUR:
        for four in _FOUR_BITS:
            only, kind = replace(config, four=four), {"weights": four, "scales": "group"}
            found += _tile_cases(only, "bf16", ("sm_90",), engine=True, special=special, **kind)
    for config in tile_cost_model.SINGLE:
        found += _tile_cases(config, "fp32", ("sm_90",), engine=True, special=special)
    return found


def _tile_cases(
    config: TileConfig,
    dtype: str,
    only: tuple[str, ...],
    *,
    engine: bool,
    special: bool = False,
    weights: tile_cost_model.Weights = "wide",
    scales: tile_cost_model.Scales = "none",
    activation: str = "silu",
) -> list[CompileCase]:
    """Return up and down of one configuration.

    `special`: with biases, the clipped activation and a width that no step divides.
    """
    activation = "clipped" if special else activation
    kept = _KEPT.get(weights, dtype)
    rows_in = kept if config.eight else dtype
    suffix = f"{dtype}{'' if engine else ' by addresses'}{' special' if special else ''}"
    suffix += f" {weights} a scale a {scales}" if weights != "wide" else ""
    suffix += " without gates" if activation == "relu2" else ""
    problem = tile_cost_model.Problem(1, 1, 1, 1, 1, 4 if dtype == "fp32" else 2, weights=weights, scales=scales)
    cases = []
    for kernel, block, gated in ((up._up, config.up, True), (down._down, config.down, False)):
        pointers = dict.fromkeys(("p_x", "p_inner"), f"*{rows_in}") | {"p_out": f"*{dtype}"}
        step = block.BK // (2 if config.four else 1)  # bytes of two numbers each, halves of rows
        pointers["w"] = f"tensordesc<{kept}[{block.BN}, {step}]>" if engine else f"*{kept}"
        pointers["inner"] = f"tensordesc<{rows_in}[{config.BM}, {step}]>" if engine else f"*{rows_in}"
        constants: dict[str, Any] = {
            "BM": config.BM,
            "BN": block.BN,
            "BK": block.BK,
            "TAIL": 0 if block.flat else config.tail,
            "GROUP": GROUP,
            "SWAP": config.swap_ab,
            "TMA": engine,
            "SCALES": scales,
            "EIGHT": config.eight,
            "FOUR": config.four,
            "BIAS": special,
            "FLAT": block.flat,
        }
        if gated:
            constants |= {"EVEN": not special, "ALIGNED": True, "ACTIVATION": activation}
        name = f"{'up' if gated else 'down'} {config.name} {suffix}"
        # One stage fewer on GPUs older than Hopper, and where weights are widened in registers.
        ahead = block.stages - (0 if engine and (weights == "wide" or config.eight) else 1)
        both = gated and activation != "relu2"
        least = 0 if dtype == "fp32" else ahead * tile_cost_model.stage_bytes(config, block, problem, gated=both)
        signature = _COMMON | pointers
        cases.append(CompileCase(name, kernel, signature, constants, block.warps, block.stages, only, least))
    return cases


def _row_cases() -> list[CompileCase]:
    """Return the variants for few tokens; those with biases also have the clipped activation."""
    cases = []
    for weights, scales in (("wide", "none"), *_EIGHT_BITS, *((four, "group") for four in _FOUR_BITS)):
        four = weights if scales == "group" else ""
        config = (
            tile_cost_model.ROWS_FOUR
            if four
            else tile_cost_model.ROWS
            if weights == "wide"
            else tile_cost_model.ROWS_EIGHT
        )
        kept = "i32" if four else _KEPT.get(weights, "bf16")
        pointers = dict.fromkeys(("p_x", "p_inner", "p_out"), "*bf16") | {"p_w": f"*{kept}"}
        only = {"fp8": ("sm_90", "sm_100"), "int4": ("sm_90",)}.get(weights, ())
        for bias in (False, True):
            kept_as = f" {weights}{' a scale a block' if scales == 'block' else ''}"
            kind = f"{'' if weights == 'wide' else kept_as}{' special' if bias else ''}"
            activation = {"ACTIVATION": "clipped" if bias else "silu"}
            for name, kernel, block, more in (
                ("up", rows._up_rows, config.up, activation),
                ("down", rows._down_rows, config.down, {}),
            ):
                constants: dict[str, Any] = {"BN": block.BN, "BK": block.BK, "STAGES": block.stages}
                constants |= {"SCALES": scales, "FOUR": four, "BIAS": bias} | more
                signature = _COMMON | pointers
                cases.append(CompileCase(f"{name} rows{kind}", kernel, signature, constants, block.warps, only=only))
    rounded = {"p_x": "*bf16", "p_rounded": "*fp8e4nv", "p_scale": "*fp32", "width": "i32", "x_stride": "i32"}
    combined = _COMMON | {"p_rows": "*bf16", "p_out": "*bf16"}
    return [
        *cases,
        CompileCase("round rows", rounding._round_rows, rounded, {"GROUPS": rounding.GROUPS}, only=("sm_90", "sm_100")),
        CompileCase("combine", down._combine, combined, {"TOP_K": 8, "BLOCK": 1024}),
    ]
