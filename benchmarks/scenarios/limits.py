"""S3-limits: the largest part of S3's load that any policy can serve in time, with the paper's runtime and without.

The bound holds for every policy on this device, even for one that knows arrivals and lengths in advance. Every schedule
needs time for

- the rows of all requests with a deadline up to some time D, at the price of a row in the largest step, and for
  attention and reading of KV;
- the steps of streams: a stream of n tokens at its pace needs n steps between its arrival and its last deadline, even
  if fewer of the largest steps would be enough for all rows. Each additional step costs at least the part of a step's
  time that does not depend on its rows, by the tangent at the largest step (a step's time is convex in its rows, and
  the price of a row falls up to there). Streams whose windows do not overlap have no step in common, so their costs add
  up; weighted interval scheduling chooses the streams that count.

If the sum is more than D, some requests must be late: at least the number of the most expensive requests that together
make up for the difference. Any part of a stream's additional cost can be counted, and the bound stays valid. The
counted part makes no stream more expensive than the longest prompts, since the bound would otherwise be lower: it would
assume that those streams are given up.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from moiety_engine.simulator.devices import A100_LLAMA3_8B, A100_LLAMA3_8B_QOSERVE, SimulatedDevice
from moiety_wire.classes import ServiceClass
from moiety_workload.request import TraceRequest
from scenarios.claims import OURS, Ask, Measurement, Scenario, Settings
from scenarios.deadlines import ALLOWED, GRID, OVERLOAD, CodeMix

ANY = "any policy"
ASKED = 1.35
_EVERY_S = 50  # seconds between the times at which demand is compared with time; an hour is one of them
_CLOSE = 0.002  # of C, at which the search for the largest load ends


@dataclass(frozen=True, slots=True)
class _Demand:
    """Demand of one request: seconds of work, deadline, and, for a stream, its pace's additional cost and start."""

    work_s: float
    due_s: float
    begins_s: float = 0.0
    pace_s: float = 0.0


def least_violations(
    requests: Sequence[TraceRequest], classes: Sequence[ServiceClass], device: SimulatedDevice
) -> float:
    """Return the share of the requests that any policy must serve late."""
    by_name = {service.name: service for service in classes}
    demands = [_demand(request, by_name[request.service_class], device) for request in requests]
    dearest_s = sorted(demand.work_s for demand in demands)[int((1 - ALLOWED) * len(demands))]
    chosen = _disjoint(demands, dearest_s)
    needs = sorted((demand.due_s, demand.work_s + chosen.get(number, 0.0)) for number, demand in enumerate(demands))
    dues = [due_s for due_s, _ in needs]
    demanded = [0.0, *accumulate(need_s for _, need_s in needs)]
    most = 0
    for until_s in range(_EVERY_S, math.ceil(dues[-1]), _EVERY_S):
        num_due = bisect_right(dues, until_s)
        lacking_s = demanded[num_due] - until_s
        if lacking_s > 0:
            saved = accumulate(sorted((need_s for _, need_s in needs[:num_due]), reverse=True))
            most = max(most, 1 + sum(1 for seconds in saved if seconds < lacking_s))
    return most / len(requests)


def _demand(request: TraceRequest, service: ServiceClass, device: SimulatedDevice) -> _Demand:
    full = device.max_batch_tokens
    multiply_s = full * device.token_s
    roofline_s = math.hypot(device.dense_s, multiply_s)
    a_step_s = device.overhead_s + device.dense_s**2 / roofline_s
    a_row_s = device.token_s * multiply_s / roofline_s + a_step_s / full
    ttft_s, tpot_s = service.ttft_s, service.tpot_s
    prompt = request.input_tokens
    output = 1 if ttft_s is not None and tpot_s is None else request.output_tokens  # the others are due at no time
    pairs = prompt * (prompt + 1) / 2
    read = (output - 1) * (prompt + output / 2)
    work_s = a_row_s * (prompt + output - 1) + device.pair_s * pairs + device.kv_token_s * read
    if ttft_s is None:
        return _Demand(work_s, request.arrival_s + (service.completion_s or math.inf))
    window_s = ttft_s + service.ttft_per_1k_s * prompt / 1000 + (tpot_s or 0.0) * (output - 1)
    further_steps = output - window_s / (a_row_s * full)
    return _Demand(work_s, request.arrival_s + window_s, request.arrival_s, max(0.0, a_step_s * further_steps))


