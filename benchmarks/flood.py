"""Effect of a flood of flex requests on priority requests on the real engine, and the reverse.

    python benchmarks/flood.py [--models demo 670m] [--segment-s 15] [--rounds 2]

As many closed-loop `flex` streams as the batch has slots saturate the engine in this process; each sends its next
request as soon as it gets its answer. Segments of the flood alone and of the flood with an open loop of `priority`
requests alternate, each on a fresh loop over the same model, and count from the moment when the batch is full. A
priority request is timed from its due time, whether the engine is in the middle of a step or not. It uses the built-in
class, whose targets are a GPU's, and one whose targets this machine can attain; at overload both are queued, not
rejected.

Targets: p99 TTFT of priority is at most the unloaded one plus two saturated steps; output tokens/s of both together are
at least 90 % of the flood alone. Nothing else should run meanwhile; if something does, the steps that a priority
request waited for its first token (at least one) and tokens per CPU second show the scheduler's part.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from on_checkpoint import find_or_make_checkpoint, make_parser, write_report

import moiety_demo
from moiety_engine.bench.engine import percentiles
from moiety_engine.config import EngineConfig
from moiety_engine.environment import environment
from moiety_engine.loop_setup import build_loop
from moiety_engine.messages import CoreFinish, CoreSubmit
from moiety_engine.model.transformer import Transformer
from moiety_engine.startup import load_loop
from moiety_wire.classes import FLEX, PRIORITY, OverloadAction, ServiceClass
from moiety_wire.messages import Sampling

PROMPT_TOKENS = 32
PRIORITY_OUTPUT = 16
FIRST_TOKEN_ID = 100  # past the special tokens
OUTPUT_RATIO = 0.9


@dataclass(frozen=True)
class Load:
    """Offered load."""

    streams: int
    flex_output: tuple[int, int]  # from, to
    every_s: float  # a priority request
    segment_s: float


@dataclass
class Asked:
    """One request, on the monotonic clock."""

    due_s: float
    after_step: int
    first_step: int = 0
    times_s: list[float] = field(default_factory=list)
    finish: CoreFinish | None = None


@dataclass
class Segment:
    """Results of the counted part of one segment."""

    seconds: float = 0.0
    cpu_s: float = 0.0
    output_tokens: int = 0
    priority_tokens: int = 0
    steps_s: list[float] = field(default_factory=list)
    saturated_s: list[float] = field(default_factory=list)  # steps that gave every place of the batch a token
    asked: dict[int, Asked] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)
    preempted: Counter[str] = field(default_factory=Counter)  # by reason
    recomputed_tokens: int = 0


class Engine:
    """A fresh loop over a loaded model, and the requests that run on it."""

    def __init__(self, model: Transformer, config: EngineConfig, load: Load, seed: int) -> None:
        self.loop = build_loop(model, config)
        self.loop.warm_up()
        self._load = load
        self._rng = random.Random(seed)
        self._num_keys = 0
        self._flex: set[int] = set()
        self.segment = Segment()

    def ask(self, service: ServiceClass, num_output: int, due_s: float | None = None) -> int:
        now_s = time.perf_counter()
        self._num_keys += 1
        late_ns = 0 if due_s is None else int((now_s - due_s) * 1e9)
        vocabulary = self.loop.executor.model.spec.vocab_size
        self.loop.submit(
            CoreSubmit(
                key=self._num_keys,
                tenant_id=service.name,
                service=service,
                prompt_ids=[self._rng.randrange(FIRST_TOKEN_ID, vocabulary) for _ in range(PROMPT_TOKENS)],
                sampling=Sampling(temperature=0.0),
                max_tokens=num_output,
                min_tokens=0,
                stop_token_ids=[],
                credit_tokens=num_output,
                cache_salt=b"flood",
                arrival_unix_ns=time.time_ns() - late_ns,
            )
        )
        if service is FLEX:
            self._flex.add(self._num_keys)
        else:
            self.segment.asked[self._num_keys] = Asked(now_s if due_s is None else due_s, self.loop.steps_total)
        return self._num_keys

    def ask_flex(self) -> None:
        self.ask(FLEX, self._rng.randint(*self._load.flex_output))

    def step(self) -> None:
        """Run one step and process its results; a finished stream sends its next request."""
        begin_s = time.perf_counter()
        self.loop.step()
        now_s = time.perf_counter()
        segment = self.segment
        segment.steps_s.append(now_s - begin_s)
        step = self.loop.take_outputs()
        if step is not None and len(step.outputs) >= self._load.streams:
            segment.saturated_s.append(now_s - begin_s)
        for failure in step.failures if step else []:
            segment.refused[str(failure.reason or failure.message)] += 1
        for output in step.outputs if step else []:
            segment.output_tokens += len(output.token_ids)
            asked = segment.asked.get(output.key)
            if asked is not None:
                asked.first_step = asked.first_step or self.loop.steps_total
                asked.times_s += [now_s] * len(output.token_ids)
                asked.finish = output.finish
                segment.priority_tokens += len(output.token_ids)
            elif output.finish is not None and output.key in self._flex:
                self._flex.remove(output.key)
                self.ask_flex()

    def preempted(self) -> Counter[str]:
        """Return the preemptions so far, by class and reason."""
        return Counter(
            {
                f"{one.name}: {reason}": count
                for one in self.loop.load().classes
                for reason, count in one.preempted_total.items()
            }
        )

    def fill(self) -> None:
        """Start the flood and wait until every stream has begun to be answered, and the engine knows its own pace."""
        for _ in range(self._load.streams):
            self.ask_flex()
        while self.loop.scheduler.num_running < self._load.streams or self.loop.steps_total < 40:
            self.step()

    def run(self, priority: ServiceClass | None) -> Segment:
        """Run the counted part, with priority requests in this class if any."""
        self.fill()
        before = self.preempted()
        recomputed = self.loop.scheduler.recomputed_tokens_total
        self.segment = Segment()
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        due_s = begin_s + self._load.every_s / 2
        while (now_s := time.perf_counter()) < begin_s + self._load.segment_s:
            while priority is not None and due_s <= now_s:
                self.ask(priority, PRIORITY_OUTPUT, due_s)
                due_s += self._load.every_s * self._rng.uniform(0.8, 1.2)  # not in step with the steps
            self.step()
        self.segment.seconds = time.perf_counter() - begin_s
        self.segment.cpu_s = time.process_time() - begin_cpu_s
        self.segment.preempted = self.preempted() - before
        self.segment.recomputed_tokens = self.loop.scheduler.recomputed_tokens_total - recomputed
        counted = (self.segment.output_tokens, self.segment.priority_tokens)
        while any(asked.finish is None and asked.times_s == [] for asked in self.segment.asked.values()):
            self.step()  # those of the last moments get their first token
        self.segment.output_tokens, self.segment.priority_tokens = counted
        return self.segment


def measure_unloaded(engine: Engine, num_requests: int) -> list[float]:
    """Return the TTFT in ms of priority requests on an otherwise idle engine."""
    for _ in range(num_requests + 2):
        key = engine.ask(PRIORITY, PRIORITY_OUTPUT)
        while engine.segment.asked[key].finish is None:
            engine.step()
    return ttft_ms(engine.segment)[2:]


def ttft_ms(segment: Segment) -> list[float]:
    return [(asked.times_s[0] - asked.due_s) * 1e3 for asked in segment.asked.values() if asked.times_s]


def tpot_ms(segment: Segment) -> list[float]:
    ended = [asked.times_s for asked in segment.asked.values() if asked.finish is not None]
    return [(times[-1] - times[0]) / (len(times) - 1) * 1e3 for times in ended]


def measure(
    path: Path, load: Load, suited: ServiceClass, *, rounds: int, unloaded: int, threads: int
) -> dict[str, Any]:
    """Load a model and run all segments."""
    config = EngineConfig(model=str(path), name=path.name, device="cpu", num_threads=threads)
    loaded = load_loop(config)
    model = loaded.executor.model
    unloaded_ms = measure_unloaded(Engine(model, config, load, seed=0), unloaded)
    alone: list[Segment] = []
    classes = {"shipped": msgspec.structs.replace(PRIORITY, on_overload=OverloadAction.QUEUE), "suited": suited}
    both: dict[str, list[Segment]] = {name: [] for name in classes}
    for number in range(rounds):
        alone.append(Engine(model, config, load, seed=number).run(None))
        for name, service in classes.items():
            both[name].append(Engine(model, config, load, seed=number).run(service))
        print(f"{path.name}: round {number + 1} of {rounds}", file=sys.stderr)
    settings = {
        "model": path.name,
        "max_running": loaded.scheduler.limits.max_running,
        "prompt_tokens": PROMPT_TOKENS,
        "priority_output_tokens": PRIORITY_OUTPUT,
        "rounds": rounds,
    }
    saturated_ms = [s * 1e3 for segment in alone for s in segment.saturated_s]
    limit_ms = float(np.percentile(unloaded_ms, 99)) + 2 * float(np.median(saturated_ms))
    rates = [segment.output_tokens / segment.seconds for segment in alone]
    cpu_rates = [segment.output_tokens / segment.cpu_s for segment in alone]
    return {
        "environment": environment(loaded),
        "settings": settings | asdict(load),
        "num_unloaded": unloaded,
        "unloaded_ttft_ms": percentiles(unloaded_ms),
        "saturated_step_ms": percentiles(saturated_ms),
        "flood_alone": {"output_tokens_per_s": rates, "output_tokens_per_cpu_s": cpu_rates},
        "priority_class": {
            name: {"class": msgspec.to_builtins(classes[name])} | report(segments, limit_ms, rates)
            for name, segments in both.items()
        },
    }


def report(both: list[Segment], limit_ms: float, alone: list[float]) -> dict[str, Any]:
    """Return the report of the segments with priority requests in one class."""
    loaded_ms = [ms for segment in both for ms in ttft_ms(segment)]
    steps = [one.first_step - one.after_step for segment in both for one in segment.asked.values() if one.times_s]
    rates = [segment.output_tokens / segment.seconds for segment in both]
    cpu_rates = [segment.output_tokens / segment.cpu_s for segment in both]
    ratio = sum(rates) / sum(alone)
    refused = sum((segment.refused for segment in both), Counter[str]())
    p99_ms = float(np.percentile(loaded_ms, 99))
    return {
        "targets": {
            "ttft_ms_p99_at_most": limit_ms,
            "ttft_ms_p99": p99_ms,
            "ttft_met": p99_ms <= limit_ms and not refused,
            "output_ratio_at_least": OUTPUT_RATIO,
            "output_ratio": ratio,
            "output_met": ratio >= OUTPUT_RATIO,
        },
        "num_priority": len(loaded_ms),
        "saturated_step_ms": percentiles([s * 1e3 for segment in both for s in segment.saturated_s]),
        "steps_to_first_token": dict(sorted(Counter(steps).items())),
        "ttft_ms": percentiles(loaded_ms),
        "tpot_ms": percentiles([ms for segment in both for ms in tpot_ms(segment)]),
        "step_ms": percentiles([s * 1e3 for segment in both for s in segment.steps_s]),
        "output_tokens_per_s": rates,
        "output_tokens_per_cpu_s": cpu_rates,
        "refused": dict(refused),
        "preempted": dict(sum((segment.preempted for segment in both), Counter[str]())),
        "recomputed_tokens": sum(segment.recomputed_tokens for segment in both),
    }


def main() -> None:
    parser = make_parser(__doc__, "flood.json")
    parser.add_argument("--models", nargs="+", choices=["demo", "670m"], default=["demo", "670m"])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--segment-s", type=float, default=15.0)
    options = parser.parse_args()
    models = {}
    for name in options.models:
        small = name == "demo"
        path = Path(moiety_demo.__file__).parent / "checkpoint" if small else find_or_make_checkpoint(options.work)
        load = Load(options.streams, (64, 192) if small else (24, 72), 0.5 if small else 2.0, options.segment_s)
        suited = msgspec.structs.replace(
            PRIORITY,
            ttft_s=0.25 if small else 1.5,
            tpot_s=0.15 if small else 1.0,
            on_overload=OverloadAction.QUEUE,
        )
        models[name] = measure(
            path, load, suited, rounds=options.rounds, unloaded=60 if small else 15, threads=options.threads
        )
        print(f"{name}: {json.dumps(_targets(models[name]))}", file=sys.stderr)
    summary = {"date": date.today().isoformat(), "command": " ".join(["python", *sys.argv]), "models": models}
    write_report(summary, options.output)
    print(json.dumps({name: _targets(one) for name, one in models.items()}))


def _targets(model: dict[str, Any]) -> dict[str, Any]:
    return {name: one["targets"] for name, one in model["priority_class"].items()}


if __name__ == "__main__":
    main()
