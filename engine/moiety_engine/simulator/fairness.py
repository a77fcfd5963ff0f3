"""Fairness of service between tenants, in VTC's units: prompt tokens plus twice the output tokens.

*gap*: over all pairs of tenants and all stretches of time in which both had requests waiting, the largest difference by
which one tenant's service grew beyond the other's, each divided by its weight (VTC, theorem 4.4). Within one class.
*bound*: the theorem's bound, 2 · max(w_p · longest prompt, w_q · KV tokens), divided by the smallest weight. *window*:
the service difference of VTC's published tables (`get_service_diff_over_time` of its artefact); *accumulated_gap*: the
difference in its plots. *jain*: Jain's index over tenants of the service while backlogged relative to the service due
by weight; 1 is even. Tenants are seldom backlogged at the same time, so a tenant's service is compared with the service
of others in the same moments. Within one class.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moiety_engine.simulator.records import Record, Run, Samples, ServiceAccount

PROMPT_WEIGHT, OUTPUT_WEIGHT = 1, 2
_WARM_UP_S, _WINDOW_S, _NUM_TICKS = 30.0, 60.0, 20
_NUM_MOMENTS = 36
_MIN_BACKLOG_S = 30.0  # a shorter backlog gives no share worth comparing


def measure_fairness(run: Run, kv_tokens: int) -> dict[str, float | None]:
    """Return max_gap, bound, window_max, window_mean, window_variance, accumulated_gap and jain."""
    by_class: dict[str, list[int]] = defaultdict(list)
    for index, account in enumerate(run.accounts):
        by_class[account.service_class].append(index)
    service_TA, backlogged_TA = _as_arrays(run.samples, run.accounts)
    gaps = [largest_gap(service_TA[:, members], backlogged_TA[:, members]) for members in by_class.values()]
    weight_A = np.array([account.tenant.weight for account in run.accounts] or [1.0])
    least = _MIN_BACKLOG_S / run.samples.interval_s
    shares = (
        evenness(service_TA[:, members], backlogged_TA[:, members], weight_A[members], least)
        for members in by_class.values()
    )
    known = [share for share in shares if share is not None]
    longest_prompt = max((record.request.input_tokens for record in run.records), default=0)
    smallest = min((tenant.weight for tenant in run.tenants), default=1.0)
    differences = window_differences(run.records, run.window_s)
    return {
        "max_gap": max(gaps, default=0.0),
        "bound": 2 * max(PROMPT_WEIGHT * longest_prompt, OUTPUT_WEIGHT * kv_tokens) / smallest,
        "window_max": float(np.max(differences)),
        "window_mean": float(np.mean(differences)),
        "window_variance": float(np.var(differences)),
        "accumulated_gap": accumulated_gap(run.records, run.window_s),
        "jain": min(known, default=1.0),
    }


def largest_gap(service_TA: np.ndarray, backlogged_TA: np.ndarray) -> float:
    """Return the largest service gap over all pairs of columns.

    A pair's gap is the range of its difference within each stretch of samples at which both had been backlogged since
    the sample before.
    """
    worst = 0.0
    for first in range(service_TA.shape[1]):
        both_TA = backlogged_TA[:, first, None] & backlogged_TA[:, first + 1 :]
        for offset in np.flatnonzero(both_TA.any(axis=0)):
            difference_T = service_TA[:, first] - service_TA[:, first + 1 + offset]
            edges = np.flatnonzero(np.diff(np.concatenate(([0], both_TA[:, offset].view(np.int8), [0]))))
            for begin, end in edges.reshape(-1, 2):
                stretch = difference_T[max(0, begin - 1) : end]
                worst = max(worst, float(stretch.max() - stretch.min()))
    return worst


@dataclass(frozen=True, slots=True)
class _Spans:
    """Requests as VTC's plots see them: cost, arrival, and the interval over which service is spread evenly.

    A request that was not served, or too briefly to divide by, has an empty interval.
    """

    cost: np.ndarray
    tenant: np.ndarray
    num_tenants: int
    arrival: np.ndarray
    begin: np.ndarray
    end: np.ndarray

    @classmethod
    def of(cls, records: Sequence[Record]) -> _Spans:
        tenants = sorted({record.request.tenant for record in records})
        index_of = {tenant: index for index, tenant in enumerate(tenants)}
        rows = []
        for record in records:
            request = record.request
            start_ns = record.arrival_ns - round(request.arrival_s * 1e9)  # start of the run
            begin, end = (record.first_ns - start_ns) / 1e9, (record.last_ns - start_ns) / 1e9
            if not record.completed or end < 1 or end - begin < 1e-5:
                begin = end = 0.0
            cost = PROMPT_WEIGHT * request.input_tokens + OUTPUT_WEIGHT * request.output_tokens
            rows.append((cost, request.arrival_s, begin, end))
        cost_R, arrival_R, begin_R, end_R = np.array(rows, dtype=float).reshape(-1, 4).T
        tenant_R = np.array([index_of[record.request.tenant] for record in records], dtype=int)
        return cls(cost_R, tenant_R, len(tenants), arrival_R, begin_R, end_R)

    def served(self, left: float, right: float) -> np.ndarray:
        """Return each tenant's service from `left` to `right`."""
        length = self.end - self.begin
        overlap = np.clip(np.minimum(right, self.end) - np.maximum(left, self.begin), 0, None)
        got = np.where(length > 0, self.cost * overlap / np.where(length > 0, length, 1.0), 0.0)
        return np.bincount(self.tenant, got, self.num_tenants)

    def demand(self, left: float, right: float) -> np.ndarray:
        """Return the service that each tenant requested from `left` to `right`."""
        came = (left <= self.arrival) & (self.arrival <= right)
        return np.bincount(self.tenant, np.where(came, self.cost, 0.0), self.num_tenants)


