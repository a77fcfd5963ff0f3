"""One run of `moiety bench kernels`: measures points in sequence within a time and memory budget and returns rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import psutil
import torch
from torch import Tensor

from moiety_kernels.bench import moe_layer, work
from moiety_kernels.bench.clocks import Call, CallFailed, Clock, Timing, clock_of, measure
from moiety_kernels.bench.operation import Point
from moiety_kernels.bench.others import OPERATIONS
from moiety_kernels.bench.shapes import LayerShape
from moiety_kernels.bench.speeds import measure_speeds, roofline_speeds
from moiety_kernels.bench.work import Speeds, Work, floor_s

MOE_LAYER = "moe_layer"
LAYERS = (MOE_LAYER, *moe_layer.NARROW)
KERNELS = (*LAYERS, *OPERATIONS)
OURS, OURS_IN_BF16, OURS_BY_TILES = "moiety", "moiety_bf16", "moiety_tiles"
# Relative difference of two implementations: about 0.005 in bfloat16, 0.07 with weights and rows in float8, 0.26 with
# random weights in mxfp4; int4 rounds less.
LARGEST_DIFFERENCE = {MOE_LAYER: 0.03, "moe_layer_fp8": 0.15, "moe_layer_int4": 0.3, "moe_layer_mxfp4": 0.4}
_MEMORY_SHARE = 0.9  # of free memory
_LONGEST_POINT_S = 2.0
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Settings:
    kernels: tuple[str, ...]
    shapes: tuple[LayerShape, ...]
    tokens: tuple[int, ...]
    routings: tuple[str, ...]
    time_budget_s: float
    rivals: bool = True
    seed: int = 0

    @property
    def num_points(self) -> int:
        each = sum(len(self.routings) if kernel in LAYERS else 1 for kernel in self.kernels)
        return each * len(self.shapes) * len(self.tokens)


@dataclass(slots=True)
class Report:
    """Results of a run, filled in as it goes, so that they are complete whenever it ends."""

    device: str
    speeds: Speeds
    roofline: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    failed: list[Row] = field(default_factory=list)
    skipped: list[Row] = field(default_factory=list)


@dataclass(slots=True)
class _Run:
    settings: Settings
    device: torch.device
    clock: Clock
    report: Report
    end: float  # in time.perf_counter() seconds
    points_left: int
    on_point: Callable[[str, Report], None]

    def measure(self, kernel: str, shape: LayerShape, tokens: int, make: Callable[[], Row]) -> None:
        """Measure one point and record its row or its failure."""
        self.points_left -= 1
        try:
            self.report.rows.append(make())
        except Exception as exc:  # from a kernel, the compiler or the device, which have no common base class
            what = f"{type(exc).__name__}: {exc}"[:500]
            self.report.failed.append({"kernel": kernel, "shape": shape.name, "tokens": tokens, "error": what})

    def budget_s(self) -> float:
        """Return an equal share of the remaining time; making the tensors uses part of it."""
        return min(_LONGEST_POINT_S, 0.6 * (self.end - time.perf_counter()) / max(1, self.points_left))

    def skip(self, kernel: str, shape: LayerShape, tokens: Sequence[int], why: str) -> None:
        """Record points that are not measured; points that differ only in their tokens share one entry."""
        skipped, like = self.report.skipped, {"kernel": kernel, "shape": shape.name, "reason": why}
        if skipped and {name: skipped[-1][name] for name in like} == like:
            skipped[-1]["tokens"] += [count for count in tokens if count not in skipped[-1]["tokens"]]
        else:
            skipped.append({**like, "tokens": [*tokens]})

    def refusal(self, num_bytes: int) -> str | None:
        """Return why a point of that size is not measured; None if it is."""
        if time.perf_counter() > self.end:
            return "the time budget was spent; raise --time-budget-s or name fewer shapes"
        free = free_bytes(self.device)
        if num_bytes > _MEMORY_SHARE * free:
            return f"takes about {num_bytes / 1e9:.0f} GB of memory, and {free / 1e9:.0f} GB are free"
        return None


def run(settings: Settings, device: torch.device, on_point: Callable[[str, Report], None]) -> Report:
    """Measure every point that the budgets allow.

    `on_point` is called before each point with its name and the report so far. A point at which our own kernel fails is
    listed in `failed`; the others still run.
    """
    begin = time.perf_counter()
    clock = clock_of(device)
    measured = measure_speeds(device, clock)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    speeds, source = roofline_speeds(name, measured)
    report = Report(name, speeds, {**asdict(speeds), "source": source, "measured": asdict(measured)})
    end = begin + settings.time_budget_s
    state = _Run(settings, device, clock, report, end, settings.num_points, on_point)
    with torch.inference_mode():
        for shape in settings.shapes:
            for kernel in settings.kernels:
                (_run_moe_layer if kernel in LAYERS else _run_operation)(state, kernel, shape)
    return report


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    return int(psutil.virtual_memory().available)


def _run_moe_layer(state: _Run, kernel: str, shape: LayerShape) -> None:
    settings = state.settings
    refused = state.refusal(moe_layer.weight_bytes(shape) * (2 if kernel in moe_layer.NARROW else 1))
    if refused is not None:
        state.points_left -= len(settings.tokens) * len(settings.routings)
        state.skip(kernel, shape, settings.tokens, refused)
        return
    weights = moe_layer.make_weights(shape, state.device)
    narrow = moe_layer.in_few_bits(weights, moe_layer.NARROW[kernel][0]) if kernel in moe_layer.NARROW else None
    for tokens in settings.tokens:
        for routing in settings.routings:
            state.on_point(f"{kernel} {shape.name}, {tokens} tokens, {routing}", state.report)
            refused = state.refusal(moe_layer.scratch_bytes(shape, tokens))
            if refused is not None:
                state.points_left -= 1
                state.skip(kernel, shape, [tokens], refused)
                continue
            state.measure(
                kernel, shape, tokens, partial(_moe_row, state, kernel, shape, (weights, narrow), tokens, routing)
            )


def _moe_row(
    state: _Run,
    kernel: str,
    shape: LayerShape,
    held: tuple[moe_layer.Weights, moe_layer.NarrowWeights | None],
    tokens: int,
    routing: str,
) -> Row:
    weights, narrow = held
    inputs = moe_layer.make_inputs(shape, weights, tokens, routing, state.settings.seed)
    dtype = shape.dtype if narrow is None else moe_layer.NARROW[kernel][1]
    ours = moe_layer.ours(inputs) if narrow is None else moe_layer.ours_narrow(inputs, narrow)
    least = work.moe_layer(shape, tokens, inputs.active, dtype=dtype)
    distance = checked_difference(ours(), moe_layer.grouped_mm(inputs)(), LARGEST_DIFFERENCE[kernel])
    rivals: dict[str, Call] = {}
    if narrow is not None:
        rivals = {OURS_IN_BF16: moe_layer.ours(inputs)}  # the gain of quantization
    elif state.settings.rivals:
        rivals = moe_layer.rivals(inputs, is_bound_by_memory=work.is_bound_by_memory(least, state.report.speeds))
    tiled = moe_layer.ours_by_tiles(inputs, narrow)
    if tiled is not None:
        rivals[OURS_BY_TILES] = tiled  # the gain of the separate kernel for few rows
    row = _row(state, kernel, shape, tokens, Point(ours, rivals, least, dtype))
    row["routing"] = routing
    row["active_experts"] = inputs.active
    row["rows_per_expert"] = round(tokens * shape.top_k / shape.num_experts, 2)
    row["difference"] = distance
    return row


def _run_operation(state: _Run, kernel: str, shape: LayerShape) -> None:
    operation = OPERATIONS[kernel]
    for tokens in state.settings.tokens:
        state.on_point(f"{kernel} {shape.name}, {tokens} tokens", state.report)
        if not operation.tokens(shape, tokens):
            state.points_left -= 1
            continue
        refused = state.refusal(operation.bytes(shape, tokens))
        if refused is None:
            state.measure(kernel, shape, tokens, partial(_operation_row, state, kernel, shape, tokens))
            continue
        state.points_left -= 1
        state.skip(kernel, shape, [tokens], refused)


def _operation_row(state: _Run, kernel: str, shape: LayerShape, tokens: int) -> Row:
    return _row(state, kernel, shape, tokens, OPERATIONS[kernel].make(shape, tokens, state.device))


def _row(state: _Run, kernel: str, shape: LayerShape, tokens: int, point: Point) -> Row:
    """Return the fields that docs/kernels.md lists. Raises CallFailed where ours fails."""
    rivals = point.rivals if state.settings.rivals else {}
    times, failed = measure({OURS: point.ours, **rivals}, state.clock, budget_s=state.budget_s())
    if OURS in failed:
        raise failed[OURS]
    mine = times.pop(OURS)
    speeds = state.report.speeds
    if point.dtype == moe_layer.FLOAT8 and state.device.type == "cuda":
        speeds = work.in_float8(speeds)
    return {
        "kernel": kernel,
        "shape": shape.name,
        "tokens": tokens,
        "routing": None,
        "dtype": point.dtype,
        **_figures(mine, point.work, speeds),
        "rivals": {name: _us(one) for name, one in times.items()},
        "rivals_failed": {name: str(exc) for name, exc in failed.items()},
        "no_graph": [name for name, one in {OURS: mine, **times}.items() if not one.graph],
    }


def _figures(timing: Timing, least: Work, speeds: Speeds) -> Row:
    return {
        "time_us": _us(timing),
        "floor_us": round(1e6 * floor_s(least, speeds), 2),
        "arithmetic_us": round(1e6 * least.flops / speeds.flops_per_s, 2),
        "tflops": round(least.flops / timing.seconds / 1e12, 3),
        "gb_per_s": round(least.bytes / timing.seconds / 1e9, 2),
        "roofline_fraction": round(floor_s(least, speeds) / timing.seconds, 4),
        "spread": round(timing.spread, 3),
        "repeats": timing.repeats,
    }


def checked_difference(ours: Tensor, theirs: Tensor, largest: float) -> float:
    """Return ‖ours − theirs‖ / ‖theirs‖. Raises CallFailed if it exceeds rounding: a wrong result is not timed."""
    distance = ((ours.float() - theirs.float()).norm() / theirs.float().norm()).item()
    if not distance <= largest:  # also true for NaN
        raise CallFailed(f"the result differs from torch's by {distance:.3g} of it")
    return float(f"{distance:.3g}")


def _us(timing: Timing) -> float:
    return round(1e6 * timing.seconds, 2)
