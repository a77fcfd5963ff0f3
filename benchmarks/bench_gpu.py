"""`make bench-gpu`: all checks and measurements that need a GPU, in one command of under 8 minutes.

    make bench-gpu                                     # on a machine with a GPU
    make bench-gpu ARGS="--output DIR --revision REV"  # results outside the checkout; sources without git
    make bench-gpu ARGS=--rehearse                     # without a GPU: checks that every stage starts; writes nothing

It runs under the interpreter that starts it, without a virtual environment or network; torch, Triton and pytest must be
installed, other packages are used if present. Each stage is a process with a time limit, and its failure does not
affect the others. Writes kernels-DATE.json, kernels-DATE.md and kernels-DATE.log.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpu_plan import on_gpu, rehearsal, wanted
from gpu_stages import ROOT, Outcome, Stage, environment_of, not_run, read_result, run_stage
from gpu_summary import render, told
from gpu_targets import Verdict, judge

RESULTS = ROOT / "benchmarks" / "results"
LIMIT_S = 460.0
MIN_S = 5.0  # that a stage is begun with
PROBE = """
import json, sys, torch, triton
found = {"python": sys.version.split()[0], "torch": torch.__version__, "triton": triton.__version__}
found["cuda"] = torch.version.cuda
if torch.cuda.is_available():
    properties = torch.cuda.get_device_properties(0)
    found |= {"device": properties.name, "sms": properties.multi_processor_count, "l2_bytes": properties.L2_cache_size}
    found |= {"memory_bytes": properties.total_memory, "arch": "sm_%d%d" % torch.cuda.get_device_capability(0)}
print(json.dumps(found))
"""


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as folder:
        sys.exit(bench(options, Path(folder)))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=None, help="folder for the results [benchmarks/results]")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="time limit of all stages together, in seconds")
    parser.add_argument("--only", default="", help="stages to run, separated by commas [all]")
    parser.add_argument("--revision", default=None, help="revision of the sources, for a checkout without git")
    parser.add_argument(
        "--rehearse", action="store_true", help="start each stage without a GPU, to check that it starts"
    )
    return parser.parse_args()


def bench(options: argparse.Namespace, scratch: Path) -> int:
    """Return the exit code: 0 if every stage that was run passed and, on a GPU, every target is met."""
    end = time.monotonic() + options.limit_s
    environment = environment_of(scratch)
    machine = probe(environment)
    if "device" not in machine and not options.rehearse:
        say("bench-gpu: torch sees no GPU here. On a machine without one, try: make bench-gpu ARGS=--rehearse")
        return 1
    say(f"{machine.get('device', 'no GPU')}: python {machine['python']}, torch {machine['torch']}")
    stages = rehearsal(scratch) if options.rehearse else on_gpu(scratch, machine["arch"])
    chosen = options.only.split(",") if options.only else [stage.name for stage in stages]
    outcomes: list[Outcome] = []
    log = scratch / "all.log"
    report: dict[str, Any] = {}
    verdicts: list[Verdict] = []
    for stage in stages:
        if stage.name not in chosen:
            continue
        outcomes.append(run_one(stage, scratch, environment, end - time.monotonic(), log))
        report = assemble(options, machine, outcomes, stages)
        if not options.rehearse:
            verdicts = judge(report, chosen)
            store(options.output or RESULTS, report, verdicts, log)
    say("\n".join(map(told, verdicts)) if verdicts else render(report, verdicts))
    passed = all(outcome.passed or not outcome.was_run for outcome in outcomes)
    return 0 if passed and all(verdict.is_kept for verdict in verdicts) else 1


def probe(environment: dict[str, str]) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        sys.exit(f"bench-gpu: {sys.executable} needs torch and triton: {done.stderr.strip().splitlines()[-1]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def run_one(stage: Stage, scratch: Path, environment: dict[str, str], left_s: float, log: Path) -> Outcome:
    limit_s = min(stage.limit_s, left_s)
    obstacle = stage.obstacle() or ("no time was left for it" if limit_s < MIN_S else "")
    if obstacle:
        outcome = not_run(stage, obstacle)
    else:
        say(f"{stage.name} …")
        own = scratch / f"{stage.name}.log"
        outcome = run_stage(stage, python=sys.executable, limit_s=limit_s, environment=environment, log=own)
        with log.open("ab") as all_logs:
            all_logs.write(f"\n===== {stage.name}: {outcome.command}\n".encode() + own.read_bytes())
    say(f"{stage.name}: {'passed' if outcome.passed else outcome.why} ({outcome.seconds:.0f} s)")
    if not outcome.passed:
        say("\n".join(f"    {line}" for line in outcome.tail[-8:]))
    return outcome


def assemble(
    options: argparse.Namespace, machine: dict[str, Any], outcomes: list[Outcome], stages: list[Stage]
) -> dict[str, Any]:
    found = {stage.name: read_result(stage.result) for stage in stages if stage.result is not None}
    parts = [found.get(name, {}) for name in ("moe_layer", "fp8_layer", "few_bits", "kernels")]
    inner: dict[str, Any] = next((part["environment"] for part in parts if part.get("environment")), {})
    revision = {} if options.revision is None else {"git_revision": options.revision}
    return {
        "environment": inner | machine | revision,
        "settings": {"command": "make bench-gpu", "arguments": sys.argv[1:], "limit_s": options.limit_s},
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "stages": [asdict(outcome) for outcome in outcomes],
        "roofline": next((part["roofline"] for part in parts if part.get("roofline")), None),
        **{kind: [row for part in parts for row in part.get(kind, [])] for kind in ("rows", "failed", "skipped")},
        "wanted": wanted(),
        "engine": found.get("engine") or None,
    }


def store(folder: Path, report: dict[str, Any], verdicts: list[Verdict], log: Path) -> None:
    """Write the results after every stage, so that an interrupted run keeps what it has."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"kernels-{report['date']}"
    targets = [asdict(verdict) | {"kept": verdict.is_kept} for verdict in verdicts]
    (folder / f"{name}.json").write_text(json.dumps(report | {"targets": targets}, indent=1) + "\n", encoding="utf-8")
    (folder / f"{name}.md").write_text(render(report, verdicts), encoding="utf-8")
    if log.exists():
        (folder / f"{name}.log").write_bytes(log.read_bytes())


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()
