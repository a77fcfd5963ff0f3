"""Transforms of request lists: cut, repeat, multiply, change the rate or the lengths.

Pure functions; random only by a seed. All keep the order of arrival.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random

from moiety_workload.errors import BadSpec
from moiety_workload.request import TraceRequest, Workload

Work = Callable[[TraceRequest], float]


def by_arrival(requests: Sequence[TraceRequest]) -> list[TraceRequest]:
    return sorted(requests, key=lambda request: request.arrival_s)


def spread_ticks(requests: Sequence[TraceRequest], seed: int) -> list[TraceRequest]:
    """Spread requests that share one coarse timestamp at random up to the next timestamp."""
    rng = Random(f"ticks {seed}")
    times = sorted({request.arrival_s for request in requests})
    steps = [later - earlier for earlier, later in pairwise(times)]
    typical_s = sorted(steps)[len(steps) // 2] if steps else 0.0
    step_of = dict(zip(times, [*steps, typical_s], strict=True))
    return by_arrival(
        [
            replace(request, arrival_s=request.arrival_s + rng.random() * min(step_of[request.arrival_s], typical_s))
            for request in requests
        ]
    )


def at_rate(requests: list[TraceRequest], rate_per_s: float) -> list[TraceRequest]:
    """Stretch or compress arrivals in time to a mean rate; bursts remain."""
    span_s = requests[-1].arrival_s
    if span_s == 0:
        return requests
    factor = (len(requests) - 1) / rate_per_s / span_s
    return [replace(request, arrival_s=request.arrival_s * factor) for request in requests]


def shorten(requests: list[TraceRequest], num_requests: int | None, duration_s: float | None) -> list[TraceRequest]:
    """Return the first `num_requests` requests, or those of the first `duration_s` seconds."""
    chosen = requests if num_requests is None else requests[:num_requests]
    return chosen if duration_s is None else [request for request in chosen if request.arrival_s <= duration_s]


def scale_lengths(requests: Sequence[TraceRequest], factor: float) -> list[TraceRequest]:
    """Multiply prompt and output lengths, each at least 1. Prefix blocks no longer fit and are dropped."""
    return [
        replace(
            request,
            input_tokens=max(1, round(request.input_tokens * factor)),
            output_tokens=max(1, round(request.output_tokens * factor)),
            prefix_ids=request.prefix_ids if factor == 1 else (),
        )
        for request in requests
    ]


def cut(workload: Workload, start_s: float, duration_s: float) -> Workload:
    """Return the window [start, start + duration) of a workload, beginning at 0."""
    chosen = tuple(
        replace(request, arrival_s=request.arrival_s - start_s)
        for request in workload.requests
        if start_s <= request.arrival_s < start_s + duration_s
    )
    if not chosen:
        raise BadSpec(f"{workload.name} has no request from {start_s:g} s to {start_s + duration_s:g} s")
    return replace(workload, requests=chosen, duration_s=min(duration_s, workload.duration_s - start_s))


def last_for(workload: Workload, duration_s: float) -> Workload:
    """Cut a workload to a duration, or repeat it to fill it. A repetition has new prompts."""
    requests: list[TraceRequest] = []
    for number in range(math.ceil(duration_s / workload.duration_s)):
        requests += _copy(workload, number, number * workload.duration_s)
    kept = tuple(request for request in requests if request.arrival_s < duration_s)
    return replace(workload, requests=kept, duration_s=duration_s)


def multiply(workload: Workload, factor: float, work: Work, seed: int) -> Workload:
    """Return a workload with `factor` times the demanded work, of the same duration and tenants.

    Copies of the workload, each shifted in time and wrapped around, are merged; the last copy contributes a random
    subset of requests for the fractional part of `factor`.
    """
    if factor <= 0:
        raise BadSpec(f"the factor of a workload must be above 0, not {factor:g}")
    rng = Random(f"multiply {seed}")
    requests: list[TraceRequest] = []
    num_whole = int(factor)
    for number in range(num_whole):
        requests += _shifted(workload, number, rng)
    target = (factor - num_whole) * sum(work(request) for request in workload.requests)
    last = _shifted(workload, num_whole, rng)
    rng.shuffle(last)
    taken = 0.0
    for request in last:
        amount = work(request)
        if taken + amount / 2 > target:
            break
        taken += amount
        requests.append(request)
    if not requests:
        raise BadSpec(f"{factor:g} × {workload.name} has no request; use a longer trace or a higher load")
    return replace(workload, requests=tuple(by_arrival(requests)))


def _shifted(workload: Workload, number: int, rng: Random) -> list[TraceRequest]:
    """Return copy `number` (0: unchanged), shifted in time and wrapped around at the end."""
    shift_s = rng.random() * workload.duration_s if number else 0.0
    return [
        replace(request, arrival_s=request.arrival_s % workload.duration_s)
        for request in _copy(workload, number, shift_s)
    ]


def _copy(workload: Workload, number: int, shift_s: float) -> list[TraceRequest]:
    """Return the requests shifted by `shift_s`; copy `number` shares no prefix blocks with other copies."""
    if number == 0 and shift_s == 0:
        return list(workload.requests)
    return [
        replace(
            request,
            arrival_s=request.arrival_s + shift_s,
            prefix_ids=tuple(_renumber(block, number) for block in request.prefix_ids),
            conversation=f"{request.conversation}/{number}" if request.conversation else "",
        )
        for request in workload.requests
    ]


def _renumber(block: int, number: int) -> int:
    return block + (number << 40)
