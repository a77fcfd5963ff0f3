"""The scheduler's scenarios, S1 to S10 and the ablations, in simulation, each against its target and the rivals.

    python benchmarks/scheduling.py --traces DIR [--only S1,S5] [--seeds 0,1,2] [--duration 600] [--jobs 2] [--quick]

`DIR` holds the public traces under the names that `scenarios/offers.py` lists. Every scenario runs on every seed; a
target holds if every seed meets it. Writes JSON, a Markdown report and charts side by side. With `--only`, the other
scenarios' results in the file stay as they are. All times are virtual: the figures do not depend on this machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import date
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from scenarios import deadlines, fairness, limits, memory, overload  # noqa: E402 - the script's own folder
from scenarios.charts import draw_charts  # noqa: E402
from scenarios.claims import Measurement, Scenario, Settings, make_rows  # noqa: E402
from scenarios.report import write_report  # noqa: E402

from moiety_engine.errors import EngineError  # noqa: E402
from moiety_kernels.environment import describe_environment  # noqa: E402

_LISTED = (*fairness.SCENARIOS, *deadlines.SCENARIOS, *limits.SCENARIOS, *overload.SCENARIOS, *memory.SCENARIOS)
_ORDER = ("S1", "S2", "S3", "S3-limits", "S4", "S5", "S6", "S7", "S8", "S9", "S10", "ablation")
_LONGEST = ("S3", "S9", "S10", "S4", "S5")
SCENARIOS: dict[str, Scenario] = {name: next(s for s in _LISTED if s.name == name) for name in _ORDER}


def main() -> None:
    options = _parse()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    duration_s = 120.0 if options.quick else options.duration
    settings = Settings(options.traces, duration_s, 6 * duration_s, seeds[0])
    chosen = options.only.split(",") if options.only else list(SCENARIOS)
    if unknown := [name for name in chosen if name not in SCENARIOS]:
        sys.exit(f"there is no scenario {', '.join(unknown)}; known are {', '.join(SCENARIOS)}")
    report = _earlier(options.output) if options.only else {}
    report.setdefault("scenarios", {})
    for name, by_seed, wall_s in _measure_all(chosen, seeds, settings, options.jobs):
        entry = _entry(SCENARIOS[name], by_seed, settings)
        entry |= {"command": f"python benchmarks/scheduling.py --traces DIR --only {name}", "wall_s": round(wall_s)}
        report["scenarios"][name] = entry
        _tell(name, entry)
        _write(report, options.output)
    report["charts"] = draw_charts(report, options.output.parent)
    _write(report, options.output)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, help="folder with the public traces")
    parser.add_argument("--only", default="", help="scenarios to run, separated by commas [all]")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument(
        "--duration", type=float, default=600.0, help="seconds of arrivals; scenarios over hours take six times as long"
    )
    parser.add_argument("--jobs", type=int, choices=(1, 2), default=1, help="number of processes")
    parser.add_argument(
        "--quick", action="store_true", help="run a fifth of the time, to check that all scenarios work"
    )
    parser.add_argument("--output", type=Path, default=HERE / "results" / "scheduling.json")
    return parser.parse_args()


def _measure_all(
    names: list[str], seeds: list[int], settings: Settings, num_jobs: int
) -> Iterator[tuple[str, dict[int, Measurement], float]]:
    """Yield scenario, measurements by seed and seconds, in order of completion; the long ones begin first."""
    begun = sorted(names, key=lambda name: _LONGEST.index(name) if name in _LONGEST else len(_LONGEST))
    seeds_of = {name: seeds if SCENARIOS[name].seeded else seeds[:1] for name in begun}
    done: dict[str, dict[int, tuple[Measurement, float]]] = {name: {} for name in begun}
    with ProcessPoolExecutor(num_jobs) as pool:
        futures = {
            pool.submit(_measure, name, seed, settings): (name, seed) for name in begun for seed in seeds_of[name]
        }
        for future in as_completed(futures):
            name, seed = futures[future]
            done[name][seed] = future.result()
            if len(done[name]) == len(seeds_of[name]):
                by_seed = {seed: done[name][seed][0] for seed in seeds_of[name]}
                yield name, by_seed, sum(seconds for _, seconds in done[name].values())


def _measure(name: str, seed: int, settings: Settings) -> tuple[Measurement, float]:
    """Measure one scenario.

    A run that the simulator aborts is a measurement without figures, so that its targets do not hold.
    """
    begun = time.perf_counter()
    try:
        found = SCENARIOS[name].measure(settings, seed)
    except EngineError as exc:
        found = Measurement(notes=[f"seed {seed} was given up: {exc}"])
    return found, time.perf_counter() - begun


def _entry(scenario: Scenario, by_seed: dict[int, Measurement], settings: Settings) -> dict[str, Any]:
    first = next(iter(by_seed.values()))
    return {
        "title": scenario.title,
        "setting": scenario.setting,
        "seeds": list(by_seed) if scenario.seeded else [],
        "duration_s": settings.duration_s,
        "date": date.today().isoformat(),
        "environment": describe_environment("numpy"),
        "rows": make_rows(scenario, by_seed),
        "notes": [note for measurement in by_seed.values() for note in measurement.notes],
        "series": first.series,
    }


def _tell(name: str, entry: dict[str, Any]) -> None:
    targets = [row for row in entry["rows"] if row["holds"] is not None]
    missed = [row for row in targets if not row["holds"]]
    print(f"{name}: {len(targets) - len(missed)} of {len(targets)} targets hold, {entry['wall_s']} s", file=sys.stderr)
    for row in entry["rows"]:
        mark = {None: "     ", True: "holds", False: "MISSED"}[row["holds"]]
        rivals = ", ".join(f"{policy} {text}" for policy, text in row["rivals"].items())
        print(f"  {mark} {row['asked']}: {row['ours']} {row['target']} [{rivals}]", file=sys.stderr, flush=True)


def _write(report: dict[str, Any], path: Path) -> None:
    results = report["scenarios"]
    report["scenarios"] = {name: results.pop(name) for name in SCENARIOS if name in results}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    write_report(report, path.with_suffix(".md"))


def _earlier(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return loaded


if __name__ == "__main__":
    main()
