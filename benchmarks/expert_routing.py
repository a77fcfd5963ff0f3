"""Routing by experts beside KV-aware routing alone: expert bytes a token, TTFT, TPOT and throughput, simulated.

    python benchmarks/expert_routing.py [--seconds 30] [--seeds 3] [--jobs 2] [--out FILE]
    python benchmarks/expert_routing.py --real [--rounds 3] [--out FILE]

Each replica is the real scheduler and block pool under the step times of an H200 with Qwen3-30B-A3B, in which the time
to read experts follows the share of experts that the step's tokens are routed to. Each request decodes tokens of its
tenant's text kind, drawn from recorded or generated routings; the engine's own sampler makes the profiles. Two
simulated gateways choose with the gateway's own `choose` and `ExpertProfiles`, with load reports every 0.5 s, and each
learns from its own requests only.

The routings are those of the demo model on its own tasks (a kind is a domain; 4 layers of 16 experts, top 2), and
generated ones for 8 layers of 128 experts, top 8. In these, the logit of an expert is a normal number of the kind times
`skew`, plus a Gumbel number of the token: skew 0 is the same uniform routing for all kinds, and with skew 1 a fifth of
a layer's experts get half of a kind's tokens. No checkpoint of such a model was available to record.

With `--real`, three engines with the demo model and two gateways are processes, one gateway without expert routing and
one with it, and 24 clients send the demo model's tasks over HTTP. In `a kind each`, each of 8 tenants has tasks of one
domain, and in `all kinds` tasks of all domains. Answers go on to 320 tokens, so that nearly all steps only decode and
the batch changes little. Both gateways get the same tasks in a round. Expert bytes are those that the engines count in
all steps. Each case begins with an unmeasured run through each gateway, so that it knows the tenants' experts.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any
from zlib import crc32

import msgspec
import numpy as np
from cluster import GatewayPlan
from core_requests import batch_request
from kv_routing import NUM_GATEWAYS, WARM_UP_PART, Replica, _card, _submit, send_workload, states_of
from kv_traces import lognormal_tokens
from on_checkpoint import make_simulation_parser, median_and_range, print_runs, summarize_runs, write_simulation
from real_fleet import Answer, RealFleet, describe_real_runs, real_fleet, run_in_turn
from tokenizers import Tokenizer

from moiety_demo.domains import DOMAINS, Split, sample_tasks
from moiety_demo.tokenizer import END_OF_TEXT, TURN_END, render_prompt, token_id
from moiety_engine.checkpoint import resolve_checkpoint
from moiety_engine.config import EngineConfig, Overlap
from moiety_engine.expert_profiler import ExpertProfiler
from moiety_engine.messages import CoreFinish
from moiety_engine.moe.shape import ExpertShape
from moiety_engine.scheduling.plan import Plan
from moiety_engine.simulator.devices import find_device
from moiety_engine.simulator.pool import PoolTerms
from moiety_engine.simulator.records import Record
from moiety_engine.startup import load_loop
from moiety_platform.routing.choose import Prefix, choose
from moiety_platform.routing.expert_profiles import ExpertProfiles
from moiety_wire.classes import SHIPPED, STANDARD
from moiety_wire.messages import Sampling
from moiety_workload.request import TraceRequest, Workload

DEVICE, POLICY = "h200-qwen3-30b-a3b", "moiety"
BLOCK_TOKENS = 64
SPARES = (0, 4096, 8192)  # prompt tokens; 0: without expert routing
POOL_TOKENS = 2000  # generated tokens of a kind
TASKS = 60  # of a domain of the demo model
MEAN_PROMPT, MEAN_OUTPUT = 512, 300  # tokens
REAL_ENGINES, REAL_SPARE, REAL_CLIENTS, REAL_TASKS, REAL_OUTPUT = 3, 8192, 24, 6, 320  # tasks of a domain in a run
REAL_CASES = ("a kind each", "all kinds")
REAL_ARMS = ("kv-aware", "with experts")


@dataclass(frozen=True)
class Routings:
    """Experts of tokens by text kind: bits of shape [tokens, layers, words], as an engine counts them."""

    name: str
    shape: ExpertShape
    bits_of: Mapping[str, np.ndarray]

    def describe(self) -> dict[str, float]:
        """Return the share of all experts that 16 tokens use, of one kind and of any kinds."""
        rng, kinds = np.random.default_rng(0), list(self.bits_of)
        experts = len(self.shape.layers) * self.shape.num_experts

        def share(chosen: Sequence[str]) -> float:
            rows = [self.bits_of[kind][rng.integers(len(self.bits_of[kind]))] for kind in chosen]
            return int(np.bitwise_count(np.bitwise_or.reduce(rows)).sum()) / experts

        same = statistics.fmean(share([kinds[i % len(kinds)]] * 16) for i in range(400))
        mixed = statistics.fmean(share([str(kind) for kind in rng.choice(kinds, 16)]) for _ in range(400))
        return {"active_of_16_tokens_of_a_kind": round(same, 3), "active_of_16_mixed_tokens": round(mixed, 3)}


@dataclass(frozen=True)
class Case:
    """One run: how many replicas serve which requests, and the setting `expert_routing_tokens`."""

    routings: str
    replicas: int
    rate: float  # requests per second and replica
    tenants: int
    system_tokens: int  # of each tenant's system prompt
    spare: int  # prompt tokens; 0: without expert routing
    seed: int
    seconds: float


def demo_routings() -> Routings:
    """Record the experts of the demo model's answers to tasks of each domain."""
    folder = resolve_checkpoint("")
    config = EngineConfig(
        model=str(folder),
        name="moiety-demo",
        num_threads=1,
        max_running=TASKS,
        prefix_caching=False,
        expert_batching=True,
        overlap=Overlap.OFF,
    )
    bits_of = {}
    with load_loop(config) as loop:
        shape = loop.executor.model.experts
        assert shape is not None
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        stops = [token_id(tokenizer, name) for name in (TURN_END, END_OF_TEXT)]
        for number, domain in enumerate(DOMAINS):
            for index, task in enumerate(sample_tasks(domain, Split.HELD_OUT, TASKS, 0)):
                prompt = tokenizer.encode(render_prompt([("user", task.prompt)])).ids
                request = batch_request(number * TASKS + index, prompt, 60, Sampling(temperature=0.0))
                loop.submit(msgspec.structs.replace(request, stop_token_ids=stops))
            found: list[int] = []
            while loop.scheduler.queues.by_key:
                loop.step()
                found += [one.experts.predicted for one in loop.scheduler.queues.decoding]
                loop.take_outputs()
            size = len(shape.layers) * 8
            data = b"".join(one.to_bytes(size, "little") for one in found if one)
            bits_of[domain] = np.frombuffer(data, np.uint64).reshape(-1, len(shape.layers), 1)
    return Routings("demo", shape, bits_of)


