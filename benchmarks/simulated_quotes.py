"""Calibration of quotes in simulation: predicted and actual times, and missed guarantees, by class and load.

    python benchmarks/simulated_quotes.py [--seconds 300] [--jobs 2] [--out benchmarks/results/simulated_quotes.json]

Tenants of the classes priority, standard, flex and batch send Poisson arrivals at a part of the capacity of a preset,
and the real scheduler serves them in virtual time. Each request is quoted as a gateway does: from the engine's load
report of that moment, with the costs of steps that the scheduler has learned, and with the factors and the margin that
the quotes before it have taught. The figures leave out the machine, which the benchmark on the real engine
(`quotes.py`) has: they show what later arrivals do to a prediction.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

from on_checkpoint import make_simulation_parser, print_runs, write_simulation

from moiety_engine.messages import CoreFinish
from moiety_engine.scheduling.plan import Plan
from moiety_engine.simulator.capacity import at_load, measure_capacity
from moiety_engine.simulator.devices import SimulatedDevice, find_device
from moiety_engine.simulator.driver import START_NS, Driver
from moiety_engine.simulator.records import Record
from moiety_platform.admission.gate import refuse_unattainable
from moiety_platform.bench.report import percentile
from moiety_platform.quotes.calibration import QuoteCalibration
from moiety_platform.quotes.guarantee import SequenceTimes, needed_margin
from moiety_platform.quotes.prediction import guarantee_of, predict_timing
from moiety_platform.quotes.timing import Timing
from moiety_wire.classes import SHIPPED, ServiceClass
from moiety_wire.engine_load import Load
from moiety_workload.generators import generate
from moiety_workload.request import TraceRequest, Workload

DEVICES = ("a100-llama3-8b", "h200-qwen3-30b-a3b")
LOADS = (0.3, 0.6, 0.9)
SEED, MODEL = 0, "m"
MARGIN = 0.5  # the default of the setting `quote_margin`
LENGTHS = "input=64..1024,output=32..256"
CLASSES = (("priority", 0.2), ("standard", 0.4), ("flex", 0.25), ("batch", 0.15))


@dataclass(frozen=True, slots=True)
class SimulatedQuote:
    """Times that were computed and predicted for one request, and the margin of its guarantee, None without one."""

    computed: Timing
    prediction: Timing
    margin: float | None


@dataclass(frozen=True, slots=True)
class QuotedRecord:
    """A request with a quote that has ended."""

    quote: SimulatedQuote
    service_class: str
    times: SequenceTimes

    @property
    def ttft_error(self) -> float:
        predicted_s = self.quote.prediction.first_token_s
        return abs(self.times.first_s - predicted_s) / predicted_s

    @property
    def duration_error(self) -> float:
        predicted_s = self.quote.prediction.finish_s(self.times.num_tokens)
        return abs(self.times.last_s - predicted_s) / predicted_s

    def misses(self, margin: float) -> bool:
        """Return whether the request misses the guarantee with this margin."""
        guarantee = guarantee_of(self.quote.prediction, margin)
        late = self.times.first_s > guarantee.first_token_s
        return late or self.times.last_s > guarantee.finish_s(self.times.num_tokens)


class QuotingDriver(Driver):
    """A simulated run whose requests are quoted when they arrive."""

    def __init__(self, workload: Workload, device: SimulatedDevice, classes: Mapping[str, ServiceClass]) -> None:
        super().__init__(workload, device, "moiety", classes)
        self.ended: list[QuotedRecord] = []
        self._calibration = QuoteCalibration()
        self._quotes: dict[int, SimulatedQuote] = {}
        self._step_end_ns = START_NS
        self._load_before = self._load = self._report()

    def _report(self) -> Load:
        """Return what the engine would report now, as far as quotes use it."""
        scheduler, device = self._scheduler, self._device
        return Load(
            num_running=scheduler.num_running, num_waiting=scheduler.num_waiting, num_paused=0,
            kv_blocks_total=device.num_blocks, kv_blocks_used=scheduler.kv.pool.num_used, kv_blocks_cached=0,
            block_size=device.block_size, steps_total=0, prompt_tokens_total=0, cached_tokens_total=0,
            output_tokens_total=0, requests_total=0, max_running=device.max_running, engine_id="simulated", seq=0,
            classes=scheduler.class_loads(), max_batch_tokens=scheduler.limits.max_batch_tokens,
            step_costs=scheduler.step_time.costs(),
        )  # fmt: skip

    def _submit(self, request: TraceRequest, now_ns: int) -> None:
        # Requests are submitted between steps; one that came during the last step saw the report before it.
        arrival_ns = START_NS + request.arrival_s * 1e9
        quote = self._quote(request, self._load_before if arrival_ns < self._step_end_ns else self._load)
        if quote is not None:
            self._quotes[len(self._records)] = quote
        super()._submit(request, now_ns)

    def _quote(self, request: TraceRequest, load: Load) -> SimulatedQuote | None:
        name = request.service_class
        class_load = next((one for one in load.classes if one.name == name), None)
        computed = predict_timing(load, class_load, [request.input_tokens], 1)
        if computed is None:
            return None
        is_overloaded = refuse_unattainable(self._classes[name], class_load) is not None
        margin = None if is_overloaded else self._calibration.margin(MODEL, name, MARGIN)
        return SimulatedQuote(computed, self._calibration.corrected(MODEL, name, computed), margin)

    def _step(self, plan: Plan, now_ns: int, end_ns: int) -> None:
        super()._step(plan, now_ns, end_ns)
        self._load_before, self._load, self._step_end_ns = self._load, self._report(), end_ns

    def _finish(self, record: Record, finish: CoreFinish, now_ns: int) -> None:
        super()._finish(record, finish, now_ns)
        quote = self._quotes.pop(record.key, None)
        if quote is None or not record.completed:
            return
        first_s, last_s = ((one - record.arrival_ns) / 1e9 for one in (record.first_ns, record.last_ns))
        times = SequenceTimes(record.num_output, first_s, last_s)
        token_s = (last_s - first_s) / (times.num_tokens - 1) if times.num_tokens > 1 else None
        of = MODEL, record.request.service_class
        self._calibration.observe(*of, quote.computed, first_s, token_s)
        self._calibration.observe_margin(*of, needed_margin(quote.prediction, [times]))
        self.ended.append(QuotedRecord(quote, record.request.service_class, times))


def figures_of(records: Iterable[QuotedRecord]) -> dict[str, Any]:
    """Return the errors of the predictions, and the missed guarantees with the learned and with the least margin."""
    quoted = list(records)
    figures: dict[str, Any] = {"requests": len(quoted)}
    for name, errors in (
        ("ttft", [one.ttft_error for one in quoted]),
        ("duration", [one.duration_error for one in quoted]),
    ):
        figures |= {f"{name}_error_p{percent}": round(percentile(errors, percent), 3) for percent in (50, 90)}
    guaranteed = [(one, one.quote.margin) for one in quoted if one.quote.margin is not None]
    return figures | {
        "guarantees": len(guaranteed),
        "missed": sum(one.misses(margin) for one, margin in guaranteed),
        "missed_with_the_least_margin": sum(one.misses(MARGIN) for one, _ in guaranteed),
        "margin_p50": round(percentile([margin for _, margin in guaranteed], 50), 2) if guaranteed else None,
    }


def measure(device_name: str, load: float, seconds: float) -> dict[str, Any]:
    """Return the figures of one load, of all requests and by class."""
    began_s = time.process_time()
    device = find_device(device_name)
    spec = ";".join(f"poisson:rate={4 * part},tenants=4,tenant={name},class={name},{LENGTHS}" for name, part in CLASSES)
    workload = generate(spec, seconds, SEED)
    workload = at_load(workload, measure_capacity(workload, device), load, SEED)
    driver = QuotingDriver(workload, device, {service.name: service for service in SHIPPED})
    driver.run()
    by_class: dict[str, list[QuotedRecord]] = defaultdict(list)
    for one in driver.ended:
        by_class[one.service_class].append(one)
    return {
        "device": device_name,
        "load": load,
        **figures_of(driver.ended),
        "classes": {name: figures_of(by_class[name]) for name, _ in CLASSES},
        "cpu_s": round(time.process_time() - began_s, 1),
    }


def main() -> None:
    args = make_simulation_parser(__doc__, 300.0).parse_args()
    cases = [(device, load, args.seconds) for device in DEVICES for load in LOADS]
    with ProcessPoolExecutor(args.jobs) as pool:
        runs = print_runs(pool.map(measure, *zip(*cases, strict=True)), without="classes")
    write_simulation({"virtual_seconds": args.seconds, "seed": SEED, "margin": MARGIN, "runs": runs}, args.out)


if __name__ == "__main__":
    main()
