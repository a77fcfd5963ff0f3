"""A fleet on paper: rows, leases, heartbeats, connections and traces a second, from the code's own constants.

    python benchmarks/fleet_model.py [--gateways 100] [--engines 1000] [--tenants 100000] [--requests-per-s 5000]

The unit costs (statements, rows, bytes and CPU time for a request, CPU time for an engine's heartbeats) are those that
`fleet.py` and `idle_gateway.py` measured. The report has the value of each formula.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moiety_platform.db.session import CHECKING, REPORTING, SERVING
from moiety_platform.quota.enforcer import LEASE_S, TICK_S
from moiety_platform.settings import GatewaySettings
from moiety_platform.usage.write_pace import BUSY_INTERVALS, INTERVAL_S
from moiety_wire.fleet_service import MAX_SENT_TENANTS
from moiety_wire.messages import HEARTBEAT_INTERVAL_S

HERE = Path(__file__).parent
LEASE_USE_S = 60.0  # quota/enforcer.py, `_FORGET_AFTER_S`: a gateway forgets a limit that it has not used so long
RENEWALS_PER_LEASE = 4  # quota/enforcer.py, `_round`
POSTGRES_CONNECTIONS = 100  # PostgreSQL's default of max_connections
SPANS_PER_TRACE = 11.5  # results/trace_completeness.json: 23,033 spans of 2,007 requests
DAY_S = 86_400


@dataclass(frozen=True, slots=True)
class Fleet:
    """Size and load of a fleet."""

    gateways: int
    engines: int
    tenants: int
    requests_per_s: float
    replicas: int  # engines of each model
    active_share: float  # tenants with requests within LEASE_USE_S
    limits: int  # of each tenant
    gateways_of_tenant: int  # gateways that a tenant's requests reach


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gateways", type=int, default=100)
    parser.add_argument("--engines", type=int, default=1000)
    parser.add_argument("--tenants", type=int, default=100_000)
    parser.add_argument("--requests-per-s", type=float, default=5000)
    parser.add_argument("--replicas", type=int, default=50)
    parser.add_argument("--active-share", type=float, default=0.05)
    parser.add_argument("--limits", type=int, default=4)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "fleet_model.json")
    options = vars(parser.parse_args())
    output = options.pop("output")
    costs = unit_costs(_results("fleet"), _results("idle_gateway"))
    fleets = {
        f"{reached} gateways per tenant": Fleet(**options, gateways_of_tenant=reached)
        for reached in (2, options["gateways"])
    }
    report = {
        "constants": constants(),
        "unit_costs": costs,
        "fleets": {name: {**asdict(fleet), "figures": figures(fleet, costs)} for name, fleet in fleets.items()},
    }
    output.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


def _results(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((HERE / "results" / f"{name}.json").read_text())
    return found


def constants() -> dict[str, float]:
    """Return the constants of the code that the formulas use."""
    fields = GatewaySettings.model_fields
    return {
        "HEARTBEAT_INTERVAL_S": HEARTBEAT_INTERVAL_S,
        "LEASE_S": LEASE_S,
        "TICK_S": TICK_S,
        "INTERVAL_S": INTERVAL_S,
        "BUSY_INTERVALS": BUSY_INTERVALS,
        "MAX_SENT_TENANTS": MAX_SENT_TENANTS,
        "connections_of_a_gateway": SERVING.size + CHECKING.size + REPORTING.size,
        "trace_sample_rate": fields["trace_sample_rate"].default,
        "trace_first_per_s": fields["trace_first_per_s"].default,
    }


def unit_costs(fleet: dict[str, Any], idle: dict[str, Any]) -> dict[str, float]:
    """Return the measured unit costs beyond idle gateways, of the stage with the most answers in time, and of these."""
    stage = max((one for one in fleet["stages"] if not one["is_behind"]), key=lambda one: one["answered_per_s"])
    rate, num_gateways, idle_cores = stage["answered_per_s"], fleet["settings"]["gateways"], fleet["idle"]["cores"]
    gateways = idle["gateways"]
    per_engine = gateways["zeromq"]["percent_of_a_core"] - gateways["none"]["percent_of_a_core"]
    return {
        "gateway_cpu_ms_per_request": round(1000 * (stage["cores"]["gateways"] - idle_cores["gateways"]) / rate, 3),
        "database_cpu_ms_per_request": round(1000 * (stage["cores"]["database"] - idle_cores["database"]) / rate, 3),
        "statements_per_request": round(stage["statements_per_s"] / rate, 2),
        "commits_per_s_of_idle_gateway": round(fleet["idle"]["commits_per_s"] / num_gateways, 2),
        "bytes_per_request": round(sum(fleet["bytes_per_request"].values())),
        "cores_per_connected_engine": round(per_engine / 100 / gateways["zeromq"]["engines"], 6),
    }


def figures(fleet: Fleet, costs: dict[str, float]) -> dict[str, float]:
    """Return the value of each formula. Names say the unit; "_per_gateway" is for one gateway."""
    known = constants()
    active = fleet.tenants * fleet.active_share
    reached = min(fleet.gateways_of_tenant, LEASE_USE_S * fleet.requests_per_s / active)  # not more than requests
    leases = active * fleet.limits * reached
    traces = fleet.gateways * known["trace_first_per_s"] + known["trace_sample_rate"] * fleet.requests_per_s
    rate = fleet.requests_per_s
    return {
        name: round(value, 3)
        for name, value in {
            "load_messages_per_s_per_gateway": fleet.engines / HEARTBEAT_INTERVAL_S,
            "load_messages_per_s": fleet.gateways * fleet.engines / HEARTBEAT_INTERVAL_S,
            "heartbeat_cores_per_gateway": fleet.engines * costs["cores_per_connected_engine"],
            "service_reports_per_s_per_gateway": fleet.engines * (fleet.replicas - 1) / HEARTBEAT_INTERVAL_S,
            "database_connections": fleet.gateways * known["connections_of_a_gateway"],
            "connections_over_default": fleet.gateways * known["connections_of_a_gateway"] / POSTGRES_CONNECTIONS,
            "lease_rows": leases,
            "lease_renewals_per_s": leases * RENEWALS_PER_LEASE / LEASE_S,
            "quota_transactions_per_s": fleet.gateways / TICK_S,
            "usage_transactions_per_s": fleet.gateways / (BUSY_INTERVALS * INTERVAL_S),
            "idle_commits_per_s": fleet.gateways * costs["commits_per_s_of_idle_gateway"],
            "usage_rows_per_day": rate * DAY_S,
            "database_gb_per_day": rate * DAY_S * costs["bytes_per_request"] / 1e9,
            "gateway_cores": rate * costs["gateway_cpu_ms_per_request"] / 1000,
            "database_cores": rate * costs["database_cpu_ms_per_request"] / 1000,
            "traces_per_s": traces,
            "spans_per_s": traces * SPANS_PER_TRACE,
        }.items()
    }


if __name__ == "__main__":
    main()