def generated_routings(skew: float, num_kinds: int = 8) -> Routings:
    """Generate routings; the experts of different kinds are independent."""
    rng, shape = np.random.default_rng(0), ExpertShape(tuple(range(8)), 128, 8, 1)
    bits_of = {}
    for kind in range(num_kinds):
        logits_LE = skew * rng.standard_normal((8, 128))
        gumbel_NLE = rng.gumbel(size=(POOL_TOKENS, 8, 128))
        chosen_NLK = np.argpartition(-(logits_LE + gumbel_NLE), 8, axis=2)[:, :, :8]
        picked_NLE = np.zeros((POOL_TOKENS, 8, 128), np.uint8)
        np.put_along_axis(picked_NLE, chosen_NLK, 1, axis=2)
        bits_of[f"kind-{kind}"] = np.packbits(picked_NLE, axis=2, bitorder="little").view(np.uint64)
    return Routings(f"skew {skew:g}", shape, bits_of)


def all_routings() -> dict[str, Routings]:
    found = [demo_routings(), *(generated_routings(skew) for skew in (0.0, 0.5, 1.0, 1.5))]
    return {one.name: one for one in found}


class ExpertReplica(Replica):
    """A replica whose steps read the experts that its tokens are routed to."""

    def __init__(self, workload: Workload, terms: PoolTerms, max_tokens: int, address: str, routings: Routings) -> None:
        self._routings, self._rng = routings, np.random.default_rng(crc32(address.encode()))
        self.profiler = ExpertProfiler(routings.shape)
        self.learners: list[ExpertProfiles] = []
        self._all_experts_s = terms.device.experts_s
        self.active_share_sum = 0.0  # of all experts, over steps
        self.output_tokens = 0
        num_experts = routings.shape.num_experts
        self._rates_of = {
            kind: np.unpackbits(bits.view(np.uint8), axis=2, bitorder="little")[:, :, :num_experts].mean(axis=0)
            for kind, bits in routings.bits_of.items()
        }
        super().__init__(workload, terms, max_tokens, address)

    def _cost_s(self, plan: Plan, now_ns: int) -> float:
        """Return the seconds of a step; the experts of prompt tokens are expected ones, those of decodes are drawn."""
        shape, bits_PLW = self._routings.shape, self._draw(plan)
        union_LW = np.bitwise_or.reduce(bits_PLW[: plan.num_decode], axis=0, initial=0)
        active_LE = np.unpackbits(union_LW.view(np.uint8), axis=1, bitorder="little")[:, : shape.num_experts]
        unread_LE = 1.0 - active_LE
        for chunk in plan.chunks[plan.num_decode :]:
            unread_LE = unread_LE * (1 - self._rates_of[self._kind(chunk)]) ** chunk.num_tokens
        share = 1 - float(unread_LE.mean())
        self.active_share_sum += share
        self.output_tokens += sum(chunk.samples for chunk in plan.chunks)
        self._device = msgspec.structs.replace(self._device, experts_s=self._all_experts_s * share, expert_fraction=1.0)
        self.profiler.sample(plan, bits_PLW)
        return super()._cost_s(plan, now_ns)

    def _draw(self, plan: Plan) -> np.ndarray:
        """Return the experts of a random token of each decode's kind; [decodes, layers, words]."""
        shape = self._routings.shape
        bits_PLW = np.zeros((plan.num_decode, len(shape.layers), -(-shape.num_experts // 64)), np.uint64)
        for place, chunk in enumerate(plan.chunks[: plan.num_decode]):
            pool = self._routings.bits_of[self._kind(chunk)]
            bits_PLW[place] = pool[self._rng.integers(len(pool))]
        return bits_PLW

    def _kind(self, chunk: Any) -> str:
        return kind_of(chunk.sequence.request.submit.tenant_id)

    def _finish(self, record: Record, finish: CoreFinish, now_ns: int) -> None:
        if finish.expert_profile and self.learners:
            gateway = self._gateway_of[id(record.request)]
            self.learners[gateway].learn("m", record.request.tenant, None, finish.expert_profile)
        super()._finish(record, finish, now_ns)

    def report(self, now_s: float) -> None:
        super().report(now_s)
        active = self.profiler.pack_active(self._scheduler.num_running)
        self.load = msgspec.structs.replace(self.load, active_experts=active)


def kind_of(tenant_id: str) -> str:
    """Return the text kind of a tenant's requests."""
    return tenant_id.partition("/")[2]


def generate_requests(case: Case, kinds: Sequence[str]) -> Workload:
    """Return requests of tenants of equal load, with one kind each; without a system prompt all prompts differ."""
    rng, at_s, next_block = random.Random(case.seed), 0.0, case.tenants * 1000
    requests: list[TraceRequest] = []
    while True:
        at_s += rng.expovariate(case.rate * case.replicas)
        if at_s >= case.seconds:
            break
        tenant = rng.randrange(case.tenants)
        system = [tenant * 1000 + i for i in range(case.system_tokens // BLOCK_TOKENS)]
        num_tokens = lognormal_tokens(rng, MEAN_PROMPT, 0.8)
        own = list(range(next_block, next_block + math.ceil(num_tokens / BLOCK_TOKENS)))
        next_block += len(own)
        requests.append(
            TraceRequest(
                at_s,
                f"tenant-{tenant}/{kinds[tenant % len(kinds)]}",
                len(system) * BLOCK_TOKENS + num_tokens,
                lognormal_tokens(rng, MEAN_OUTPUT, 0.8),
                prefix_ids=(*system, *own),
            )
        )
    return Workload("experts", tuple(requests), case.seconds, BLOCK_TOKENS)


def measure(case: Case, routings: Routings) -> dict[str, Any]:
    """Return the figures of one run, of requests that arrive after the first quarter of the time."""
    began_s, workload = time.monotonic(), generate_requests(case, sorted(routings.bits_of))
    device = find_device(DEVICE)
    terms = PoolTerms(device, POLICY, {service.name: service for service in SHIPPED}, 0.0)
    longest = max(request.output_tokens for request in workload.requests)
    replicas = [ExpertReplica(workload, terms, longest, f"tcp://replica-{i}", routings) for i in range(case.replicas)]
    learners = [ExpertProfiles(case.spare) for _ in range(NUM_GATEWAYS)] if case.spare else []
    for replica in replicas:
        replica.learners = learners
    _serve(workload, replicas, learners, case.seed)
    measured = [
        record
        for replica in replicas
        for record in replica.records_of_ended
        if record.request.arrival_s >= WARM_UP_PART * workload.duration_s and record.failure is None
    ]
    ttfts_s = sorted((record.first_ns - record.arrival_ns) / 1e9 for record in measured)
    tpots_s = sorted(
        (record.last_ns - record.first_ns) / 1e9 / (record.num_output - 1)
        for record in measured
        if record.num_output > 1
    )
    bytes_all = device.experts_s * 0.85 * 4.3e12  # the preset's bandwidth
    outputs = sum(replica.output_tokens for replica in replicas)
    ended_s = max(record.end_ns for record in measured) / 1e9 - 1000.0
    return {
        **msgspec.to_builtins(case),
        "requests": len(workload.requests),
        "expert_mb_per_token": round(sum(one.active_share_sum for one in replicas) * bytes_all / outputs / 1e6, 1),
        "tokens_per_step": round(outputs / sum(one._num_steps for one in replicas), 2),
        "tpot_mean_ms": round(statistics.fmean(tpots_s) * 1e3, 3),
        "tpot_p99_ms": round(tpots_s[len(tpots_s) * 99 // 100] * 1e3, 2),
        "ttft_p50_ms": round(ttfts_s[len(ttfts_s) // 2] * 1e3, 1),
        "ttft_p99_ms": round(ttfts_s[len(ttfts_s) * 99 // 100] * 1e3, 1),
        "tokens_per_s": round(outputs / ended_s),
        "cached_share": round(
            sum(one.cached_tokens for one in measured) / sum(one.request.input_tokens for one in measured), 3
        ),
        "failed": sum(one.failure is not None for replica in replicas for one in replica.records_of_ended),
        "largest_share": round(max(len(one.records_of_ended) for one in replicas) / len(workload.requests), 3),
        "took_s": round(time.monotonic() - began_s, 1),
    }


def _serve(
    workload: Workload, replicas: Sequence[ExpertReplica], learners: Sequence[ExpertProfiles], seed: int
) -> None:
    rng, card, gateways = random.Random(seed), _card(), cycle(range(NUM_GATEWAYS))
    by_address = {replica.address: replica for replica in replicas}

    def send(request: TraceRequest, now_s: float) -> None:
        gateway = next(gateways)
        states = states_of(replicas, card, gateway, now_s)
        prefix = Prefix(_submit(request, replicas[0]))
        names = prefix.block_names(BLOCK_TOKENS)
        while names is not None and not names.is_complete:
            names.hash_slice()
        experts = learners[gateway] if learners else None
        chosen = choose(states, "m", STANDARD, prefix, kv_aware=rng, experts=experts)
        by_address[chosen.address].send(request, gateway)

    send_workload(workload, replicas, send)


def cases_of(seconds: float, seeds: int, spares: Sequence[int]) -> list[Case]:
    """Return the runs: generated routings by skew, load and replicas; with system prompts; and the demo's.

    Only the first of `spares`, which is 0, and the last are used where the setting is not what is compared.
    """
    by_skew = [(f"skew {skew}", 8, 6.0, 8, 0) for skew in ("0", "0.5", "1", "1.5")]
    others = [
        *(("skew 1", 8, rate, 8, 0) for rate in (2.0, 12.0)),
        *(("skew 1", replicas, 6.0, 8, 0) for replicas in (4, 16)),
        *(("skew 1", 8, 6.0, tenants, 0) for tenants in (3, 32)),
        ("skew 1", 8, 6.0, 8, 2048),
        *(("demo", 8, rate, 8, 0) for rate in (2.0, 6.0)),
    ]
    plans = [(plan, spare) for plan in by_skew for spare in spares]
    plans += [(plan, spare) for plan in others for spare in (spares[0], spares[-1])]
    return [Case(*plan, spare, seed, seconds) for plan, spare in plans for seed in range(seeds)]


def summarize(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the median and range of each figure by case, and of its change by expert routing, in pairs of a seed."""
    plan = ("routings", "replicas", "rate", "tenants", "system_tokens", "seconds")
    without = {(*(run[name] for name in plan), run["seed"]): run for run in runs if not run["spare"]}
    rows = summarize_runs(runs, (*plan, "spare"))
    for row in rows:
        pairs = [
            (run, without[*(run[name] for name in plan), run["seed"]])
            for run in runs
            if run["spare"] and all(run[name] == row[name] for name in (*plan, "spare"))
        ]
        for name in ("expert_mb_per_token", "tpot_mean_ms") if pairs else ():
            row[f"{name}_change"] = median_and_range([run[name] / off[name] - 1 for run, off in pairs])
    return rows


# ── real processes ──


async def measure_real(rounds: int) -> list[dict[str, Any]]:
    """Return the figures of all runs; the gateways take turns."""
    engines = [("--name", "demo", "--expert-profiles")] * REAL_ENGINES
    everywhere = tuple(range(REAL_ENGINES))
    gateways = [GatewayPlan(everywhere, {"MOIETY_EXPERT_ROUTING_TOKENS": str(n)}) for n in (0, REAL_SPARE)]
    runs = []
    async with real_fleet(engines, gateways) as fleet:
        for case in REAL_CASES:
            keys = await fleet.add_tenants([f"{case} {number}" for number in range(len(DOMAINS))])
            for gateway in range(len(REAL_ARMS)):
                await _real_run(fleet, gateway, keys, case, rounds)
            for number in range(rounds):
                for gateway in (0, 1) if number % 2 else (1, 0):
                    figures = await _real_run(fleet, gateway, keys, case, number)
                    runs.append({"case": case, "arm": REAL_ARMS[gateway], "round": number} | figures)
                    print_runs(runs[-1:])
    return runs


def changes_of(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the change of each figure by expert routing, in pairs of a round, by case."""
    arms = [{(run["case"], run["round"]): run for run in runs if run["arm"] == arm} for arm in REAL_ARMS]
    names = ("expert_kb_per_token", "expert_kb_per_step", "tokens_per_step")
    return {
        case: {
            name: median_and_range([on[name] / arms[0][key][name] - 1 for key, on in arms[1].items() if key[0] == case])
            for name in names
        }
        for case in REAL_CASES
    }


async def _real_run(fleet: RealFleet, gateway: int, keys: Sequence[str], case: str, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    sent = [
        (rng.choice(keys) if case == "all kinds" else key, task.prompt)
        for key, domain in zip(keys, DOMAINS, strict=True)
        for task in sample_tasks(domain, Split.HELD_OUT, REAL_TASKS, seed)
    ]
    rng.shuffle(sent)

    async def ask(key: str, content: str) -> list[Answer]:
        messages = [{"role": "user", "content": content}]
        body = {"model": "demo", "messages": messages, "max_tokens": REAL_OUTPUT, "ignore_eos": True, "temperature": 0}
        return [await fleet.ask(gateway, key, "/v1/chat/completions", body)]

    before, begin_s = await fleet.loads(), time.monotonic()
    answers = await run_in_turn([partial(ask, *one) for one in sent], REAL_CLIENTS)
    took_s, after = time.monotonic() - begin_s, await fleet.loads()
    names = ("expert_read_bytes_total", "output_tokens_total", "steps_total", "requests_total")
    grown = {name: [now[name] - old[name] for old, now in zip(before, after, strict=True)] for name in names}
    outputs = sum(grown["output_tokens_total"])
    return {
        "requests": len(answers),
        "expert_kb_per_token": sum(grown["expert_read_bytes_total"]) / outputs / 1e3,
        "expert_kb_per_step": sum(grown["expert_read_bytes_total"]) / sum(grown["steps_total"]) / 1e3,
        "tokens_per_step": outputs / sum(grown["steps_total"]),
        "largest_share": max(grown["requests_total"]) / sum(grown["requests_total"]),
        "ttft_p50_ms": statistics.median(answer.ttft_s for answer in answers) * 1e3,
        "tokens_per_s": outputs / took_s,
    }


def main() -> None:
    parser = make_simulation_parser(__doc__, 30.0)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each case")
    parser.add_argument("--spares", type=int, nargs="+", default=SPARES)
    parser.add_argument("--only", default="", help="routings whose names contain this")
    parser.add_argument("--real", action="store_true", help="measure processes over HTTP")
    parser.add_argument("--rounds", type=int, default=3, help="of real runs")
    args = parser.parse_args()
    if args.real:
        settings = {"engines": REAL_ENGINES, "clients": REAL_CLIENTS, "expert_routing_tokens": REAL_SPARE}
        head = describe_real_runs(settings)
        runs = asyncio.run(measure_real(args.rounds))
        rows = summarize_runs(runs, ("case", "arm"), ("round",))
        write_simulation(head | {"runs": rows, "changes": changes_of(runs)}, args.out)
        return
    routings = all_routings()
    cases = [one for one in cases_of(args.seconds, args.seeds, args.spares) if args.only in one.routings]
    with ProcessPoolExecutor(args.jobs) as pool:
        runs = print_runs(pool.map(measure, cases, [routings[case.routings] for case in cases]))
    result = {
        "device": DEVICE,
        "policy": POLICY,
        "routings": {name: one.describe() for name, one in routings.items()},
        "runs": summarize(runs),
    }
    write_simulation(result, args.out)


if __name__ == "__main__":
    main()
