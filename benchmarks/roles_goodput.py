"""Goodput of disaggregated prefill and decode against as many devices of both roles, under a strict TPOT SLO.

    python benchmarks/roles_goodput.py --trace AzureLLMInferenceTrace_code.csv [--devices 4] [--output FILE]

It runs the real scheduler in virtual time (`moiety simulate`), with DistServe's measure
(https://arxiv.org/abs/2401.09670): the largest load at which 90 % of requests attain the TTFT SLO and have their mean
time between tokens within the SLO. Devices of both roles are tried under several policies, one of them with several
chunk sizes, and every split under two; the best of each counts. A load is a multiple of the rate that all devices
complete.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import msgspec
from on_checkpoint import HERE, write_report

from moiety_engine.simulator.capacity import measure_capacity
from moiety_engine.simulator.comparison import Scenario
from moiety_engine.simulator.devices import find_device
from moiety_engine.simulator.metrics import tpot_s
from moiety_engine.simulator.records import Record
from moiety_engine.simulator.roles import RoleSettings, simulate_colocated, simulate_disaggregated
from moiety_kernels.environment import describe_environment
from moiety_wire.classes import OverloadAction, ServiceClass

SLOS = [(3.0, 0.02), (3.0, 0.025), (3.0, 0.03), (3.0, 0.04), (3.0, 0.05)]  # first token, and between tokens
CHUNKS = [64, 128, 256, 512]  # of a prompt in a step beside answers, for a policy that does not size them by time
TOGETHER = [("moiety", None), ("qoserve", None), ("edf", None), *(("fcfs", chunk) for chunk in CHUNKS)]
APART = [("moiety", None), ("fcfs", None)]
MAX_LOAD, HALVINGS, ATTAINMENT = 1.28, 6, 0.9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--device", default="a100-llama3-8b")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--duration-s", type=float, default=60.0)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "roles_goodput.json")
    options = parser.parse_args()
    rows = []
    for slo in SLOS:
        rows.append(compare(options, *slo))
        print(json.dumps(rows[-1]), file=sys.stderr)
    report = {
        "date": date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "environment": describe_environment("numpy"),
        "settings": {
            "trace": options.trace.name,
            "device": options.device,
            "devices": options.devices,
            "duration_s": options.duration_s,
            "attainment": ATTAINMENT,
            "step_of_load": MAX_LOAD / 2**HALVINGS,
        },
        "rows": rows,
    }
    write_report(report, options.output)


def compare(options: argparse.Namespace, first_s: float, between_s: float) -> dict[str, Any]:
    """Compare the goodput of devices of both roles and of each split, with the best policy of each."""
    device = find_device(options.device)
    service_class = ServiceClass("standard", rank=1, ttft_s=first_s, tpot_s=between_s, on_overload=OverloadAction.QUEUE)
    scenario = Scenario(trace=options.trace, duration_s=options.duration_s, shares={service_class.name: 1.0})
    base = scenario.base(device, seed=0)
    capacity = measure_capacity(base, device)

    def attainment(num_prefill: int, policy: str, chunk: int | None, load: float) -> float:
        workload = Scenario(load=load * options.devices).offered(base, capacity, seed=0)
        cut = device if chunk is None else msgspec.structs.replace(device, chunk_tokens=chunk)
        fleet = RoleSettings(cut, policy, {service_class.name: service_class}, capacity)
        num_decode = options.devices - num_prefill
        records = (
            simulate_disaggregated(workload, fleet, num_prefill, num_decode)
            if num_prefill
            else simulate_colocated(workload, fleet, options.devices)
        )
        return sum(attains_slo(record, service_class) for record in records) / len(records)

    def best(num_prefill: int, ways: Sequence[tuple[str, int | None]]) -> tuple[float, str]:
        return max((largest_load(functools.partial(attainment, num_prefill, *way)), str(way)) for way in ways)

    both, both_by = best(0, TOGETHER)
    splits = {f"{count}:{options.devices - count}": best(count, APART)[0] for count in range(1, options.devices)}
    most = max(splits.values())
    return {
        "ttft_s": first_s,
        "tpot_s": between_s,
        "both": both,
        "both_by": both_by,
        "splits": splits,
        "ratio": round(most / both, 3) if both else None,
    }


def attains_slo(record: Record, service_class: ServiceClass) -> bool:
    """Return whether a request attains the SLO by DistServe's measure: TTFT, and the mean time between tokens."""
    assert service_class.ttft_s is not None and service_class.tpot_s is not None, "both have an SLO here"
    between_s = tpot_s(record)
    return (
        record.completed
        and record.first_ns - record.arrival_ns <= service_class.ttft_s * 1e9
        and (between_s is None or between_s <= service_class.tpot_s)
    )


def largest_load(attainment: Callable[[float], float]) -> float:
    """Return the largest load by bisection; 0 if even the smallest load is too high."""
    low, high = 0.0, MAX_LOAD
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if attainment(middle) >= ATTAINMENT else (low, middle)
    return round(low, 4)


if __name__ == "__main__":
    main()
