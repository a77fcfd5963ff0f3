"""Shares of tenants over replicas that exchange the service of tenants, compared with replicas that do not.

    python benchmarks/fleet_fairness.py [--replicas 16] [--seconds 120] [--policies vtc,moiety] [--jobs 2] [--out FILE]
    python benchmarks/fleet_fairness.py --real [--seconds 15] [--rounds 3] [--out FILE]

One tenant (`all`) sends to every replica. Each other tenant sends to one replica, and every second one to the next
replica as well. All are backlogged everywhere, with equal weights and equal requests, so the fair share of each is one
part of the fleet; it can be reached, since the tenants of a replica together can use all of it. Each replica is the
real scheduler under the step times of an A10G with Llama-2 7B. `largest_difference` is the largest range of the
difference of two tenants' service after the warm-up, in prompt tokens plus twice the output tokens, and `bound` is
VTC's bound for one replica plus the service of the whole fleet within one exchange period.

With `--real`, two engines with the demo model that exchange the service of tenants and two that do not are processes,
used in turn through the same gateways: one for the first engine of each pair, one for the second, and one that connects
to all and only exchanges. Tenant `all` keeps both engines of the pair backlogged, `left` and `right` one each. In `full
KV memory`, an engine holds about six of the requests; in `full batch`, requests are short, and the batch has eight
slots. Shares are of prompt tokens plus twice the output tokens of the answers that end after the first third of the
time, and the fair share of each tenant is a third.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from cluster import GatewayPlan
from on_checkpoint import make_simulation_parser, print_runs, summarize_runs, write_simulation
from real_fleet import RealFleet, describe_real_runs, real_fleet

from moiety_engine.simulator.devices import find_device
from moiety_engine.simulator.fleet import Fleet, FleetTenant
from moiety_engine.simulator.pool import PoolTerms
from moiety_wire.classes import FLEX

DEVICE = "a10g-llama2-7b"
PERIODS_S = (None, 0.1, 1.0, 5.0)
WARM_UP_PART = 1 / 3
INPUT_TOKENS, OUTPUT_TOKENS = 256, 64
ARMS = ("exchange", "no exchange")  # of the real runs, and the names of their engines' models
GATEWAYS_OF = {"all": (0, 1), "left": (0,), "right": (1,)}  # by tenant, the gateways to which it sends
REAL_CASES = {"full KV memory": (256, 64), "full batch": (32, 32)}  # prompt and output tokens of a request
STREAMS = 10  # open requests of a tenant at an engine
REAL_LIMITS = ("--max-running", "8", "--kv-memory-bytes", "4MiB", "--host-kv-memory-bytes", "0")  # 2 KiB per token


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


# ── real processes ──


async def measure_real(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the figures of all runs: the arms in turn, and all cases in each round."""
    engines = [
        ("--name", arm, "--fleet-fairness", fairness, *REAL_LIMITS)
        for arm, fairness in zip(ARMS, ("on", "off"), strict=True)
        for _ in range(2)
    ]
    gateways = [GatewayPlan((0, 2)), GatewayPlan((1, 3)), GatewayPlan((0, 1, 2, 3))]
    runs = []
    async with real_fleet(engines, gateways) as fleet:
        for number in range(options.rounds):
            for case, tokens in REAL_CASES.items():
                for arm in ARMS if number % 2 else reversed(ARMS):
                    shares = await _shares(fleet, arm, tokens, options.seconds)
                    runs.append({"case": case, "arm": arm, "round": number} | shares)
                    print_runs(runs[-1:])
    return runs


async def _shares(fleet: RealFleet, model: str, tokens: tuple[int, int], seconds: float) -> dict[str, float]:
    """Return the tenants' shares in one run, with new tenants so that no service of earlier runs counts."""
    keys = dict(zip(GATEWAYS_OF, await fleet.add_tenants(list(GATEWAYS_OF), FLEX.name), strict=True))
    begin_s, served, num_input = time.monotonic(), Counter[str](), tokens[0]

    async def send(tenant: str, gateway: int, rng: random.Random) -> None:
        while True:
            prompt = [rng.randrange(10, 2000) for _ in range(num_input)]
            body = {"model": model, "prompt": prompt, "max_tokens": tokens[1], "ignore_eos": True}
            answer = await fleet.ask(gateway, keys[tenant], "/v1/completions", body)
            if time.monotonic() - begin_s >= WARM_UP_PART * seconds:
                served[tenant] += answer.prompt_tokens - answer.cached_tokens + 2 * answer.output_tokens

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds), asyncio.TaskGroup() as group:
            for tenant, gateways in GATEWAYS_OF.items():
                for gateway in gateways:
                    for stream in range(STREAMS):
                        group.create_task(send(tenant, gateway, random.Random(f"{keys[tenant]} {gateway} {stream}")))
    total = served.total()
    return {
        **{f"share_of_{tenant}": round(served[tenant] / total, 4) for tenant in GATEWAYS_OF},
        "tokens_per_s": round(total / (seconds * (1 - WARM_UP_PART))),
    }


def main() -> None:
    parser = make_simulation_parser("Shares of tenants over replicas with and without exchange.", 120.0)
    parser.add_argument("--replicas", type=int, default=16)
    parser.add_argument("--policies", default="vtc,moiety")
    parser.add_argument("--real", action="store_true", help="measure processes over HTTP; use --seconds 15")
    parser.add_argument("--rounds", type=int, default=3, help="of real runs")
    args = parser.parse_args()
    if args.real:
        head = describe_real_runs({"engines": 2, "seconds": args.seconds, "rounds": args.rounds})
        runs = asyncio.run(measure_real(args))
        write_simulation(head | {"runs": summarize_runs(runs, ("case", "arm"), ("round",))}, args.out)
        return
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
