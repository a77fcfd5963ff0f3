"""The stages of `make bench-gpu`, the most important first, and the time limit of each."""

from __future__ import annotations

import importlib.util
import os
import shutil
from itertools import product
from pathlib import Path
from typing import Any

from gpu_stages import ROOT, Stage, pytest_command

KERNEL_TESTS = (
    "tests/kernels/triton",
    "tests/kernels/test_against_reference.py",
    "tests/kernels/test_small_operations.py",
)
NOT_TESTS = "tests/kernels/triton/test_compiling.py"  # which needs no GPU
ENGINE_TESTS = ("tests/engine/test_graphs.py", "tests/engine/test_host_tier.py")  # those with parts for GPUs only
MODEL_TESTS = ("tests/model", "tests/engine/test_invariant.py")  # those on "cuda"
NO_MUTANTS = "not mutant"  # they are faulty on purpose, and a process whose GPU they have confused has lost it
# First those that targets are set by, so that a budget that is spent early was spent on them.
LAYERS = "Qwen3-30B-A3B,E128-2816x704,Mixtral-8x7B,DeepSeek-V3,Qwen3-235B,gpt-oss-20b,OLMoE,GLM-4.5-Air"
TOKENS, ROUTINGS = "1,16,64,256,1024,4096,16384", "uniform,zipf"
LAYER = ("--kernels", "moe_layer", "--shapes", LAYERS, "--tokens", TOKENS, "--routing", ROUTINGS)
FP8_TOKENS = "16384"  # for which a target is set; of fewer below
FP8_LAYER = ("--kernels", "moe_layer_fp8", "--shapes", LAYERS, "--tokens", FP8_TOKENS, "--routing", "uniform")
FEW_BITS = ("--kernels", "moe_layer_fp8,moe_layer_mxfp4,moe_layer_int4", "--shapes", "gpt-oss-20b,Qwen3-30B-A3B")
FEW_ROWS = ("--tokens", "1,4,16,64", "--routing", "uniform")
OTHERS = "paged_attention_decode,paged_attention_prefill,rms_norm,add_rms_norm,invariant_linear,route,sample"
OTHERS_OF = "Qwen3-30B-A3B,gpt-oss-20b"
RECURRENCES = "gated_delta", "kimi_delta", "mamba2", "lightning_attention"
RECURRENT_KERNELS = ",".join(f"{kind}_{part}" for kind in RECURRENCES for part in ("decode", "prefill"))
RECURRENT_SHAPES = "Qwen3-Next,Kimi-Linear-48B,Nemotron-3-Nano,MiniMax-Text-01"
RECURRENT = ("--kernels", RECURRENT_KERNELS, "--shapes", RECURRENT_SHAPES)
SPARSE = ("--kernels", "index_select,sparse_attention_decode,sparse_attention_prefill", "--shapes", "DeepSeek-V3.2")
ENGINE_LAYERS = "24"  # of 48: drawing, capturing and running all of them would take longer than there is
SANITIZERS = ("memcheck", "racecheck")
KERNELS = ("-m", "moiety_kernels")


def wanted() -> list[dict[str, Any]]:
    """Return the measured points of expert layers that have targets."""
    points = [("moe_layer", *point) for point in product(LAYERS.split(","), TOKENS.split(","), ROUTINGS.split(","))]
    points += [("moe_layer_fp8", *point) for point in product(LAYERS.split(","), FP8_TOKENS.split(","), ("uniform",))]
    return [
        {"kernel": kernel, "shape": shape, "tokens": int(tokens), "routing": routing}
        for kernel, shape, tokens, routing in points
    ]


