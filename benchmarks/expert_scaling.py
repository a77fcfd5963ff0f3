"""Changes of the number of expert ranks while the engine serves: how long they take, and how long steps pause.

    python benchmarks/expert_scaling.py [--rounds 2] [--parts numbers moves]

The engine runs on real ranks over gloo, on a random checkpoint in the shape of Qwen3-MoE in float32. In the part
`numbers` it has one rank with attention, and the number of expert ranks goes from 1 to 3 and back. In the part `moves`
it has two ranks with data-parallel attention, whose experts move to one expert rank and back. Requests arrive all the
time, and each running one gets a token in each step, so that the longest step is the longest time between two tokens of
a stream. A change is prepared in the background, which includes the start of new processes and the load of experts; the
switch is the pause that the engine itself reports. The answers are compared with those of a fixed number of ranks, as
in `rebalancing.py`. Without this, the number changes only with a restart of the engine, whose time is also measured:
from its end until the new one has warmed up. Figures are medians over all changes of the rounds, with the largest, and
come with the load of the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from itertools import cycle
from pathlib import Path
from typing import Any

from on_checkpoint import command_and_date, write_report
from rebalancing import compare, make_checkpoint, requests, settings_of

from moiety_engine.loop import EngineLoop
from moiety_engine.offline import run_all
from moiety_engine.startup import load_loop
from moiety_kernels.environment import describe_environment

PARTS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, ...]]] = {  # settings, those of a restart, numbers
    "numbers": ({"ffn_ranks": 1}, {"ffn_ranks": 2, "ep": 2}, (2, 3, 1)),
    "moves": ({"dp_attention": 2, "ep": 2}, {"dp_attention": 2, "ffn_ranks": 1}, (1, 0)),
}
WAVES = 2
SHAPES: dict[str, dict[str, Any]] = {
    "98 kB an expert": {},
    "12.6 MB an expert": {"hidden_size": 1024, "moe_intermediate_size": 1024, "num_hidden_layers": 2},
}


class Scaler:
    """Hook called after each step: it asks for the next number of expert ranks as soon as the last is reached."""

    def __init__(self, loop: EngineLoop, numbers: list[int]) -> None:
        self._loop, self._left = loop, numbers
        self._scaling = loop.experts.scaling
        self.still_ms: list[float] = []  # steps without a change
        self.preparing_ms: list[float] = []  # steps while a change is prepared
        self.switching_ms: list[float] = []  # the steps that begin with a switch
        self.pauses_ms: list[float] = []  # of these, the time until all ranks have switched
        self.changes_s: list[float] = []
        self._ended_s, self._begun_s = time.perf_counter(), 0.0
        self._is_preparing, self._paused_s = False, 0.0
        self._next_s = time.perf_counter()

    @property
    def is_over(self) -> bool:
        return not self._left and not self._is_preparing

    def __call__(self, _: int) -> None:
        now_s, scaling = time.perf_counter(), self._scaling
        step_ms = 1e3 * (now_s - self._ended_s)
        if not self._is_preparing:
            self.still_ms.append(step_ms)
        elif scaling.is_under_way:
            self.preparing_ms.append(step_ms)
        else:
            if scaling.problem:
                raise RuntimeError(f"the number of expert ranks was not changed: {scaling.problem}")
            self.switching_ms.append(step_ms)
            self.pauses_ms.append(1e3 * (scaling.switch_seconds_total - self._paused_s))
            self.changes_s.append(now_s - self._begun_s)
            self._is_preparing, self._next_s = False, now_s + 2.0
        if self._left and not self._is_preparing and now_s >= self._next_s:
            self._is_preparing, self._begun_s = True, time.perf_counter()
            self._paused_s = scaling.switch_seconds_total
            self._loop.scale_expert_ranks(self._left.pop(0))
        self._ended_s = time.perf_counter()


def measure(folder: Path, part: str, num_rounds: int) -> dict[str, Any]:
    """Return the durations of changes, and the comparison of the answers with those without changes."""
    layout, restarted, numbers = PARTS[part]
    config = settings_of(folder, **layout)
    fixed: dict[tuple[int, int], list[tuple[int, float]]] = {}
    found: dict[tuple[int, int], list[tuple[int, float]]] = {}
    with load_loop(config) as loop:
        loop.warm_up()
        for wave in range(WAVES):
            fixed |= answers_of(loop, wave, None)
        scaler = Scaler(loop, list(numbers) * num_rounds)
        for wave in cycle(range(WAVES)):
            found |= answers_of(loop, wave, scaler)
            if scaler.is_over and len(found) == len(fixed):
                break
        begin_s = time.perf_counter()
    with load_loop(settings_of(folder, **restarted)) as loop:
        loop.warm_up()
        restart_s = time.perf_counter() - begin_s
    pauses = sorted(scaler.pauses_ms)
    return {
        "restart_s": round(restart_s, 2),
        "load_average": round(os.getloadavg()[0], 1),
        "changes": len(pauses),
        "change_s_p50": round(statistics.median(scaler.changes_s), 2),
        "pauses_ms": [round(pause, 1) for pause in scaler.pauses_ms],  # in the order of the numbers
        "pause_ms_p50": round(statistics.median(pauses), 1),
        "pause_ms_max": round(pauses[-1], 1),
        "switching_step_ms_p50": round(statistics.median(scaler.switching_ms), 1),
        "switching_step_ms_max": round(max(scaler.switching_ms), 1),
        "preparing_step_ms_p50": round(statistics.median(scaler.preparing_ms), 1),
        "preparing_step_ms_max": round(max(scaler.preparing_ms), 1),
        "still_step_ms_p50": round(statistics.median(scaler.still_ms), 1),
        "still_step_ms_max": round(max(scaler.still_ms), 1),
        "answers": compare(fixed, {"answers": found}),
    }


def answers_of(loop: EngineLoop, wave: int, scaler: Scaler | None) -> dict[tuple[int, int], list[tuple[int, float]]]:
    found = {}
    for key, result in run_all(loop, requests(wave), on_step=scaler).items():
        gaps = [one.top_logprobs[0] - one.top_logprobs[1] for one in result.logprobs if one is not None]
        found[wave, key] = list(zip(result.token_ids, gaps, strict=True))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2, help="Times that the number goes up and down.")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "expert_scaling.json")
    options = parser.parse_args()
    report: dict[str, Any] = json.loads(options.output.read_text()) if options.output.exists() else {}
    for part in options.parts:
        shapes = {}
        with tempfile.TemporaryDirectory() as work:
            for number, name in enumerate(options.shapes):
                folder = make_checkpoint(Path(work) / str(number), "qwen3_moe", SHAPES[name])
                shapes[name] = measure(folder, part, options.rounds)
                print(json.dumps({part: {name: shapes[name]}}), file=sys.stderr)
        layout, _, numbers = PARTS[part]
        report[part] = command_and_date() | {
            "settings": {"rounds": options.rounds, "layout": layout, "numbers": numbers},
            "environment": describe_environment("numpy", "torch"),
            "shapes": shapes,
        }
        write_report(report, options.output)


if __name__ == "__main__":
    main()
