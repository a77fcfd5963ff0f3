"""Summary of a `make bench-gpu` run, as Markdown and for a terminal: targets and tables. Pure."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable

from gpu_targets import LAYERS, Row, Verdict


def render(report: Row, verdicts: list[Verdict]) -> str:
    """Return the whole page."""
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
    if verdicts:
        lines += ["", "## Targets", "", *_table(("target", "", "holds at", "worst"), map(_verdict, verdicts))]
    layers = [row for row in report["rows"] if row["kernel"] in LAYERS]
    if layers:
        lines += ["", "## The expert layer", "", *_table(_LAYER_COLUMNS, map(_layer, layers))]
    others = [row for row in report["rows"] if row["kernel"] not in LAYERS]
    if others:
        columns = ("kernel", "shape", "tokens", "µs", "GB/s", "TFLOP/s", "of roofline", "rivals, µs")
        lines += ["", "## Other kernels", "", *_table(columns, map(_other, others))]
    engine = report["engine"] or {}
    if engine:
        lines += ["", "## The engine", "", _engine_of(engine), "", "```json", _figures(engine), "```"]
    missing = [f"{one['kernel']} of {one['shape']} at {one['tokens']}: {one['error']}" for one in report["failed"]]
    missing += [f"{one['kernel']} of {one['shape']} at {one['tokens']}: {one['reason']}" for one in report["skipped"]]
    missing += [f"{name} at {count} points, {why}" for (name, why), count in _rivals_that_failed(layers).items()]
    if missing:
        lines += ["", "## Not measured", "", *(f"- {line}" for line in missing)]
    return "\n".join(lines) + "\n"


def told(verdict: Verdict) -> str:
    """Return one line for a terminal."""
    return f"{_mark(verdict):<12} {verdict.held}/{verdict.points}  {verdict.target}; {verdict.worst}"


def _mark(verdict: Verdict) -> str:
    return "holds" if verdict.is_kept else "MISSED" if verdict.points else "not measured"


def _verdict(verdict: Verdict) -> list[str]:
    return [verdict.target, _mark(verdict), f"{verdict.held} of {verdict.points}", verdict.worst]


def _engine_of(engine: Row) -> str:
    """Return the configuration of the run; the real model has 48 layers."""
    shape = engine["settings"]["shape"]
    layers, width = shape["num_hidden_layers"], shape["hidden_size"]
    experts = f"{shape['num_experts']} experts, top-{shape['num_experts_per_tok']}"
    return f"Random weights in the shape of {shape['model_type']}: {layers} layers, width {width}, {experts}."


def _figures(engine: Row) -> str:
    return json.dumps(engine["figures"], indent=1)


def _rivals_that_failed(layers: list[Row]) -> Counter[tuple[str, str]]:
    failed = [item for row in layers for item in row.get("rivals_failed", {}).items()]
    return Counter((name, why[:120]) for name, why in failed)


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
