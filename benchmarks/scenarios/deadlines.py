"""S3, S4: QoServe's classes on the lengths of Azure's code trace. With S3 goes the calibration against its figures."""

from __future__ import annotations

from dataclasses import dataclass, replace

from moiety_engine.simulator.capacity import Capacity, measure_capacity
from moiety_engine.simulator.devices import A100_LLAMA3_8B_QOSERVE, SimulatedDevice
from moiety_engine.simulator.simulate import SimulationOutcome, simulate
from moiety_wire.classes import ServiceClass
from moiety_workload.request import TraceRequest, Workload
from scenarios.claims import OURS, Ask, Measurement, Scenario, Settings
from scenarios.offers import AZURE_CODE, draw_classes, load, poisson_at, qoserve_classes

STEPS = ("edf", "qoserve-chunking", "qoserve-demotion", "qoserve")  # in the order of the published ablation
CURVE = (0.5, 1.0, 1.35, 1.8)
OVERLOAD = 2.2
GRID = 0.05
ALLOWED = 0.01
_LOW_PART = 0.2
_NUM_PARTS = 4


@dataclass(frozen=True, slots=True)
class CodeMix:
    """Poisson arrivals with the trace's lengths, a third of them in each class. Loads are multiples of C."""

    settings: Settings
    seed: int
    trace: Workload
    capacity: Capacity
    classes: list[ServiceClass]
    device: SimulatedDevice

    @classmethod
    def of(cls, settings: Settings, seed: int, device: SimulatedDevice = A100_LLAMA3_8B_QOSERVE) -> CodeMix:
        trace = load(settings.traces, AZURE_CODE)
        return cls(settings, seed, trace, measure_capacity(trace, device), qoserve_classes(), device)

    @property
    def rate_per_s(self) -> float:
        """Return the request rate at load 1."""
        return len(self.trace.requests) / self.trace.duration_s / self.capacity.offered

    def requests(self, factor: float) -> tuple[TraceRequest, ...]:
        arrivals = poisson_at(self.trace.requests, factor * self.rate_per_s, self.settings.hour_s, self.seed)
        return draw_classes(arrivals, [service.name for service in self.classes], self.seed)

    def run(self, policy: str, factor: float) -> SimulationOutcome:
        workload = replace(self.trace, requests=self.requests(factor), duration_s=self.settings.hour_s)
        return simulate(workload, self.device, policy, classes=self.classes, capacity=self.capacity)

    def violations(self, policy: str, factor: float) -> float:
        return 1 - float(self.run(policy, factor).figures["attainment"])

    def largest_load(self, policy: str, low: int, high: int, unit: float) -> int:
        """Return the largest load with few enough violations.

        Loads are multiples of `unit` times C, bisected between one that is taken to have few enough and one that is
        not.
        """
        while high - low > 1:
            middle = (low + high) // 2
            if self.violations(policy, middle * unit) <= ALLOWED:
                low = middle
            else:
                high = middle
        return low


def measure_code(settings: Settings, seed: int) -> Measurement:
    found = Measurement()
    mix = CodeMix.of(settings, seed)
    edf = GRID * mix.largest_load("edf", 16, 32, GRID)  # from 0.8 to 1.6 C
    ours = GRID * mix.largest_load(OURS, 18, 34, GRID * edf)  # from 0.9 to 1.7 times EDF's
    found.put("largest load ÷ EDF's", OURS, ours)
    found.put("EDF's capacity ÷ C", "edf", edf)
    found.put("EDF's capacity, requests/s", "edf", edf * mix.rate_per_s)
    rivals = STEPS if seed == settings.first_seed else ()
    curve: dict[str, dict[str, float]] = {}
    for policy in (OURS, *rivals):
        violated = mix.violations(policy, OVERLOAD * edf)
        found.put("violations at 2.2", policy, violated)
        curve[policy] = {str(OVERLOAD): violated}
    if seed == settings.first_seed:
        for policy in (OURS, "edf", "qoserve"):
            curve[policy] |= {str(factor): mix.violations(policy, factor * edf) for factor in CURVE}
        found.series["violations"] = curve
    return found


