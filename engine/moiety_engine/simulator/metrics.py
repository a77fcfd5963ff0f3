"""LoadMetrics of a run, under the names that acceptance checks read.

All figures count the window of arrivals. A request's work counts as far as it was done in the window. It counts as
completed only if the request ended normally, and as good only if it attained its SLO, even during the drain after the
window. The denominator of attainment contains all arrivals, including rejected ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from moiety_engine.simulator.capacity import Capacity
from moiety_engine.simulator.devices import SimulatedDevice
from moiety_engine.simulator.fairness import measure_fairness
from moiety_engine.simulator.records import Record, Run

_NUM_POINTS = 60  # of each tenant's service over time


def summarise(run: Run, device: SimulatedDevice, capacity: Capacity) -> dict[str, Any]:
    """Return the figures of one run of one policy."""
    records = run.records
    model = capacity.model
    available = capacity.work_per_s * run.window_s
    done = [model.seconds(r.request.input_tokens, *r.window_progress) for r in records]
    completed = sum(work for work, r in zip(done, records, strict=True) if r.completed)
    good = sum(work for work, r in zip(done, records, strict=True) if r.attained)
    total_work = sum(model.of_request(r.request) for r in records)
    names = sorted({r.request.service_class for r in records})
    prefill = sum(r.prefill_tokens for r in records)
    wasted = sum(r.prefill_tokens for r in records if not r.completed)
    recomputed = sum(r.recomputed_tokens for r in records)
    tokens = sum(r.request.input_tokens + r.num_output for r in records if r.completed)
    window_tokens = sum(sum(r.window_progress) for r in records)
    cached = sum(r.cached_tokens for r in records if r.scheduled_ns)
    prompts = sum(r.request.input_tokens for r in records if r.scheduled_ns)
    return {
        "classes": {name: _summarise_class(name, run, capacity, total_work) for name in names},
        "offered_fraction_of_capacity": total_work / available,
        "goodput_fraction_of_capacity": good / available,
        "completed_fraction_of_capacity": completed / available,
        "attainment": _fraction(sum(r.attained for r in records), len(records)),
        "throughput_tokens_per_s": tokens / run.end_s,
        "window_tokens_per_s": window_tokens / run.window_s,
        "wasted_prefill_fraction": _fraction(wasted, prefill),
        "recomputed_fraction": _fraction(recomputed, run.computed_tokens),
        "cached_prompt_fraction": _fraction(cached, prompts),
        "max_preemptions": max((r.num_preemptions for r in records), default=0),
        "preemptions": sum(r.num_preemptions for r in records),
        "forbidden_preemptions": sum(r.forbidden_preemptions for r in records),
        "copied_blocks": run.copied_blocks,
        "longest_wait_s": max((wait_s(r, run) for r in records), default=0.0),
        "longest_service_gap_s": max((tenant.longest_gap_ns for tenant in run.tenants), default=0) / 1e9,
        "fairness": measure_fairness(run, device.kv_tokens),
        "rejections": dict(sorted(Counter(str(r.failure) for r in records if r.failure is not None).items())),
        "num_requests": len(records),
        "num_completed": sum(r.completed for r in records),
        "num_unfinished": sum(r.end_ns == 0 for r in records),
        "kv_used_fraction": run.kv_used_fraction,
        "steps": run.num_steps,
        "step_mean_s": run.busy_s / max(1, run.num_steps),
        "end_s": run.end_s,
        "tenants": {tenant.name: _summarise_tenant(tenant.name, run) for tenant in run.tenants},
    }


def wait_s(record: Record, run: Run) -> float:
    """Return the seconds from arrival to the first chunk; to the request's or run's end if it never ran."""
    if record.failure is not None and record.scheduled_ns == 0:
        return 0.0  # rejected: that is an answer, not a wait
    until_ns = record.scheduled_ns or record.end_ns or run.end_ns
    return (until_ns - record.arrival_ns) / 1e9


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """Return p50, p90 and p99 by linear interpolation; None where there are no values."""
    if not values:
        return dict.fromkeys(("p50", "p90", "p99"))
    return dict(zip(("p50", "p90", "p99"), np.percentile(values, [50, 90, 99]).tolist(), strict=True))


def tpot_s(record: Record) -> float | None:
    """Return the mean time of an output token after the first."""
    if record.num_output < 2:
        return None
    return (record.last_ns - record.first_ns) / (record.num_output - 1) / 1e9


def _summarise_class(name: str, run: Run, capacity: Capacity, total_work: float) -> dict[str, Any]:
    members = [r for r in run.records if r.request.service_class == name]
    served = [r for r in members if r.completed]
    work = sum(capacity.model.of_request(r.request) for r in members)
    return {
        "attainment": _fraction(sum(r.attained for r in members), len(members)),
        "attainment_of_served": _fraction(sum(r.attained for r in members), len(served)),
        "demand_share": _fraction(work, total_work),
        "num": len(members),
        "num_completed": len(served),
        "num_rejected": sum(r.failure is not None for r in members),
        "num_downgraded": sum(bool(r.served_class) and r.served_class != name for r in members),
        "num_preemptions": sum(r.num_preemptions for r in members),
        "ttft_s": spread([(r.first_ns - r.arrival_ns) / 1e9 for r in members if r.first_ns]),
        "tpot_s": spread([value for r in served if (value := tpot_s(r)) is not None]),
        "e2e_s": spread([(r.last_ns - r.arrival_ns) / 1e9 for r in served]),
        "queue_s": spread([(r.scheduled_ns - r.arrival_ns) / 1e9 for r in members if r.scheduled_ns]),
        "longest_wait_s": max((wait_s(r, run) for r in members), default=0.0),
        "rejections": dict(sorted(Counter(str(r.failure) for r in members if r.failure is not None).items())),
    }


def _summarise_tenant(name: str, run: Run) -> dict[str, Any]:
    """Return a tenant's figures; `service` is in VTC's units, at the ends of equal parts of the window."""
    members = [r for r in run.records if r.request.tenant == name]
    own = [index for index, account in enumerate(run.accounts) if account.tenant.name == name]
    samples = run.samples.service
    picked = np.linspace(0, len(samples) - 1, min(_NUM_POINTS, len(samples))).astype(int)
    tenant = next(tenant for tenant in run.tenants if tenant.name == name)
    return {
        "weight": tenant.weight,
        "num": len(members),
        "attainment": _fraction(sum(r.attained for r in members), len(members)),
        "ttft_s": spread([(r.first_ns - r.arrival_ns) / 1e9 for r in members if r.first_ns]),
        "longest_service_gap_s": tenant.longest_gap_ns / 1e9,
        "service": [sum(samples[at][i] for i in own if i < len(samples[at])) for at in picked],
        "service_at_s": [round(float(at) * run.samples.interval_s, 3) for at in picked],
    }


def _fraction(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
