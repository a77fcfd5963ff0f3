"""The targets of `make bench-gpu`, and whether a run's results meet them. Pure: figures in, verdicts out.

A target without a measurement is not met, and its verdict says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
SLACK, EXTRA_US = 1.15, 10.0  # of the time for the bytes, where they are what takes time
LAYERS = ("moe_layer", "moe_layer_fp8", "moe_layer_int4", "moe_layer_mxfp4")
STAGES = {"moe_layer": "moe_layer", "moe_layer_fp8": "fp8_layer"}  # that measure what targets are set for
OURS_IN_BF16, OURS_BY_TILES = "moiety_bf16", "moiety_tiles"
GAIN = 1.4  # of float8 over bfloat16
SKEW = 1.1  # of the even time for the same bytes and operations
# Bounds, that route, gather and combine nothing; and ourselves.
NO_RIVALS = ("cublas_batched", "cublas_dense", OURS_BY_TILES)
# Of the whole engine: what a check of gpu_engine.py is called, and what it holds the engine to.
ENGINE = {
    "decode step at 64 streams": "≤ 1.3 × the time of the fewest bytes",
    "decode step at 256 streams": "≤ 1.3 × the time of the fewest bytes",
    "host work at 64 streams": "≤ 300 µs a step",
    "host work at 256 streams": "≤ 300 µs a step",
    "device waiting at 64 streams": "≤ 300 µs a step for the host, whose work is hidden otherwise",
    "device waiting at 256 streams": "≤ 300 µs a step for the host, whose work is hidden otherwise",
    "no step waits for the device": "whatever is sampled",
    "decode steps are captured": "as CUDA graphs",
    "a replayed step gives the bits of the launched one": "padded or not",
    "outputs with graphs and overlap are those without": "every token",
    "a request gets the same bits alone and in any batch": "batch-invariant",
    "requests were preempted for it": "some of those",
    "what the batch-invariant mode costs": "≤ 5 % of a decode step",
    "continuous against static": "≥ 2.3 × the output tokens/s, on Azure's conversations",
    "continuous against none": "≥ 9.3 × the output tokens/s, on Azure's conversations",
    "fp8 continuous against bf16 static": "≥ 2.3 × the output tokens/s",
    "KV waste": "< 5 %",
    "requests at once": "≥ 2 × those that preallocating the longest length holds",
    "sleep gives the device's memory back": "≥ 95 % of what it says",
    "what was woken answers as before": "every token",
}
CLEAN = {"memcheck": "no access out of bounds", "racecheck": "no race"}


@dataclass(frozen=True, slots=True)
class Verdict:
    """Verdict on a target: `held` of `points` points meet it; `worst` is the worst point, or why there is none."""

    target: str
    held: int
    points: int
    worst: str

    @property
    def is_kept(self) -> bool:
        return 0 < self.points == self.held


def judge(report: Row, stages: list[str]) -> list[Verdict]:
    """Return the verdicts on all targets of the `stages` that were run."""
    wanted = [one for one in report["wanted"] if STAGES[one["kernel"]] in stages]
    found = [_whole(report["rows"], wanted)] if wanted else []
    found += [_of_points(target, points) for target, points in of_layers(report["rows"])] if wanted else []
    if "engine" in stages:
        checks = (report["engine"] or {}).get("checks", {})
        found += [_of_check(name, says, checks.get(name)) for name, says in ENGINE.items()]
        found += [_of_check(name, "", one) for name, one in checks.items() if name not in ENGINE]
    outcomes = {stage["name"]: stage for stage in report["stages"]}
    return found + [_of_stage(name, says, outcomes.get(name)) for name, says in CLEAN.items() if name in stages]


def _whole(rows: list[Row], wanted: list[Row]) -> Verdict:
    """Return the verdict over every point, since a target with missing points is not met."""
    there = {(row["kernel"], row["shape"], row["tokens"], row["routing"]) for row in rows}
    names = [(one["kernel"], one["shape"], one["tokens"], one["routing"]) for one in wanted]
    lacking = [name for name in names if name not in there]
    first = "" if not lacking else f"not {lacking[0][0]} of {lacking[0][1]}, {lacking[0][2]} tokens, {lacking[0][3]}"
    return Verdict(
        "every shape, number of tokens and routing is measured", len(names) - len(lacking), len(names), first
    )


def _of_points(target: str, points: list[tuple[float, Row]]) -> Verdict:
    if not points:
        return Verdict(target, 0, 0, "not measured")
    worst, row = max(points, key=lambda point: point[0])
    where = f"{row['shape']}, {row['tokens']} tokens, {row['routing']}"
    message = f"{where}: {row['time_us']:.0f} µs, {worst:.2f} × the target"
    return Verdict(target, sum(value <= 1 for value, _ in points), len(points), message)


def _of_check(name: str, says: str, check: Row | None) -> Verdict:
    target = f"engine: {name}, {says}" if says else f"engine: {name}"
    if check is None:
        return Verdict(target, 0, 0, "not measured")
    found = ", ".join(f"{key} {_short(value)}" for key, value in check.items() if key not in ("passed", "target"))
    return Verdict(target, int(check["passed"]), 1, found)


def _of_stage(name: str, says: str, outcome: Row | None) -> Verdict:
    target = f"compute-sanitizer {name}: {says}"
    if outcome is None or not outcome["was_run"]:
        return Verdict(target, 0, 0, "not measured" if outcome is None else outcome["why"])
    return Verdict(target, int(outcome["code"] == 0), 1, outcome["why"])


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def of_layers(rows: list[Row]) -> list[tuple[str, list[tuple[float, Row]]]]:
    """Return each target with its points, and the factor by which each meets (1 or less) or misses it."""
    rows = [row for row in rows if row["kernel"] in LAYERS]
    layers, in_float8 = ([row for row in rows if row["kernel"] == kernel] for kernel in LAYERS[:2])
    even = [row for row in layers if row["routing"] == "uniform"]
    return [
        ("bound by memory, up to half the ridge: ≤ 1.15 × floor + 10 µs", _each(even, _memory)),
        ("4,096 tokens of E128 2816×704: ≥ 450 TFLOP/s", _each(even, _prefill)),
        ("16,384 tokens, ≥ 1,000 rows an expert: ≥ 550 TFLOP/s", _each(even, _large)),
        ("skewed: ≤ 1.1 × the even time for the same bytes and operations", _each(layers, _skew_of(even))),
        (f"16,384 tokens in float8: ≥ {GAIN} × as fast as in bfloat16", _each(in_float8, _gain)),
        ("faster than every rival in the run", _each(layers, _rivals)),
        ("few tokens: no slower than in tiles", _each(rows, _by_rows)),
    ]


def _each(rows: list[Row], factor: Callable[[Row], float | None]) -> list[tuple[float, Row]]:
    found = ((factor(row), row) for row in rows)
    return [(value, row) for value, row in found if value is not None]


def _memory(row: Row) -> float | None:
    """Return half the ridge: the arithmetic takes at most half of the time of the bytes."""
    if row["arithmetic_us"] > row["floor_us"] / 2:
        return None
    return float(row["time_us"] / (SLACK * row["floor_us"] + EXTRA_US))


def _by_rows(row: Row) -> float | None:
    return row["time_us"] / row["rivals"][OURS_BY_TILES] if OURS_BY_TILES in row["rivals"] else None


def _prefill(row: Row) -> float | None:
    return 450 / row["tflops"] if (row["shape"], row["tokens"]) == ("E128-2816x704", 4096) else None


def _large(row: Row) -> float | None:
    return 550 / row["tflops"] if row["tokens"] >= 16384 and row["rows_per_expert"] >= 1000 else None


def _skew_of(even: list[Row]) -> Callable[[Row], float | None]:
    by_place = {(row["shape"], row["tokens"]): row for row in even}

    def factor(row: Row) -> float | None:
        like = by_place.get((row["shape"], row["tokens"]))
        if row["routing"] == "uniform" or like is None:
            return None
        return float(row["time_us"] / (SKEW * like["time_us"] * row["floor_us"] / like["floor_us"]))

    return factor


def _gain(row: Row) -> float | None:
    wide = row["rivals"].get(OURS_IN_BF16)
    return None if row["tokens"] < 16384 or wide is None else GAIN * row["time_us"] / wide


def _rivals(row: Row) -> float | None:
    times = [time for name, time in row["rivals"].items() if name not in NO_RIVALS]
    return row["time_us"] / min(times) if times else None
