"""Arrivals of a contract check: the busiest part of recent traffic, and a new tenant's requests at its limits. Pure.

Times are seconds from the start of the window, lengths are tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from random import Random
from typing import NamedTuple

from moiety_platform.contracts.errors import ContractProblem

CONTRACT = "contract"  # the tenant's name in the simulation, and that of its class, which has terms of its own there
HEAD = "arrival_s,tenant,input_tokens,output_tokens,class\n"
OUTPUT_WEIGHT = 2  # of an output token in the work of a request, as in the scheduler's fairness counters
BURST_FACTOR = 1.5  # of the busiest traffic of a week to that of the month after it
BURST_SHIFT_S = 60.0
MAX_REQUESTS = 200_000  # of the recent traffic, and of the new tenant


class Arrival(NamedTuple):
    """One request."""

    at_s: float
    tenant: str
    input_tokens: int
    output_tokens: int
    service_class: str


@dataclass(frozen=True, slots=True)
class ContractTerms:
    """Contract of the new tenant: its class, weight and limits per minute.

    Without lengths, its requests have those of the recent traffic.
    """

    service_class: str
    requests_per_minute: float
    tokens_per_minute: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    weight: float = 1.0


def busiest_window(arrivals: Sequence[Arrival], window_s: float) -> tuple[float, list[Arrival]]:
    """Return the start of the `window_s` seconds with the most work, and their arrivals, from 0 on.

    All arrivals if they span less.
    """
    ordered = sorted(arrivals, key=attrgetter("at_s"))
    best, best_work, start, work = (0, 0), -1, 0, 0
    for end, arrival in enumerate(ordered):
        work += _work(arrival)
        while ordered[start].at_s <= arrival.at_s - window_s:
            work -= _work(ordered[start])
            start += 1
        if work > best_work:
            best, best_work = (start, end + 1), work
    chosen = ordered[slice(*best)]
    first_s = chosen[0].at_s if chosen else 0.0
    return first_s, [one._replace(at_s=one.at_s - first_s) for one in chosen]


def contract_arrivals(terms: ContractTerms, recent: Sequence[Arrival], window_s: float, seed: int) -> list[Arrival]:
    """Return the new tenant's requests at its full limits: Poisson arrivals for `window_s` seconds.

    Their lengths are the contract's, otherwise those of `recent` requests. Raises ContractProblem without requests to
    take lengths from, and for limits that allow too few requests or too many.
    """
    is_given = terms.input_tokens is not None and terms.output_tokens is not None
    if not recent and not is_given:
        raise ContractProblem(
            "no request was served in this period, from which the contract could take its lengths; give the input "
            "tokens and the output tokens of a request"
        )
    random = Random(f"contract {seed}")
    lengths = [
        (terms.input_tokens or one.input_tokens, terms.output_tokens or one.output_tokens) for one in recent
    ] or [(terms.input_tokens or 0, terms.output_tokens or 0)]
    mean_tokens = sum(map(sum, lengths)) / len(lengths)
    rate_per_s = terms.requests_per_minute / 60
    if terms.tokens_per_minute is not None:
        rate_per_s = min(rate_per_s, terms.tokens_per_minute / mean_tokens / 60)
    if rate_per_s * window_s > MAX_REQUESTS:
        raise ContractProblem(
            f"the limits allow more than {MAX_REQUESTS:,} requests in {window_s / 60:g} minutes; give a shorter "
            "window or lower limits"
        )
    found: list[Arrival] = []
    at_s = random.expovariate(rate_per_s)
    while at_s < window_s:
        found.append(Arrival(at_s, CONTRACT, *random.choice(lengths), CONTRACT))
        at_s += random.expovariate(rate_per_s)
    if not found:
        raise ContractProblem(
            f"the limits allow fewer than one request in {window_s / 60:g} minutes; give a longer window"
        )
    return found


def burst_of(arrivals: Sequence[Arrival], factor: float, window_s: float, seed: int) -> list[Arrival]:
    """Return `factor` times the requests, in order; none for a factor of 1.

    Copies come within BURST_SHIFT_S of the request that they copy, so that the traffic keeps its shape, its lengths and
    its tenants.
    """
    if factor <= 1:
        return []
    random = Random(f"burst {seed}")
    found = list(arrivals)
    for one in arrivals:
        num_copies = int(factor - 1) + (random.random() < (factor - 1) % 1)
        for _ in range(num_copies):
            at_s = one.at_s + random.uniform(-BURST_SHIFT_S, BURST_SHIFT_S)
            found.append(one._replace(at_s=min(max(0.0, at_s), window_s)))
    return sorted(found, key=attrgetter("at_s"))


def to_csv(arrivals: Sequence[Arrival]) -> str:
    """Return a trace file of the simulator."""
    rows = [
        (f"{one.at_s:.6f}", one.tenant, one.input_tokens, one.output_tokens, one.service_class)
        for one in sorted(arrivals, key=attrgetter("at_s"))
    ]
    return HEAD + "".join(",".join(map(str, row)) + "\n" for row in rows)


def _work(arrival: Arrival) -> int:
    return arrival.input_tokens + OUTPUT_WEIGHT * arrival.output_tokens
