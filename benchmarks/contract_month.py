"""The contract check against a simulated month: its verdicts on new tenants, and the SLO attainment that follows.

    python benchmarks/contract_month.py [--jobs 2] [--limits 0.3,2.5] [--out benchmarks/results/contract_month.json]

Six tenants send requests for a week and then for a month of 30 days: by hour of day and day of week, with bursts and
some growth. The check of each new tenant sees what the command would see: the busiest window of the week before the
month, and, as a second check, that of the month itself. Then the real scheduler serves the whole month with the new
tenant, who sends at its limit all the time or up to it in office hours. The verdict is compared with the attainment of
the new tenant and of each class, over the month and in its worst hour.

A month on a fast device has too many steps to simulate. The device is a preset whose times are all multiplied by
`slowdown`, and the targets of the classes are too, so that a month without the new tenant has about 70,000 requests.
It took 50 s of one core, and 136 s with the new tenant of 2.5 requests per minute.
"""

from __future__ import annotations

import asyncio
import math
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import msgspec
from on_checkpoint import make_simulation_parser, print_runs, write_simulation

from moiety_engine.simulator.capacity import measure_capacity
from moiety_engine.simulator.devices import SimulatedDevice, find_device
from moiety_engine.simulator.driver import START_NS
from moiety_engine.simulator.records import Record
from moiety_engine.simulator.simulate import simulate
from moiety_platform.contracts.arrivals import BURST_FACTOR as BURST
from moiety_platform.contracts.arrivals import (
    CONTRACT,
    OUTPUT_WEIGHT,
    Arrival,
    ContractTerms,
    burst_of,
    busiest_window,
    contract_arrivals,
)
from moiety_platform.contracts.check import TOLERANCE, ContractCheck, Verdict
from moiety_platform.contracts.simulator import ContractSimulator
from moiety_platform.contracts.traffic import busiest_hours
from moiety_wire.classes import SHIPPED, ServiceClass
from moiety_workload.request import TraceRequest, Workload

PRESET, SLOWDOWN = "a100-llama3-8b", 100.0
SEED = 0
HOUR_S, DAY_S = 3600.0, 86_400.0
WEEK_S = 7 * DAY_S
MONDAY = datetime(2026, 5, 25, tzinfo=UTC)  # begin of the week before the month, which is June
WINDOW_S, REQUIRED, MAX_REPLICAS = 1800.0, 0.99, 2  # WINDOW_S and REQUIRED are defaults of the command
GROWTH = 0.1  # of all rates, over the month
DAYS_BETWEEN_BURSTS, BURST_S, BURST_FACTOR = 4.0, (600.0, 2400.0), (2.0, 4.0)  # of each tenant
MIN_HOUR_REQUESTS = 10  # in an hour that counts as the worst one
ALWAYS, OFFICE = "at its limit all the time", "up to its limit in office hours"


@dataclass(frozen=True, slots=True)
class TenantTraffic:
    """Traffic of one tenant: requests per minute at its peak hour on a weekday, and ranges of tokens."""

    name: str
    service_class: str
    requests_per_minute: float
    peak_hour: float
    night: float  # share of the peak's rate, 12 hours from the peak
    weekend: float  # share of a weekday's rate
    input_tokens: tuple[int, int]
    output_tokens: tuple[int, int]

    def rate_per_s(self, at_s: float) -> float:
        """Return the rate without bursts and growth, `at_s` seconds from a Monday's begin."""
        hour = at_s % DAY_S / HOUR_S
        day = (1 + math.cos(2 * math.pi * (hour - self.peak_hour) / 24)) / 2
        week = self.weekend if at_s % WEEK_S >= 5 * DAY_S else 1.0
        return self.requests_per_minute / 60 * (self.night + (1 - self.night) * day**2) * week


TENANTS = (
    TenantTraffic("assistant", "priority", 0.8, 14, 0.05, 0.2, (150, 450), (2, 6)),
    TenantTraffic("chat-europe", "standard", 1.2, 13, 0.1, 0.6, (150, 700), (2, 8)),
    TenantTraffic("chat-america", "standard", 1.0, 20, 0.1, 0.6, (150, 700), (2, 8)),
    TenantTraffic("code-review", "standard", 0.6, 15, 0.02, 0.1, (400, 1200), (2, 6)),
    TenantTraffic("reports", "flex", 0.4, 7, 0.1, 0.3, (300, 1200), (4, 12)),
    TenantTraffic("crawler", "flex", 0.25, 3, 0.5, 1.0, (200, 700), (2, 6)),
)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A contract, and the shape of the new tenant's traffic in the month."""

    requests_per_minute: float
    shape: str = ALWAYS
    service_class: str = "standard"
    input_tokens: int = 600
    output_tokens: int = 5

    @property
    def terms(self) -> ContractTerms:
        return ContractTerms(
            self.service_class,
            self.requests_per_minute,
            input_tokens=self.input_tokens,
            output_tokens=self.output_tokens,
        )