def measure_swing(settings: Settings, seed: int) -> Measurement:
    """Measure alternating quarters of an hour at 2 and at 5 requests a second."""
    found = Measurement()
    mix = CodeMix.of(settings, seed)
    workload, classes = _swing(mix, 2.0, 5.0)
    for policy in (OURS, "qoserve", "edf", "fcfs"):
        run = simulate(workload, A100_LLAMA3_8B_QOSERVE, policy, classes=classes, capacity=mix.capacity).run
        important = [record for record in run.records if record.service_class.rank == 0]
        for key, members in (("important", important), ("overall", run.records)):
            late = sum(not record.attained for record in members)
            found.put(key, policy, late / len(members))
    return found


def _swing(mix: CodeMix, low_per_s: float, high_per_s: float) -> tuple[Workload, list[ServiceClass]]:
    part_s = mix.settings.hour_s / _NUM_PARTS
    arrivals = []
    for number in range(_NUM_PARTS):
        rate_per_s = high_per_s if number % 2 else low_per_s
        part = poisson_at(mix.trace.requests, rate_per_s, part_s, _NUM_PARTS * mix.seed + number)
        arrivals += [replace(request, arrival_s=request.arrival_s + number * part_s) for request in part]
    classes = [*qoserve_classes(rank=0), *qoserve_classes(rank=1, suffix="-low")]
    weights = [*[(1 - _LOW_PART) / 3] * 3, *[_LOW_PART / 3] * 3]
    requests = draw_classes(arrivals, [service.name for service in classes], mix.seed, weights=weights)
    return replace(mix.trace, requests=requests, duration_s=mix.settings.hour_s), classes


S3 = Scenario(
    "S3",
    "Deadlines on Azure's code trace",
    "a100-llama3-8b-qoserve, lengths of the Azure code trace, Poisson arrivals for an hour and the drain after it "
    "(SLOs of 600 and 1,800 s mean nothing in ten minutes), one tenant, thirds of {TTFT 6 s + 50 ms a token; done "
    "in 600 s; done in 1,800 s} at one rank, nobody turned away. EDF's capacity: its largest load with at most 1 % "
    "violations, in steps of 0.05 C; of ours, in steps of 0.05 of that.",
    (
        Ask(
            "violations at 2.2",
            "violations at 2.2 × EDF's capacity",
            at_most=0.16,
            strict=True,
            published="EDF 100 %, with chunking 74 %, with demotion 26 %, QoServe 16 %",
            form="{:.1%}",
        ),
        Ask(
            "largest load ÷ EDF's", "largest load with ≤ 1 % violations ÷ EDF's capacity", at_least=1.35, form="{:.2f}"
        ),
        Ask("EDF's capacity ÷ C", "EDF's capacity ÷ C", form="{:.2f}"),
        Ask("EDF's capacity, requests/s", "EDF's capacity, requests/s", form="{:.2f}"),
    ),
    measure_code,
)
S4 = Scenario(
    "S4",
    "Swinging load",
    "a100-llama3-8b-qoserve, lengths of the Azure code trace, Poisson arrivals at 2 and 5 a second in turn, a quarter "
    "of an hour each, for an hour; S3's three classes at two ranks, 20 % of the requests at the lower.",
    (
        Ask("important", "violations of the important", at_most=0.0, form="{:.2%}", published="QoServe 0 %"),
        Ask(
            "overall",
            "violations overall",
            at_most=0.086,
            strict=True,
            form="{:.1%}",
            published="FCFS 82 %, EDF 84 %, QoServe 8.6 % (four hours)",
        ),
    ),
    measure_swing,
)
SCENARIOS = (S3, S4)