def window_differences(records: Sequence[Record], window_s: float) -> list[float]:
    """Return VTC's service differences, in tokens per second.

    They are taken at 19 moments after a warm-up of 30 s, over 60 s from each, and summed over tenants. A tenant's
    difference is the smaller of two: the best-served tenant's lead over it, and the distance of its service from its
    demand. The artefact's run lasts 600 s; a longer one is observed at as many moments.
    """
    spans = _Spans.of(records)
    differences = []
    for number in range(1, _NUM_TICKS):
        left = _WARM_UP_S + number * (window_s - _WARM_UP_S) / _NUM_TICKS - _WINDOW_S / 2
        service = spans.served(left, left + _WINDOW_S) / _WINDOW_S
        demand = spans.demand(left, left + _WINDOW_S) / _WINDOW_S
        differences.append(float(np.minimum(service.max() - service, np.abs(demand - service)).sum()))
    return differences


def accumulated_gap(records: Sequence[Record], window_s: float) -> float:
    """Return VTC's accumulated service gap (`get_acc_service_diff_over_time` of its artefact).

    This is the largest difference, over 35 moments of the window (every 10 s of its six minutes), between the tenants
    with the most and the least service since the start, whatever their demand.
    """
    spans = _Spans.of(records)
    served = (spans.served(0.0, window_s * number / _NUM_MOMENTS) for number in range(1, _NUM_MOMENTS))
    return max(float(service.max() - service.min()) for service in served)


def _as_arrays(samples: Samples, accounts: list[ServiceAccount]) -> tuple[np.ndarray, np.ndarray]:
    """Return two arrays [samples, accounts]: service divided by weight, and the backlog since the sample before."""
    shape = (len(samples.service), len(accounts))
    service_TA, backlogged_TA = np.zeros(shape), np.zeros(shape, dtype=bool)
    for index, (service, backlogged) in enumerate(zip(samples.service, samples.backlogged, strict=True)):
        service_TA[index, : len(service)] = service
        backlogged_TA[index, : len(backlogged)] = backlogged
    return service_TA / np.array([account.tenant.weight for account in accounts] or [1.0]), backlogged_TA


def evenness(
    service_TA: np.ndarray, backlogged_TA: np.ndarray, weight_A: np.ndarray, least_samples: float
) -> float | None:
    """Return Jain's index of each column's service relative to the service due to it.

    Samples count while the column and another are backlogged; the due service is its weight's share of the service of
    all backlogged columns. `service_TA` is divided by weight. None where fewer than two columns have `least_samples`
    samples.
    """
    counted_TA = backlogged_TA & (backlogged_TA.sum(axis=1, keepdims=True) >= 2)
    grown_TA = np.diff(service_TA, axis=0, prepend=0.0) * counted_TA
    weights_T = (counted_TA * weight_A).sum(axis=1)
    due_T = (grown_TA * weight_A).sum(axis=1) / np.maximum(weights_T, 1e-300)  # for a weight of 1
    due_A = (counted_TA * due_T[:, None]).sum(axis=0)
    enough_A = (counted_TA.sum(axis=0) >= least_samples) & (due_A > 0)
    if enough_A.sum() < 2:
        return None
    ratio = grown_TA.sum(axis=0)[enough_A] / due_A[enough_A]
    return float(ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum()))