CANDIDATES = (
    Candidate(0.3),
    Candidate(2.0),
    Candidate(2.0, OFFICE),
    Candidate(2.5),
    Candidate(4.0),
)


@dataclass(frozen=True, slots=True)
class Setting:
    """Device, classes, and traffic of the week before the month and of the month, each from 0 s on."""

    device: SimulatedDevice
    classes: Mapping[str, ServiceClass]
    week: list[Arrival]
    month: list[Arrival]
    month_s: float


def make_setting(days: int) -> Setting:
    """Return the deployment and its traffic; the same for the same number of days."""
    arrivals = [one for tenant in TENANTS for one in draw_traffic(tenant, WEEK_S + days * DAY_S)]
    arrivals.sort()
    week = [one for one in arrivals if one.at_s < WEEK_S]
    month = [one._replace(at_s=one.at_s - WEEK_S) for one in arrivals[len(week) :]]
    return Setting(slow_device(), slow_classes(), week, month, days * DAY_S)


def slow_device() -> SimulatedDevice:
    """Return the preset with all its times multiplied."""
    device = find_device(PRESET)
    times = {name: getattr(device, name) * SLOWDOWN for name in device.__struct_fields__ if name.endswith("_s")}
    times["copy_bytes_per_s"] = device.copy_bytes_per_s / SLOWDOWN
    return msgspec.structs.replace(device, name=f"{device.name}, {SLOWDOWN:g} times slower", **times)


def slow_classes() -> dict[str, ServiceClass]:
    """Return the shipped classes with all their times multiplied."""
    slow = {}
    for service in SHIPPED:
        times = {name: getattr(service, name) for name in service.__struct_fields__ if name.endswith("_s")}
        targets = {name: value * SLOWDOWN for name, value in times.items() if value is not None}
        slow[service.name] = msgspec.structs.replace(service, **targets)
    return slow


def draw_traffic(tenant: TenantTraffic, seconds: float) -> list[Arrival]:
    """Return Poisson arrivals at the tenant's rate, with bursts and growth."""
    random = Random(f"{tenant.name} {SEED}")
    bursts, at_s = [], random.expovariate(1 / (DAYS_BETWEEN_BURSTS * DAY_S))
    while at_s < seconds:
        bursts.append((at_s, at_s + random.uniform(*BURST_S), random.uniform(*BURST_FACTOR)))
        at_s += random.expovariate(1 / (DAYS_BETWEEN_BURSTS * DAY_S))

    def rate_at(at_s: float) -> float:
        burst = max((factor for begin_s, end_s, factor in bursts if begin_s <= at_s < end_s), default=1.0)
        growth = 1 + GROWTH * max(0.0, at_s - WEEK_S) / (30 * DAY_S)
        return tenant.rate_per_s(at_s) * burst * growth

    most = tenant.requests_per_minute / 60 * BURST_FACTOR[1] * (1 + GROWTH)
    return [
        Arrival(
            at_s,
            tenant.name,
            random.randint(*tenant.input_tokens),
            random.randint(*tenant.output_tokens),
            tenant.service_class,
        )
        for at_s in draw_times(random, rate_at, most, seconds)
    ]


def draw_times(random: Random, rate_at: Callable[[float], float], most: float, seconds: float) -> list[float]:
    """Return Poisson arrivals whose rate per second changes with time, by thinning of arrivals at the rate `most`."""
    times, at_s = [], random.expovariate(most)
    while at_s < seconds:
        if random.random() * most < rate_at(at_s):
            times.append(at_s)
        at_s += random.expovariate(most)
    return times


def draw_candidate(candidate: Candidate, seconds: float) -> list[Arrival]:
    """Return the new tenant's requests of the month, which begins on a Monday."""
    limit_per_s = candidate.requests_per_minute / 60
    office = TenantTraffic(CONTRACT, CONTRACT, candidate.requests_per_minute, 13, 0.0, 0.1, (0, 0), (0, 0))
    rate_at = office.rate_per_s if candidate.shape == OFFICE else lambda _: limit_per_s
    random = Random(f"month of the contract {SEED}")
    lengths = candidate.input_tokens, candidate.output_tokens
    return [Arrival(at_s, CONTRACT, *lengths, CONTRACT) for at_s in draw_times(random, rate_at, limit_per_s, seconds)]


