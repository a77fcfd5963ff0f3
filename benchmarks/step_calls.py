"""Count the engine's own Python calls in one decode step of the demo model, without a server.

    python benchmarks/step_calls.py [--prompts 1] [--steps 64] [--list]

A loop in this process decodes the given number of prompts at once. A profile hook counts the calls of Moiety's own
functions that one step and the collection of its outputs make in the loop's thread. `calls` are those of the shortest
step, since some work is done every few steps only; `mean_calls` includes it. `--list` prints the functions of the
shortest step.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from collections import Counter
from types import CodeType

from call_profile import CallProfile

from moiety_engine.bench.engine import make_request
from moiety_engine.bench.lengths import BenchLengths
from moiety_engine.checkpoint import resolve_checkpoint
from moiety_engine.config import EngineConfig
from moiety_engine.loop import EngineLoop
from moiety_engine.startup import load_loop

PACKAGES = tuple(f"{os.sep}{name}{os.sep}" for name in ("moiety_engine", "moiety_kernels", "moiety_wire"))
INPUT_TOKENS, STEPS_BEFORE = 24, 40  # decode steps before the first counted one: programs are recorded in them


class CallCounter(CallProfile):
    """Counts the calls of this thread into Moiety's own functions, by file and function."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()

    def note_call(self, code: CodeType) -> None:
        path = code.co_filename
        if any(package in path for package in PACKAGES):
            self.calls[_within_package(path), code.co_qualname] += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=1, help="number of prompts that decode at once")
    parser.add_argument("--steps", type=int, default=64, help="number of counted steps")
    parser.add_argument("--list", action="store_true", help="print the functions of the shortest step")
    options = parser.parse_args()
    folder = resolve_checkpoint("")
    with load_loop(EngineConfig(model=str(folder), name=folder.name, device="cpu")) as loop:
        loop.warm_up()
        steps = _count(loop, options.prompts, options.steps)
    shortest = min(steps, key=Counter.total)
    if options.list:
        for (path, name), count in sorted(shortest.items(), key=lambda one: (-one[1], one[0])):
            print(f"{count:4} {path:55} {name}")
    mean = sum(map(Counter.total, steps)) / len(steps)
    print(json.dumps({"calls": shortest.total(), "mean_calls": round(mean, 1), "steps": len(steps)}))


def _count(loop: EngineLoop, num_prompts: int, num_steps: int) -> list[Counter[tuple[str, str]]]:
    """Return the calls of each of `num_steps` consecutive steps in which all prompts decode."""
    lengths, rng = BenchLengths(INPUT_TOKENS, num_prompts + STEPS_BEFORE + num_steps + 2), random.Random(0)
    for key in range(num_prompts):
        loop.submit(make_request(loop, key, lengths, rng))
    while min((len(one.tokens) for one in loop.scheduler.queues.running), default=0) < INPUT_TOKENS + STEPS_BEFORE:
        loop.step()
        loop.take_outputs()
    counted = []
    for _ in range(num_steps):
        with CallCounter() as counter:
            loop.step()
            loop.take_outputs()
        counted.append(counter.calls)
    assert loop.scheduler.num_running == num_prompts, "a prompt ended during the count"
    return counted


def _within_package(path: str) -> str:
    return next(path.rpartition(package)[2] for package in PACKAGES if package in path)


if __name__ == "__main__":
    main()
