"""Every variant that the cost model may choose, for the report of what they take.

Hopper's and Blackwell's are those with the copy engine, the others' those without; one of the latter is built for
Hopper too, where the weights' layout may ask for it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from moiety_kernels.gpu.cases import CompileCase
from moiety_kernels.grouped_gemm import tiles
from moiety_kernels.grouped_gemm.kernels import down, rounding, rows, up
from moiety_kernels.grouped_gemm.kernels.launching import GROUP

if TYPE_CHECKING:
    from moiety_kernels.grouped_gemm.tiles import TileConfig

_OTHERS_HEIGHTS = (16, 128)  # of tiles, whose variants are built for targets other than Hopper
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


def compile_cases() -> list[CompileCase]:
    """Those of 16 bits for each target, with and without biases, and float32's."""
    found = _row_cases()
    for config in tiles.HOPPER[1:]:
        others = ("sm_100",) if config.BM in _OTHERS_HEIGHTS and config.up.flat and config.up.BK == 64 else ()
        found += _tile_cases(config, "bf16", ("sm_90", *others), engine=True)
    for config in tiles.PORTABLE[1:]:
        if config.BM in _OTHERS_HEIGHTS:
            found += _tile_cases(config, "bf16", ("sm_80", "gfx942"), engine=False)
    found += _tile_cases(tiles.HOPPER[1], "bf16", ("sm_90",), engine=False)
    found += _tile_cases(tiles.HOPPER[-1], "bf16", ("sm_90",), engine=True, special=True)
    for config in tiles.NARROW[1:]:
        found += _tile_cases(config, "bf16", ("sm_90",), engine=True, weights="int8", scales="row")
    found += _tile_cases(tiles.NARROW[2], "bf16", ("sm_90",), engine=True, weights="fp8", scales="block")
    for config in tiles.EIGHT:
        for scales in ("row", "block"):
            found += _tile_cases(config, "bf16", ("sm_90",), engine=True, weights="fp8", scales=scales)
    older = replace(tiles.PORTABLE[1], four="mxfp4")
    found += _tile_cases(older, "bf16", ("sm_80", "gfx942"), engine=False, weights="mxfp4", scales="group")
    for config in tiles.FOUR:
        for four in ("int4", "mxfp4"):
            only = replace(config, four=four)
            found += _tile_cases(only, "bf16", ("sm_90",), engine=True, weights=four, scales="group")
    found += _tile_cases(tiles.EIGHT[-1], "bf16", ("sm_90",), engine=True, special=True, weights="fp8", scales="block")
    return found + _tile_cases(tiles.SINGLE[-1], "fp32", ("sm_90",), engine=True)


def _tile_cases(
    config: TileConfig,
    dtype: str,
    only: tuple[str, ...],
    *,
    engine: bool,
    special: bool = False,
    weights: tiles.Weights = "wide",
    scales: tiles.Scales = "none",
) -> list[CompileCase]:
    """Up and down of one choice; `special`: with biases, the clipped activation and a width that no step divides."""
    kept = {"wide": dtype, "int8": "i8", "fp8": "fp8e4nv"}.get(weights, "u8")
    rows_in = kept if config.eight else dtype
    suffix = f"{dtype}{'' if engine else ' by addresses'}{' special' if special else ''}"
    suffix += f" {weights} a scale a {scales}" if weights != "wide" else ""
    problem = tiles.Problem(1, 1, 1, 1, 1, 4 if dtype == "fp32" else 2, weights=weights, scales=scales)
    cases = []
    for kernel, block, gated in ((up._up, config.up, True), (down._down, config.down, False)):
        pointers = dict.fromkeys(("p_x", "p_inner"), f"*{rows_in}") | {"p_out": f"*{dtype}"}
        step = block.BK // (2 if config.four else 1)  # bytes of two numbers, halves of rows
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
            constants |= {"EVEN": not special, "ALIGNED": True, "ACTIVATION": "clipped" if special else "silu"}
        name = f"{'up' if gated else 'down'} {config.name} {suffix}"
        # A stage fewer on what is older than Hopper, and where weights leave it for registers.
        ahead = block.stages - (0 if engine and (weights == "wide" or config.eight) else 1)
        least = 0 if dtype == "fp32" else ahead * tiles.stage_bytes(config, block, problem, gated=gated)
        signature = _COMMON | pointers
        cases.append(CompileCase(name, kernel, signature, constants, block.warps, block.stages, only, least))
    return cases


def _row_cases() -> list[CompileCase]:
    config, pointers = tiles.ROWS, dict.fromkeys(("p_x", "p_w", "p_inner", "p_out", "p_rows"), "*bf16")
    signature = _COMMON | pointers

    def constants(block: tiles.Block) -> dict[str, Any]:
        return {"BN": block.BN, "BK": block.BK, "STAGES": block.stages, "SCALES": "none", "BIAS": False}

    rounded = {"p_x": "*bf16", "p_rounded": "*fp8e4nv", "p_scale": "*fp32", "width": "i32", "x_stride": "i32"}
    gated = constants(config.up) | {"ACTIVATION": "silu"}
    return [
        CompileCase("up rows", rows._up_rows, signature, gated, config.up.warps),
        CompileCase("down rows", rows._down_rows, signature, constants(config.down), config.down.warps),
        CompileCase("round rows", rounding._round_rows, rounded, {"GROUPS": rounding.GROUPS}, only=("sm_90", "sm_100")),
        CompileCase("combine", down._combine, signature, {"TOP_K": 8, "BLOCK": 1024}),
    ]