def on_gpu(scratch: Path, arch: str) -> list[Stage]:
    """Return the stages with targets, whose time limits are guaranteed, and then the others in the remaining time."""
    bench = [*KERNELS, "bench", "--device", "cuda", "--time-budget-s"]
    kernel_tests = [*KERNEL_TESTS, "--ignore", NOT_TESTS, "-k", NO_MUTANTS]
    engine_tests = [path for path in ENGINE_TESTS if (ROOT / path).exists()]
    at_once = ["-n", "auto"] if importlib.util.find_spec("xdist") else []  # tests spend their time compiling
    tool = shutil.which("compute-sanitizer", path=f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin")
    engine = [str(ROOT / "benchmarks" / "gpu_engine.py"), "--layers", ENGINE_LAYERS, "--time-budget", "135"]
    return [
        Stage("tests", pytest_command(scratch, *at_once, *kernel_tests), 65.0),
        Stage("tune", [*KERNELS, "tune", "--shapes", LAYERS, "--tokens", TOKENS], 40.0),
        _measuring("moe_layer", [*bench, "75", *LAYER], 90.0, scratch),
        _measuring("fp8_layer", [*bench, "18", *FP8_LAYER], 28.0, scratch),
        _measuring("engine", engine, 160.0, scratch, needs=("msgspec",)),
        *(_sanitized(name, scratch, kernel_tests, tool) for name in SANITIZERS),
        Stage("model_tests", pytest_command(scratch, *at_once, *MODEL_TESTS, "-k", "cuda"), 60.0, needs=("msgspec",)),
        Stage("engine_tests", pytest_command(scratch, *engine_tests), 45.0, needs=("msgspec",)),
        _measuring("few_bits", [*bench, "20", *FEW_BITS, *FEW_ROWS], 35.0, scratch),
        _measuring("kernels", [*bench, "25", "--kernels", OTHERS, "--shapes", OTHERS_OF], 45.0, scratch),
        _measuring("recurrent", [*bench, "25", *RECURRENT], 45.0, scratch),
        _measuring("sparse", [*bench, "10", *SPARSE], 25.0, scratch),
        Stage("report", [*KERNELS, "report", "--target", arch], 90.0),
    ]


def rehearsal(scratch: Path) -> list[Stage]:
    """Return the same stages as far as they run without a GPU, each in its smallest form."""
    bench = [*KERNELS, "bench", "--device", "cpu", "--time-budget-s", "20"]
    small = ["--shapes", "moiety-demo", "--tokens", "1", "--routing", "uniform", "--kernels"]
    tests = [f"{KERNEL_TESTS[0]}/test_rms_norm.py", "-k", NO_MUTANTS]
    engine = [str(ROOT / "benchmarks" / "gpu_engine.py"), "--rehearse"]
    return [
        Stage("tests", pytest_command(scratch, *tests), 120.0),
        Stage("tune", [*KERNELS, "tune", "--help"], 30.0),
        _measuring("moe_layer", [*bench, *small, "moe_layer"], 120.0, scratch),
        _measuring("fp8_layer", [*bench, *small, "moe_layer_fp8"], 60.0, scratch),
        _measuring("few_bits", [*bench, *small, "moe_layer_mxfp4,moe_layer_int4"], 60.0, scratch),
        _measuring("kernels", [*bench, *small, "rms_norm"], 60.0, scratch),
        _measuring("recurrent", [*bench, *small, ",".join(f"{kind}_decode" for kind in RECURRENCES)], 60.0, scratch),
        _measuring("sparse", [*bench, *small, "index_select,sparse_attention_decode"], 60.0, scratch),
        _measuring("engine", engine, 120.0, scratch, needs=("msgspec",)),
        Stage("smallest_tests", pytest_command(scratch, "-p", "gpu_smallest", *tests), 60.0),
        Stage("report", [*KERNELS, "report", "rms_norm"], 90.0),
    ]


def _measuring(name: str, command: list[str], limit_s: float, scratch: Path, *, needs: tuple[str, ...] = ()) -> Stage:
    result = scratch / f"{name}.json"
    return Stage(name, [*command, "--output", str(result)], limit_s, result=result, needs=needs)


def _sanitized(name: str, scratch: Path, tests: list[str], tool: str | None) -> Stage:
    """Return a few tests with every tensor in its own allocation, so that overruns are detected."""
    flags = ["--tool", name, "--error-exitcode", "99", "--target-processes", "application-only"]
    before = ["env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1", tool or "compute-sanitizer", *flags]
    command = pytest_command(scratch, "-x", "-p", "gpu_smallest", *tests)
    return Stage(name, command, 30.0, before=before, lacks="" if tool else "compute-sanitizer is not installed")