def _disjoint(demands: Sequence[_Demand], dearest_s: float) -> dict[int, float]:
    """Return the streams with disjoint windows that cost the most in total: number → seconds that count."""
    paced = sorted(
        (demand.due_s, demand.begins_s, min(demand.pace_s, dearest_s - demand.work_s), number)
        for number, demand in enumerate(demands)
        if demand.pace_s > 0 and demand.work_s < dearest_s
    )
    ends = [due_s for due_s, *_ in paced]
    best = [0.0]  # with the first so many of them
    before: list[int | None] = []  # how many come before this one, if it is taken
    for place, (_, begins_s, pace_s, _) in enumerate(paced):
        earlier = bisect_right(ends, begins_s, 0, place)
        taken_s = best[earlier] + pace_s
        before.append(earlier if taken_s > best[-1] else None)
        best.append(max(best[-1], taken_s))
    chosen = {}
    place = len(paced)
    while place:
        earlier_or_none = before[place - 1]
        if earlier_or_none is None:
            place -= 1
        else:
            chosen[paced[place - 1][3]] = paced[place - 1][2]
            place = earlier_or_none
    return chosen


def largest_possible(mix: CodeMix, classes: Sequence[ServiceClass]) -> float:
    """Return the largest load, in multiples of C, at which the bound allows few enough violations."""
    low, high = 1.0, 3.0
    while high - low > _CLOSE:
        middle = (low + high) / 2
        if least_violations(mix.requests(middle), classes, mix.device) <= ALLOWED:
            low = middle
        else:
            high = middle
    return high


def measure_limits(settings: Settings, seed: int) -> Measurement:
    found = Measurement()
    for name, device in (("preset", A100_LLAMA3_8B_QOSERVE), ("light", A100_LLAMA3_8B)):
        mix = CodeMix.of(settings, seed, device)
        edf = GRID * mix.largest_load("edf", 22, 28, GRID)  # from 1.1 to 1.4 C
        found.put(f"{name}: EDF, requests/s", "edf", edf * mix.rate_per_s)
        asked = mix.requests(ASKED * edf)
        found.put(f"{name}: least at 1.35", ANY, least_violations(asked, mix.classes, device))
        found.put(f"{name}: largest ÷ EDF's", ANY, largest_possible(mix, mix.classes) / edf)
        for policy in (OURS, *(("qoserve",) if seed == settings.first_seed else ())):
            found.put(f"{name}: violations at 1.35", policy, mix.violations(policy, ASKED * edf))
            found.put(f"{name}: violations at 2.2", policy, mix.violations(policy, OVERLOAD * edf))
    return found


S3_LIMITS = Scenario(
    "S3-limits",
    "What can be kept of S3 at all, and on another device",
    "As S3. *Any policy* is a lower bound on violations for every order and size of steps on this device, one that "
    "knows all arrivals and lengths before they come included; its derivation heads `benchmarks/scenarios/limits.py`. "
    "S3's device has the profile of steps that QoServe's paper reports. *Light* is a100-llama3-8b, the same card by "
    "its data sheet: there short steps lose so little (1.3 times, not 2) that EDF's fixed chunk is hardly a fault, and "
    "a load of 1.35 times EDF's is beyond what any policy can serve in time. The paper reports 2.75 requests/s for "
    "EDF, 3.3 with chunks sized by slack and 3.65 with all, 1.33 times EDF's, over four hours of longer prompts "
    "(median 1,930 tokens, here 1,469), and its artefact counts of streams the first token alone.",
    (
        Ask("preset: EDF, requests/s", "EDF's capacity, requests/s", form="{:.2f}", published="EDF 2.75"),
        Ask("preset: violations at 1.35", "violations at 1.35 × EDF's capacity", form="{:.2%}"),
        Ask("preset: violations at 2.2", "violations at 2.2 × EDF's capacity", form="{:.1%}"),
        Ask("preset: least at 1.35", "violations that no policy avoids at 1.35 × EDF's capacity", form="{:.2%}"),
        Ask("preset: largest ÷ EDF's", "no policy has ≤ 1 % from this load on, ÷ EDF's capacity", form="{:.3f}"),
        Ask("light: EDF, requests/s", "light: EDF's capacity, requests/s", form="{:.2f}"),
        Ask("light: violations at 1.35", "light: violations at 1.35 × EDF's capacity", form="{:.2%}"),
        Ask("light: violations at 2.2", "light: violations at 2.2 × EDF's capacity", form="{:.1%}"),
        Ask("light: least at 1.35", "light: violations that no policy avoids there", form="{:.2%}"),
        Ask("light: largest ÷ EDF's", "light: no policy has ≤ 1 % from there on", form="{:.3f}"),
    ),
    measure_limits,
)
SCENARIOS = (S3_LIMITS,)
