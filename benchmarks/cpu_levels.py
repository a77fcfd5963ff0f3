"""Throughput of `moiety bench engine` by level of the CPU's features and by format of the weights.

    python benchmarks/cpu_levels.py [--levels avx2 avx512 …] [--rounds 3] [--work FOLDER] [--output FILE]

Each level (MOIETY_CPU_LEVEL, `docs/cpu-kernels.md`) runs in processes of its own, and torch is limited to AVX2 at the
level avx2. A process loads the random checkpoint of 670 M parameters in all formats, which do not fit into the caches,
and runs the requests of `moiety bench engine` with each format in turn, in small rounds, with one thread. The figures
are tokens by the processor's time, which other processes of the machine change less than the wall's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch
from on_checkpoint import find_or_make_checkpoint, loaded_run, make_rounds_parser
from packed_formats import KV_BYTES, SETTLING_S, measure, write

from moiety_engine.bench.lengths import BenchLengths
from moiety_engine.config import EngineConfig
from moiety_engine.environment import environment
from moiety_engine.loop import EngineLoop
from moiety_engine.startup import load_loop
from moiety_kernels.cpu import paths
from moiety_kernels.cpu.instructions import ARM_LEVEL, LEVELS
from moiety_kernels.cpu.levels import LEVEL_VARIABLE

WHOLE = "whole"  # the level that withholds nothing
FORMATS = ["bfloat16", "int8", "int4", "awq", "gptq", "awq_32"]  # the kernels multiply the last one as GGUF's Q4_K
ON_LOADING = {"int8", "int4"}  # quantized when loaded; the others are checkpoints
INPUT_TOKENS, WARMING_TOKENS = 32, 4


@dataclass
class LevelFigures:
    """Tokens per second of the processor's time of one level: by number of streams, by format, by round."""

    paths: dict[str, str]
    environment: dict[str, Any]
    tokens_per_s: dict[str, dict[str, list[float]]] = field(default_factory=dict)


def open_loop(kind: str, checkpoint: Path, work: Path) -> EngineLoop:
    """Load one format with one thread, and warm it up."""
    folder = checkpoint
    if kind not in {"bfloat16", *ON_LOADING}:
        folder = work / kind
        if not (folder / "model.safetensors").exists():
            write(kind, checkpoint, folder)
    config = EngineConfig(
        model=str(folder),
        name=kind,
        dtype="bfloat16",
        quantization=kind if kind in ON_LOADING else "auto",
        num_threads=1,
        kv_memory_bytes=KV_BYTES,
        prefix_caching=False,
    )
    loop = load_loop(config)
    loop.executor.settle_weights(SETTLING_S)
    loop.warm_up()
    return loop


def measure_level(checkpoint: Path, options: argparse.Namespace) -> LevelFigures:
    """Run all formats in turn at this process's level."""
    torch.set_num_threads(1)
    loops = {kind: open_loop(kind, checkpoint, options.work) for kind in FORMATS}
    served = {weights: one["path"] for weights, one in paths.report()["paths"].items()}
    found = LevelFigures(served, environment(loops["bfloat16"]))
    for prompts, kind in product(options.prompts, FORMATS):
        measure(loops[kind], prompts, 0, BenchLengths(INPUT_TOKENS, WARMING_TOKENS))
        found.tokens_per_s.setdefault(str(prompts), {})[kind] = []
    for number in range(1, options.rounds + 1):
        for prompts, kind in product(options.prompts, FORMATS):
            one = measure(loops[kind], prompts, number, BenchLengths(INPUT_TOKENS, options.output_tokens))
            found.tokens_per_s[str(prompts)][kind].append(one["processor"])
    return found


def run_level(level: str) -> dict[str, Any]:
    """Measure a level in a process of its own."""
    variables = {LEVEL_VARIABLE: "" if level == WHOLE else level}
    if level in ("avx2", "avxvnni", ARM_LEVEL):
        variables["ATEN_CPU_CAPABILITY"] = "avx2"
    command = [sys.executable, __file__, *sys.argv[1:], "--in-this-process"]
    done = subprocess.run(command, env=os.environ | variables, stdout=subprocess.PIPE, text=True, check=True)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def summed_up(figures: dict[str, Any]) -> dict[str, Any]:
    """Return the medians of each format, and the median of the ratios to bfloat16 of the rounds."""
    found: dict[str, Any] = {}
    for streams, of_formats in figures["tokens_per_s"].items():
        base = of_formats["bfloat16"]
        found[streams] = {
            kind: {
                "tokens_per_s": round(statistics.median(own), 1),
                "ratio_to_bfloat16": round(statistics.median(a / b for a, b in zip(own, base, strict=True)), 2),
            }
            for kind, own in of_formats.items()
        }
    return found


def main() -> None:
    """Run all levels one after the other, and write the results."""
    parser = make_rounds_parser(__doc__, "cpu_levels.json")
    parser.add_argument("--work", type=Path, default=Path.home() / ".cache" / "moiety-benchmarks")
    parser.add_argument("--levels", nargs="+", default=["avx2", "avx512", WHOLE], choices=[*LEVELS, WHOLE])
    parser.add_argument("--prompts", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--in-this-process", action="store_true", help="measure the level of the environment only")
    options = parser.parse_args()
    checkpoint = find_or_make_checkpoint(options.work)
    if options.in_this_process:
        sys.stdout.write(json.dumps(asdict(measure_level(checkpoint, options))) + "\n")
        return
    levels = {}
    for level in options.levels:
        figures = run_level(level)
        levels[level] = {"medians": summed_up(figures)} | figures
        print(level, json.dumps(levels[level]["medians"]), file=sys.stderr, flush=True)
    result = {**loaded_run(options), "input_tokens": INPUT_TOKENS, "levels": levels}
    options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
