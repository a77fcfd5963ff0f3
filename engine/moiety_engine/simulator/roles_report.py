"""`moiety simulate --prefill N --decode M`: disaggregated devices on a scenario's arrivals, as a table or figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table

from moiety_engine.errors import InvalidConfig
from moiety_engine.simulator.capacity import measure_capacity
from moiety_engine.simulator.comparison import Scenario
from moiety_engine.simulator.devices import SimulatedDevice
from moiety_engine.simulator.replica import check_policy
from moiety_engine.simulator.roles import CO_LOCATED, KV_BYTES_PER_S, RoleSettings, compare_roles
from moiety_wire.classes import ServiceClass


def simulate_roles(
    scenario: Scenario,
    device: SimulatedDevice,
    policies: list[str],
    classes: Sequence[ServiceClass],
    seed: int,
    *,
    num_prefill: int,
    num_decode: int,
    kv_gb_per_s: float = KV_BYTES_PER_S / 1e9,
    on_progress: Callable[[str], None] = lambda name: None,
) -> dict[str, Any]:
    """Run `compare_roles` on a scenario's arrivals.

    A load is a multiple of the joint capacity of all devices. Raises InvalidConfig, WorkloadError, Stuck.
    """
    if len(policies) != 1:
        raise InvalidConfig("roles are compared with one policy: set one with --policy, and leave out --compare")
    check_policy(policies[0])
    if scenario.num_replicas != 1:
        raise InvalidConfig("--prefill and --decode set the number of devices: leave out --replicas")
    base = scenario.base(device, seed)
    capacity = measure_capacity(base, device)
    if scenario.load is not None:
        scenario = replace(scenario, load=scenario.load * (num_prefill + num_decode))
    workload = scenario.offered(base, capacity, seed)
    unknown = sorted({request.service_class for request in workload.requests} - {service.name for service in classes})
    if unknown:
        raise InvalidConfig(f"the workload has requests of class {', '.join(unknown)}: describe it by --class-targets")
    fleet = RoleSettings(
        device,
        policies[0],
        {service.name: service for service in classes},
        capacity,
        kv_gb_per_s * 1e9,
        on_progress,
    )
    found = compare_roles(workload, fleet, num_prefill, num_decode)
    return {
        "policy": policies[0],
        "seed": seed,
        "kv_gb_per_s": kv_gb_per_s,
        "num_requests": len(workload.requests),
        "duration_s": workload.duration_s,
        **found,
    }


def print_roles(found: dict[str, Any]) -> None:
    console = Console()
    table = Table(
        "prefill : decode",
        "SLO attained",
        "TTFT attained",
        "goodput requests/s",
        "TTFT p50 / p90 / p99 s",
        "TPOT p50 / p99 ms",
    )
    for name, one in found["splits"].items():
        mark = " ←" if name == found["recommended"] else ""
        tpot = one["tpot_s"]
        table.add_row(
            ("both" if name == CO_LOCATED else name) + mark,
            f"{one['attainment']:.1%}",
            f"{one['ttft_attainment']:.1%}",
            f"{one['goodput_requests_per_s']:.2f}",
            " / ".join("–" if value is None else f"{value:.2f}" for value in one["ttft_s"].values()),
            " / ".join("–" if tpot[p] is None else f"{1000 * tpot[p]:.0f}" for p in ("p50", "p99")),
        )
    console.print(table)
    chosen = found["recommended"]
    console.print(
        f"{found['num_requests']} requests in {found['duration_s']:.0f} s on {found['devices']} devices; "
        + ("co-located" if chosen == CO_LOCATED else f"{chosen} (prefill : decode)")
        + " has the highest SLO attainment, and among equals the lowest p99 TPOT"
    )
