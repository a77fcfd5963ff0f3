"""Shares of tenants over replicas that exchange the service of tenants, compared with replicas that do not.

    python benchmarks/fleet_fairness.py [--replicas 16] [--seconds 120] [--policies vtc,moiety] [--jobs 2] [--out FILE]

One tenant (`all`) sends to every replica. Each other tenant sends to one replica, and every second one to the next
replica as well. All are backlogged everywhere, with equal weights and equal requests, so the fair share of each is one
part of the fleet; it can be reached, since the tenants of a replica together can use all of it. Each replica is the
real scheduler under the step times of an A10G with Llama-2 7B. `largest_difference` is the largest range of the
difference of two tenants' service after the warm-up, in prompt tokens plus twice the output tokens, and `bound` is
VTC's bound for one replica plus the service of the whole fleet within one exchange period.
"""

from __future__ import annotations

import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from on_checkpoint import make_simulation_parser, print_runs, write_simulation

from moiety_engine.simulator.devices import find_device
from moiety_engine.simulator.fleet import Fleet, FleetTenant
from moiety_engine.simulator.pool import PoolTerms
from moiety_wire.classes import FLEX

DEVICE = "a10g-llama2-7b"
PERIODS_S = (None, 0.1, 1.0, 5.0)
WARM_UP_PART = 1 / 3
INPUT_TOKENS, OUTPUT_TOKENS = 256, 64


def tenants_of(num_replicas: int) -> list[FleetTenant]:
    """Return the tenant of all replicas, and one tenant for each replica."""
    request = INPUT_TOKENS, OUTPUT_TOKENS, FLEX.name
    found = [FleetTenant("all", tuple(range(num_replicas)), *request)]
    for index in range(num_replicas):
        replicas = (index,) if index % 2 == 0 else (index, (index + 1) % num_replicas)
        found.append(FleetTenant(f"tenant-{index:02}", replicas, *request))
    return found


def measure(policy: str, period_s: float | None, num_replicas: int, seconds: float) -> dict[str, Any]:
    """Return the figures of one run."""
    device = find_device(DEVICE)
    fleet = Fleet(num_replicas, PoolTerms(device, policy, {FLEX.name: FLEX}, 0.0), tenants_of(num_replicas), period_s)
    began_s = time.monotonic()
    warm_up_s = WARM_UP_PART * seconds
    samples = fleet.run(seconds, warm_up_s=warm_up_s)
    shares, rate = samples.shares(), samples.total() / (seconds - warm_up_s)
    vtc_bound = 2 * max(INPUT_TOKENS, 2 * device.num_blocks * device.block_size)
    return {
        "policy": policy,
        "exchange_period_s": period_s,
        "share_of_all": round(shares["all"], 4),
        "least_share": round(min(shares.values()), 4),
        "largest_share": round(max(shares.values()), 4),
        "fair_share": round(1 / len(shares), 4),
        "jain": round(sum(shares.values()) ** 2 / (len(shares) * sum(one**2 for one in shares.values())), 4),
        "largest_difference": round(samples.largest_difference()),
        "bound": None if period_s is None else round(vtc_bound + rate * period_s),
        "fleet_tokens_per_s": round(rate),
        "shares": {name: round(share, 4) for name, share in shares.items()},
        "took_s": round(time.monotonic() - began_s, 1),
    }


def main() -> None:
    parser = make_simulation_parser("Shares of tenants over replicas with and without exchange.", 120.0)
    parser.add_argument("--replicas", type=int, default=16)
    parser.add_argument("--policies", default="vtc,moiety")
    args = parser.parse_args()
    cases = [
        (policy, period_s, args.replicas, args.seconds) for policy in args.policies.split(",") for period_s in PERIODS_S
    ]
    with ProcessPoolExecutor(args.jobs) as pool:
        runs = print_runs(pool.map(measure, *zip(*cases, strict=True)), without="shares")
    result = {
        "device": DEVICE,
        "replicas": args.replicas,
        "virtual_seconds": args.seconds,
        "runs": runs,
    }
    write_simulation(result, args.out)


if __name__ == "__main__":
    main()
