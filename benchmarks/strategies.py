"""The batching strategies against each other on one machine, in turn, in one run.

    python benchmarks/strategies.py --trace AzureLLMInferenceTrace_conv.csv [--num-prompts 160] [--scale 0.25]

32-token prompts, the trace's output lengths times `--scale`, batches of 32, all requests present at the start. With few
prompts the end of the run, when the batch empties, weighs more than the run itself: use several times 32. The
checkpoint is that of `checkpoint.py`. Writes output tokens/s, ratios to `continuous` and the KV waste.
"""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import date
from pathlib import Path

from on_checkpoint import find_or_make_checkpoint, make_parser, write_report

STRATEGIES = ["continuous", "static", "dynamic", "padded", "none"]


def main() -> None:
    parser = make_parser(__doc__, "strategies.json")
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--num-prompts", type=int, default=160)
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES)
    parser.add_argument("--scale", type=float, default=0.25)
    options = parser.parse_args()
    checkpoint = find_or_make_checkpoint(options.work)
    reports = {}
    for strategy in ["continuous", *(name for name in options.strategies if name != "continuous")]:
        command = [Path(sys.executable).parent / "moiety", "bench", "engine", "--model", checkpoint, "--json"]
        command += ["--trace", options.trace, "--scale", options.scale, "--input-tokens", 32, "--batching", strategy]
        command += ["--num-prompts", options.num_prompts, "--max-running", 32, "--static-batch-size", 32]
        command += ["--threads", options.threads, "--dtype", "bfloat16"]
        done = subprocess.run([str(part) for part in command], check=True, stdout=subprocess.PIPE, text=True)
        reports[strategy] = json.loads(done.stdout)
        print(f"{strategy}: {reports[strategy]['output_tokens_per_s']:.1f} output tokens/s", file=sys.stderr)
    best = reports["continuous"]["output_tokens_per_s"]
    summary = {
        "date": date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]).replace(str(options.trace), options.trace.name),
        "trace": options.trace.name,
        "environment": reports["continuous"]["environment"],
        "settings": reports["continuous"]["settings"],
        "continuous_over": {name: best / report["output_tokens_per_s"] for name, report in reports.items()},
        "kv_waste_fraction": {name: report["kv_waste_fraction"] for name, report in reports.items()},
        "output_tokens_per_s": {name: report["output_tokens_per_s"] for name, report in reports.items()},
        "ttft_ms": {name: report["ttft_ms"] for name, report in reports.items()},
        "tpot_ms": {name: report["tpot_ms"] for name, report in reports.items()},
    }
    write_report(summary, options.output)
    print(json.dumps({key: summary[key] for key in ("continuous_over", "kv_waste_fraction")}))


if __name__ == "__main__":
    main()
