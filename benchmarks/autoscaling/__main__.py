"""The chart's autoscaler of an engine pool, replayed on two real traces.

    cd benchmarks && python -m autoscaling --traces FOLDER [--jobs 6] [--output results/autoscaling.json]

For each trace it runs the objects as the chart renders them, the same by queue time alone, and a fixed pool of as many
devices as the autoscaler may have. The fixed pool shows the best possible SLO attainment; the difference from it
is the cost of scaling, beside the device hours that scaling saves.
"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from multiprocessing import get_context
from pathlib import Path

from autoscaling.chart import draw
from autoscaling.scenarios import DEVICE, SCENARIOS, SEED, START_S, VARIANTS, WELL_USED, per_minute, prepare, run
from moiety_platform.bench.environment import describe_environment

HERE = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, help="folder that contains azure2023/")
    parser.add_argument("--jobs", type=int, default=6, help="number of processes")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "autoscaling.json")
    options = parser.parse_args()
    prepared = {name: prepare(name, options.traces) for name in SCENARIOS}
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as processes:  # Helm's threads survive no fork
        begun = {
            (name, variant): processes.submit(run, name, variant, prepared[name])
            for name in SCENARIOS
            for variant in VARIANTS
        }
        ended = {which: future.result() for which, future in begun.items()}
    for which, one in ended.items():
        print(*which, {key: _short(value) for key, value in one["figures"].items()}, file=sys.stderr)
    scenarios = {
        name: {
            "trace": SCENARIOS[name].trace,
            "settings": one.settings,
            "load_in_devices": one.load,
            "tokens_per_s_of_a_full_device": one.tokens_per_s,
            "arrivals_per_minute": per_minute(one.workload),
            "variants": {variant: told for (whose, variant), told in ended.items() if whose == name},
        }
        for name, one in prepared.items()
    }
    report = {
        "date": date.today().isoformat(),
        "command": "cd benchmarks && python -m autoscaling --traces FOLDER",
        "settings": {"start_s": START_S, "well_used": WELL_USED, "device": DEVICE.name, "seed": SEED},
        "environment": describe_environment(),
        "scenarios": scenarios,
    }
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    draw(report, options.output.with_suffix(".png"))


def _short(value: object) -> object:
    return round(value, 3) if isinstance(value, float) else value


if __name__ == "__main__":
    main()
