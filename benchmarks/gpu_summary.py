"""What a run of `make bench-gpu` comes to: targets and whether they hold, and tables, as Markdown. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

Row = dict[str, Any]
SLACK, EXTRA_US = 1.15, 10.0  # of the time for the bytes, where they are what takes time
LAYERS = ("moe_layer", "moe_layer_fp8", "moe_layer_int4", "moe_layer_mxfp4")
OURS_IN_BF16, OURS_BY_TILES = "moiety_bf16", "moiety_tiles"
GAIN = 1.4  # of float8 over bfloat16
SKEW = 1.1  # of the even time for the same bytes and operations
# Bounds, that route, gather and combine nothing; and ourselves.
NO_RIVALS = ("cublas_batched", "cublas_dense", OURS_BY_TILES)


def render(report: Row) -> str:
    """The whole page."""
    environment = report["environment"]
    versions = [
        f"{name} {environment[name]}" for name in ("python", "torch", "cuda", "triton") if environment.get(name)
    ]
    lines = [
        f"# Kernels on {environment.get('device', 'no GPU')}, {report['date']}",
        "",
        f"{', '.join(versions)}; revision {environment.get('git_revision')}; "
        f'`{report["settings"]["command"]} ARGS="{" ".join(report["settings"]["arguments"])}"`',
        "",
        *_table(("stage", "seconds", "outcome"), map(_stage, report["stages"])),
    ]
    layers = [row for row in report["rows"] if row["kernel"] in LAYERS]
    if layers:
        lines += ["", "## Targets", "", *_table(("target", "holds at", "worst"), map(_verdict, verdicts(layers)))]
        lines += ["", "## The expert layer", "", *_table(_LAYER_COLUMNS, map(_layer, layers))]
    others = [row for row in report["rows"] if row["kernel"] not in LAYERS]
    if others:
        columns = ("kernel", "shape", "tokens", "µs", "GB/s", "TFLOP/s", "of roofline", "rivals, µs")
        lines += ["", "## Other kernels", "", *_table(columns, map(_other, others))]
    missing = [f"{one['kernel']} of {one['shape']} at {one['tokens']}: {one['error']}" for one in report["failed"]]
    missing += [f"{one['kernel']} of {one['shape']} at {one['tokens']}: {one['reason']}" for one in report["skipped"]]
    if missing:
        lines += ["", "## Not measured", "", *(f"- {line}" for line in missing)]
    return "\n".join(lines) + "\n"


def verdicts(rows: list[Row]) -> list[tuple[str, list[tuple[float, Row]]]]:
    """Each target with the points that it speaks of, and by what factor each keeps (1 or less) or misses it."""
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
    """Half the ridge: the arithmetic takes at most half of what the bytes take."""
    if row["arithmetic_us"] > row["floor_us"] / 2:
        return None
    return row["time_us"] / (SLACK * row["floor_us"] + EXTRA_US)


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
        return row["time_us"] / (SKEW * like["time_us"] * row["floor_us"] / like["floor_us"])

    return factor


def _gain(row: Row) -> float | None:
    wide = row["rivals"].get(OURS_IN_BF16)
    return None if row["tokens"] < 16384 or wide is None else GAIN * row["time_us"] / wide


def _rivals(row: Row) -> float | None:
    times = [time for name, time in row["rivals"].items() if name not in NO_RIVALS]
    return row["time_us"] / min(times) if times else None


def _verdict(verdict: tuple[str, list[tuple[float, Row]]]) -> list[str]:
    target, points = verdict
    if not points:
        return [target, "not measured", ""]
    kept = sum(value <= 1 for value, _ in points)
    worst, row = max(points, key=lambda point: point[0])
    where = (
        f"{row['shape']}, {row['tokens']} tokens, {row['routing']}: {row['time_us']:.0f} µs, {worst:.2f} × the target"
    )
    return [target, f"{kept} of {len(points)}", where]


_LAYER_COLUMNS = (
    "shape",
    "type",
    "tokens",
    "routing",
    "µs",
    "floor µs",
    "of roofline",
    "TFLOP/s",
    "GB/s",
    "rivals, µs",
)


def _layer(row: Row) -> list[str]:
    return [
        row["shape"],
        row["dtype"],
        str(row["tokens"]),
        row["routing"],
        f"{row['time_us']:.1f}",
        f"{row['floor_us']:.1f}",
        f"{row['roofline_fraction']:.0%}",
        f"{row['tflops']:.0f}",
        f"{row['gb_per_s']:.0f}",
        _times(row["rivals"]),
    ]


def _other(row: Row) -> list[str]:
    figures = [f"{row['time_us']:.1f}", f"{row['gb_per_s']:.0f}", f"{row['tflops']:.1f}"]
    return [
        row["kernel"],
        row["shape"],
        str(row["tokens"]),
        *figures,
        f"{row['roofline_fraction']:.0%}",
        _times(row["rivals"]),
    ]


def _times(rivals: dict[str, float]) -> str:
    return ", ".join(f"{name} {time:.1f}" for name, time in sorted(rivals.items(), key=lambda item: item[1]))


def _stage(stage: Row) -> list[str]:
    last = next((line for line in reversed(stage["tail"]) if any(map(str.isalnum, line))), "")
    outcome = "passed" if stage["code"] == 0 else stage["why"]
    return [stage["name"], f"{stage['seconds']:.0f}", f"{outcome}: `{last[:100]}`" if last else outcome]


def _table(columns: tuple[str, ...], rows: Iterable[list[str]]) -> list[str]:
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return lines + [f"| {' | '.join(cell.replace('|', '¦') for cell in row)} |" for row in rows]