def recent_window(arrivals: Sequence[Arrival], begin: datetime) -> tuple[datetime, list[Arrival]]:
    """Return the busiest window as the command finds it: first the clock hours with the most work, then the window."""
    work: Counter[datetime] = Counter()
    for one in arrivals:
        hour = begin + timedelta(seconds=one.at_s // HOUR_S * HOUR_S)
        work[hour] += one.input_tokens + OUTPUT_WEIGHT * one.output_tokens
    hours = busiest_hours(work, WINDOW_S)
    assert hours is not None
    since_s, until_s = ((one - begin).total_seconds() for one in hours)
    first_s, window = busiest_window([one for one in arrivals if since_s <= one.at_s < until_s], WINDOW_S)
    return begin + timedelta(seconds=first_s), window


def check_contract(setting: Setting, candidate: Candidate, recent: Sequence[Arrival]) -> dict[str, Any]:
    """Return what the contract check says on this recent traffic, with one replica."""
    own = contract_arrivals(candidate.terms, recent, WINDOW_S, SEED)
    with tempfile.TemporaryDirectory(prefix="moiety-contract-") as name:
        device = Path(name) / "slow.json"
        device.write_bytes(msgspec.json.encode(setting.device))
        simulator = ContractSimulator(Path(name), str(device), 1.0)
        burst = partial(burst_of, recent, BURST, WINDOW_S, SEED)
        check = ContractCheck(
            candidate.terms, recent, own, setting.classes, simulator, required=REQUIRED, make_burst=burst
        )
        report = asyncio.run(check.run(1, MAX_REPLICAS))
    first, in_burst = report.runs[0], report.burst
    return {
        "verdict": report.verdict,
        "replicas_needed": report.replicas_needed,
        "lower_classes": report.classes,
        "requests": len(recent),
        "contract_requests": len(own),
        "before": rounded(report.before),
        "attainment": rounded({CONTRACT: first.tenant_attainment, **first.attainment}),
        "missed": first.missed,
        "burst": None if in_burst is None else {
            "requests": len(burst()),
            "attainment": rounded({CONTRACT: in_burst.tenant_attainment, **in_burst.attainment}),
            "missed": in_burst.missed,
        },
    }  # fmt: skip


def simulate_month(setting: Setting, candidate: Candidate | None) -> dict[str, Any]:
    """Return the attainment of every class over the whole month, and in its worst hour."""
    began_s = time.process_time()
    own = [] if candidate is None else draw_candidate(candidate, setting.month_s)
    classes = dict(setting.classes)
    if candidate is not None:
        classes[CONTRACT] = msgspec.structs.replace(classes[candidate.service_class], name=CONTRACT)
    requests = tuple(TraceRequest(*one) for one in sorted([*setting.month, *own]))
    workload = Workload("month", requests, setting.month_s)
    capacity = measure_capacity(workload, setting.device)
    outcome = simulate(workload, setting.device, "moiety", classes=classes.values(), capacity=capacity)
    by_class: dict[str, list[Record]] = defaultdict(list)
    for record in outcome.run.records:
        by_class[record.request.service_class].append(record)
    return {
        "requests": len(requests),
        "contract_requests": len(own),
        "offered_fraction_of_capacity": round(capacity.offered, 3),
        "steps": outcome.run.num_steps,
        "busy_fraction": round(outcome.run.busy_s / outcome.run.end_s, 3),
        "classes": {name: attained_by_hour(records) for name, records in sorted(by_class.items())},
        "cpu_s": round(time.process_time() - began_s, 1),
    }


def attained_by_hour(records: Sequence[Record]) -> dict[str, Any]:
    """Return a class's attainment over all its requests, and in its clock hours with enough requests."""
    hours: dict[int, list[bool]] = defaultdict(list)
    for record in records:
        hours[int((record.arrival_ns - START_NS) / 1e9 // HOUR_S)].append(record.attained)
    shares = {hour: sum(them) / len(them) for hour, them in hours.items() if len(them) >= MIN_HOUR_REQUESTS}
    worst = min(shares, key=lambda hour: shares[hour], default=None)
    month_begin = MONDAY + timedelta(seconds=WEEK_S)
    return {
        "requests": len(records),
        "rejected": sum(record.failure is not None for record in records),
        "attainment": round(sum(record.attained for record in records) / len(records), 4),
        "worst_hour": None if worst is None else round(shares[worst], 4),
        "worst_hour_begin": None if worst is None else (month_begin + timedelta(hours=worst)).isoformat(),
        "hours": len(shares),
        "hours_below_required": sum(share < REQUIRED for share in shares.values()),
    }


def broken(found: Mapping[str, Mapping[str, Any]], before: Mapping[str, Mapping[str, Any]], figure: str) -> list[str]:
    """Return the classes that miss the check's own rule in this figure of the month."""
    missed = []
    for name, row in found.items():
        if (share := row[figure]) is None:
            continue
        known = before.get(name, {}).get(figure)
        allowed = REQUIRED if name == CONTRACT else min(REQUIRED, REQUIRED if known is None else known) - TOLERANCE
        if share < allowed:
            missed.append(name)
    return missed


def is_sure(check: Mapping[str, Any]) -> bool:
    """Return whether the check accepted the tenant, and missed no SLO in the burst either."""
    return check["verdict"] == Verdict.ACCEPTED and not check["burst"]["missed"]


def compared(is_accepted: bool, missed: Sequence[str]) -> str:
    if is_accepted:
        return "too lax" if missed else "agrees"
    return "agrees" if missed else "too strict"


def measure_month(candidate: Candidate | None, days: int) -> dict[str, Any]:
    """Return the month with one candidate; without one, the month alone."""
    described = None if candidate is None else asdict(candidate)
    return {"candidate": described, "month": simulate_month(make_setting(days), candidate)}


def measure_checks(candidate: Candidate, days: int) -> dict[str, Any]:
    """Return what the check says of a candidate, on the week before the month and on the month itself."""
    setting = make_setting(days)
    result = {}
    for name, arrivals, begin in (
        ("check_of_week_before", setting.week, MONDAY),
        ("check_of_month_itself", setting.month, MONDAY + timedelta(seconds=WEEK_S)),
    ):
        since, window = recent_window(arrivals, begin)
        result[name] = {"window_since": since.isoformat(), **check_contract(setting, candidate, window)}
    return result


def compare(run: dict[str, Any], alone: Mapping[str, Any]) -> dict[str, Any]:
    """Return the run with what each check said beside what happened."""
    found, before = run["month"]["classes"], alone["month"]["classes"]
    missed = {figure: broken(found, before, figure) for figure in ("attainment", "worst_hour")}
    comparison = {
        check: {
            "over_the_month": compared(run[check]["verdict"] == Verdict.ACCEPTED, missed["attainment"]),
            "in_the_worst_hour": compared(run[check]["verdict"] == Verdict.ACCEPTED, missed["worst_hour"]),
            "with_the_burst_in_the_worst_hour": compared(is_sure(run[check]), missed["worst_hour"]),
        }
        for check in ("check_of_week_before", "check_of_month_itself")
    }
    return {**run, "missed_over_the_month": missed["attainment"], "missed_in_the_worst_hour": missed["worst_hour"],
            "comparison": comparison}  # fmt: skip


def rounded(shares: Mapping[str, float]) -> dict[str, float]:
    return {name: round(share, 4) for name, share in shares.items()}


def main() -> None:
    parser = make_simulation_parser("The contract check against a simulated month.", 30 * DAY_S)
    limits = sorted({one.requests_per_minute for one in CANDIDATES})
    parser.add_argument("--limits", default=",".join(map(str, limits)), help="limits to check, in requests per minute")
    args = parser.parse_args()
    days = max(1, round(args.seconds / DAY_S))
    candidates = [one for one in CANDIDATES if one.requests_per_minute in set(map(float, args.limits.split(",")))]
    cases = [None, *candidates]
    checked = list({one.requests_per_minute: one for one in candidates}.values())  # the check knows no shape
    with ProcessPoolExecutor(args.jobs) as pool:
        checking = pool.map(measure_checks, checked, [days] * len(checked))
        alone, *months = print_runs(pool.map(measure_month, cases, [days] * len(cases)))
        checks = {one.requests_per_minute: found for one, found in zip(checked, print_runs(checking), strict=True)}
    runs = [run | checks[one.requests_per_minute] for one, run in zip(candidates, months, strict=True)]
    result = {
        "days": days,
        "seed": SEED,
        "preset": PRESET,
        "slowdown": SLOWDOWN,
        "window_s": WINDOW_S,
        "required": REQUIRED,
        "growth_over_30_days": GROWTH,
        "burst_factor_of_the_check": BURST,
        "bursts": {"days_between": DAYS_BETWEEN_BURSTS, "seconds": BURST_S, "factor": BURST_FACTOR},
        "tenants": [asdict(tenant) for tenant in TENANTS],
        "min_requests_of_an_hour": MIN_HOUR_REQUESTS,
        "max_cpu_s_of_a_month": max(run["month"]["cpu_s"] for run in [alone, *runs]),
        "alone": alone["month"],
        "runs": [compare(run, alone) for run in runs],
    }
    write_simulation(result, args.out)


if __name__ == "__main__":
    main()
