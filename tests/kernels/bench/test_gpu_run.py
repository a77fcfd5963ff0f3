"""`make bench-gpu` where there is no GPU: its stages end when they must, and its summary says what the figures say."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[3]
FLOOR_US = 100.0


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The modules of the GPU run: `stages`, `targets`, `summary` and `plan`."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    names = ("stages", "targets", "summary", "plan")
    return SimpleNamespace(**{name: importlib.import_module(f"gpu_{name}") for name in names})


def layer(**changes: Any) -> dict[str, Any]:
    usual = {
        "kernel": "moe_layer",
        "shape": "Qwen3-30B-A3B",
        "tokens": 64,
        "routing": "uniform",
        "dtype": "bfloat16",
        "time_us": 110.0,
        "floor_us": FLOOR_US,
        "arithmetic_us": 5.0,
        "roofline_fraction": 0.91,
        "tflops": 300.0,
        "gb_per_s": 3900.0,
        "rows_per_expert": 4.0,
        "rivals": {"torch_grouped_mm": 220.0, "cublas_dense": 20.0},
    }
    return usual | changes


def float8(time_us: float) -> dict[str, Any]:
    """A layer of many tokens that takes 100 µs in bfloat16."""
    rivals = {"moiety_bf16": 100.0}
    return layer(kernel="moe_layer_fp8", dtype="float8", tokens=16384, time_us=time_us, rivals=rivals)


def test_a_stage_that_hangs_ends_with_all_its_processes_and_keeps_what_it_said(gpu: Any, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    script = "import os, time\nchild = os.spawnlp(os.P_NOWAIT, 'sleep', 'sleep', '600')\n"
    script += f"open({str(pid)!r}, 'w').write(str(child))\nprint('begun', flush=True)\ntime.sleep(600)"
    begin = time.monotonic()
    outcome = gpu.stages.run_stage(
        gpu.stages.Stage("hangs", ["-c", script], 600.0),
        python=sys.executable,
        limit_s=3.0,
        environment=dict(os.environ),
        log=tmp_path / "log",
    )
    assert time.monotonic() - begin < 60
    assert (outcome.code, outcome.why, outcome.tail) == (None, "stopped after 3 s", ["begun"])
    child = int(pid.read_text())
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() - begin < 60
        time.sleep(0.01)


def test_a_stage_that_fails_says_so(gpu: Any, tmp_path: Path) -> None:
    outcome = gpu.stages.run_stage(
        gpu.stages.Stage("fails", ["-c", "import sys; sys.exit('no such kernel')"], 60.0),
        python=sys.executable,
        limit_s=60.0,
        environment=dict(os.environ),
        log=tmp_path / "log",
    )
    assert (outcome.code, outcome.why, outcome.tail) == (1, "exit code 1", ["no such kernel"])
    assert not outcome.passed


def test_a_half_written_row_of_a_stage_loses_no_other_rows(gpu: Any, tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text('{"rows": [')
    assert gpu.stages.read_result(tmp_path / "broken.json") == {"unreadable": '{"rows": ['}
    assert gpu.stages.read_result(tmp_path / "absent.json") == {}


def test_missing_requirements_of_a_stage_are_named_before_it_starts(gpu: Any) -> None:
    assert gpu.stages.Stage("a", ["-c", "0"], 1.0, needs=("json", "no_such_package")).obstacle() == (
        "no_such_package is not installed"
    )
    assert gpu.stages.Stage("a", ["/nowhere/script.py"], 1.0).obstacle() == "/nowhere/script.py is not there"
    assert gpu.stages.Stage("a", ["-c", "0"], 1.0, needs=("json",)).obstacle() == ""


def test_the_sanitizer_runs_the_first_tests_of_every_file_and_no_mutants(gpu: Any, tmp_path: Path) -> None:
    for name in ("one", "two"):
        tests = ["a_mutant_is_found", "first", "second", "third"]
        (tmp_path / f"test_{name}.py").write_text("".join(f"def test_{test}(): pass\n" for test in tests))
    command = gpu.stages.pytest_command(tmp_path, "-p", "gpu_smallest", "-k", "not mutant", "-rA", str(tmp_path))
    stage = gpu.stages.Stage("smallest", command, 60.0)
    environment = gpu.stages.environment_of(tmp_path)
    environment.pop("PYTEST_ADDOPTS", None)
    run = {"python": sys.executable, "limit_s": 60.0, "environment": environment, "log": tmp_path / "log"}
    outcome = gpu.stages.run_stage(stage, **run)
    assert outcome.passed, outcome.tail
    assert "4 passed, 4 deselected" in outcome.tail[-1]
    passed = {line.rpartition("::")[2] for line in outcome.tail if line.startswith("PASSED")}
    assert passed == {"test_first", "test_second"}


@pytest.mark.parametrize(
    ("rows", "kept"),
    [
        ([layer(time_us=124.9)], [1, 0, 0, 0, 0, 1, 0]),  # 1.15 × 100 + 10
        ([layer(time_us=125.1)], [0, 0, 0, 0, 0, 1, 0]),
        (
            [layer(time_us=400.0, arithmetic_us=51.0)],
            [0, 0, 0, 0, 0, 0, 0],
        ),  # beyond half the ridge, slower than a rival
        ([layer(shape="E128-2816x704", tokens=4096, arithmetic_us=90.0, tflops=450.0)], [0, 1, 0, 0, 0, 1, 0]),
        ([layer(tokens=16384, arithmetic_us=100.0, rows_per_expert=1024.0, tflops=549.0)], [0, 0, 0, 0, 0, 1, 0]),
        ([layer(tokens=16384, arithmetic_us=100.0, rows_per_expert=1024.0, tflops=551.0)], [0, 0, 1, 0, 0, 1, 0]),
        ([layer(), layer(routing="zipf", time_us=60.4, floor_us=50.0)], [1, 0, 0, 1, 0, 2, 0]),  # 1.1 × 110 × 50 / 100
        ([layer(rivals={"moiety_tiles": 110.0}), layer(rivals={"moiety_tiles": 109.0})], [2, 0, 0, 0, 0, 0, 1]),
        ([float8(71.4)], [0, 0, 0, 0, 1, 0, 0]),
        ([float8(71.5)], [0, 0, 0, 0, 0, 0, 0]),
        ([layer(), layer(routing="zipf", time_us=60.6, floor_us=50.0)], [1, 0, 0, 0, 0, 2, 0]),
    ],
)
def test_targets_hold_where_the_figures_keep_them(gpu: Any, rows: list[dict[str, Any]], kept: list[int]) -> None:
    assert [sum(factor <= 1 for factor, _ in points) for _, points in gpu.targets.of_layers(rows)] == kept


WANTED = [
    {"kernel": "moe_layer", "shape": "Qwen3-30B-A3B", "tokens": 64, "routing": way} for way in ("uniform", "zipf")
]
JUDGED = ["moe_layer", "engine", "memcheck", "racecheck"]


def report(**changes: Any) -> dict[str, Any]:
    """Return the report of a run in which everything was measured and every check passed."""
    usual: dict[Any, Any] = {
        "environment": {"python": "3.12.3"},
        "date": "2026-11-23",
        "settings": {"command": "make bench-gpu", "arguments": []},
        "rows": [layer(), layer(routing="zipf")],
        "failed": [],
        "skipped": [],
        "wanted": WANTED,
        "engine": None,
        "stages": [
            {"name": name, "code": 0, "was_run": True, "why": "", "seconds": 9.0, "tail": []}
            for name in ("memcheck", "racecheck")
        ],
    }
    return usual | changes


def kept(verdicts: list[Any]) -> dict[str, bool]:
    return {verdict.target: verdict.is_kept for verdict in verdicts}


def engine_of(gpu: Any, **changes: Any) -> dict[str, Any]:
    checks = {name: {"passed": True, "target": 1.3, "found": 1.2345678} for name in gpu.targets.ENGINE} | changes
    shape = {
        "model_type": "qwen3_moe", "num_hidden_layers": 24, "hidden_size": 2048,
        "num_experts": 128, "num_experts_per_tok": 8,
    }  # fmt: skip
    return {"checks": checks, "figures": {"replays": True}, "settings": {"shape": shape}}


def test_a_point_that_was_left_out_is_no_target_kept(gpu: Any) -> None:
    all_there, one_missing = (
        gpu.targets.judge(report(), JUDGED)[0],
        gpu.targets.judge(report(rows=[layer()]), JUDGED)[0],
    )
    assert (all_there.is_kept, all_there.points) == (True, 2)
    assert (one_missing.is_kept, one_missing.held, one_missing.points) == (False, 1, 2)
    assert one_missing.worst == "not moe_layer of Qwen3-30B-A3B, 64 tokens, zipf"


def test_every_check_of_the_engine_is_a_target_and_one_that_was_not_made_is_not_kept(gpu: Any) -> None:
    found = kept(gpu.targets.judge(report(engine=engine_of(gpu)), ["engine"]))
    assert len(found) == len(gpu.targets.ENGINE)
    assert all(found.values())
    fewer = engine_of(gpu)
    del fewer["checks"]["KV waste"]
    missed = engine_of(gpu, **{"decode step at 64 streams": {"passed": False, "times_the_floor": 1.41}})
    for engine, name in ((fewer, "KV waste"), (missed, "decode step at 64 streams"), (None, "requests at once")):
        verdicts = gpu.targets.judge(report(engine=engine), ["engine"])
        assert [is_kept for target, is_kept in kept(verdicts).items() if name in target] == [False]
    part = engine_of(gpu, strategies={"passed": False, "error": "out of memory"})
    assert kept(gpu.targets.judge(report(engine=part), ["engine"]))["engine: strategies"] is False


def test_a_sanitizer_that_complains_or_is_not_there_has_found_nothing_clean(gpu: Any) -> None:
    stages = report()["stages"]
    stages[0] |= {"code": 99, "why": "exit code 99"}
    stages[1] |= {"code": None, "was_run": False, "why": "not run: compute-sanitizer is not installed"}
    verdicts = gpu.targets.judge(report(stages=stages), ["memcheck", "racecheck"])
    assert [(one.is_kept, one.points, one.worst) for one in verdicts] == [
        (False, 1, "exit code 99"),
        (False, 0, "not run: compute-sanitizer is not installed"),
    ]


def test_targets_stand_on_the_page_and_on_the_terminal(gpu: Any) -> None:
    engine = engine_of(gpu, **{"KV waste": {"passed": False, "target": 0.05, "fraction": 0.0712345}})
    found = report(engine=engine)
    verdicts = gpu.targets.judge(found, JUDGED)
    page = gpu.summary.render(found, verdicts)
    assert "| engine: KV waste, < 5 % | MISSED | 0 of 1 | fraction 0.07123 |" in page
    assert "24 layers" in page
    assert gpu.summary.told(verdicts[0]).startswith("holds        2/2")
    nothing = gpu.targets.judge(report(rows=[layer(tokens=64)]), ["moe_layer"])
    assert any(line.startswith("not measured 0/0  4,096 tokens") for line in map(gpu.summary.told, nothing))


def test_every_stage_that_a_target_needs_keeps_its_time_whatever_earlier_ones_take(gpu: Any, tmp_path: Path) -> None:
    import bench_gpu

    stages = gpu.plan.on_gpu(tmp_path, "sm_90")
    names = [stage.name for stage in stages]
    judged = {*gpu.targets.STAGES.values(), "engine", *gpu.targets.CLEAN}
    last = max(names.index(name) for name in judged)
    assert sum(stage.limit_s for stage in stages[: last + 1]) + bench_gpu.MIN_S <= bench_gpu.LIMIT_S
    assert bench_gpu.LIMIT_S < 480


def test_every_shape_number_of_tokens_and_routing_is_wanted(gpu: Any) -> None:
    from moiety_kernels.bench.shapes import MODELS, ROUTINGS, TOKENS

    points = {
        (one["shape"], one["tokens"], one["routing"]) for one in gpu.plan.wanted() if one["kernel"] == "moe_layer"
    }
    assert points == {(shape.name, count, routing) for shape in MODELS for count in TOKENS for routing in ROUTINGS}
    in_float8 = {(one["shape"], one["tokens"]) for one in gpu.plan.wanted() if one["kernel"] == "moe_layer_fp8"}
    assert in_float8 == {(shape.name, 16384) for shape in MODELS}


def test_the_engines_checks_are_called_what_its_targets_are(gpu: Any) -> None:
    texts = [(ROOT / "benchmarks" / f"gpu_{name}.py").read_text() for name in ("engine", "strategies")]
    for name in gpu.targets.ENGINE:
        start = name.partition(" at ")[0] if " streams" in name else name.removesuffix("static").removesuffix("none")
        assert any(start in text for text in texts), name


def test_without_a_gpu_the_command_says_so_and_names_the_rehearsal() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "bench_gpu.py")]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100, env=environment)
    assert done.returncode == 1
    assert "ARGS=--rehearse" in done.stdout
