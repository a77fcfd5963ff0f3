"""KV-aware routing beside affinity and random choice: hit rate and TTFT of simulated replicas and of real engines.

    python benchmarks/kv_routing.py [--seconds 240] [--seeds 3] [--jobs 2] [--cases TRACE:RATE …] [--out FILE]
    python benchmarks/kv_routing.py --mooncake conversation_trace.jsonl --rates 3.4 6 [--seconds 600] [--out FILE]
    python benchmarks/kv_routing.py --real [--rounds 3] [--out FILE]

Each replica is the real scheduler and block pool under the step times of an A100 with Llama-3 8B, with a device and a
host tier of the prefix cache. Two simulated gateways choose with the gateway's own `choose`: they see load reports
every 0.5 s, cache events every 50 ms, and only their own open requests. The traces are generated in Mooncake's format
(blocks of 512 tokens), which `moiety_workload/readers.py` reads; they are not Mooncake's own requests. `conversations`
has about the published means of its conversation trace: 12,035 prompt tokens, 343 output tokens, and 40 % of the prompt
tokens in earlier requests. In `agents`, each of these conversations begins with one of 8 system prompts of 20,480
tokens, drawn with weights 1, 1/2, … 1/8. Figures are of requests that arrive after the first quarter of the time, the
median and the range of runs with different seeds.

With `--mooncake`, the requests are those of a published trace of Mooncake (github.com/kvcache-ai/Mooncake, folder
FAST25-release/traces), in their order, with the times between them scaled to a mean rate. The runs begin at the first,
second and last third of the trace.

With `--real`, three engines with the demo model and their gateways are processes, and clients send conversations over
HTTP, each run as a new tenant, so that no prefix of earlier runs is cached for it. One gateway has KV-aware routing and
one has affinity; for random choice, the client chooses between three gateways with one engine each. In `agents`, each
conversation of three turns begins with one of 8 system prompts of 1,024 tokens, of which the cache of an engine holds
five; in `one agent`, all begin with the same one; in `no prefix`, each has one turn and no system prompt.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import date
from functools import partial
from itertools import count, cycle
from pathlib import Path
from typing import Any

from cluster import GatewayPlan
from kv_traces import describe_trace, generate_trace, read_mooncake
from on_checkpoint import make_simulation_parser, print_runs, summarize_runs, write_simulation
from real_fleet import Answer, RealFleet, describe_real_runs, real_fleet, run_in_turn

from moiety_engine.simulator.devices import find_device
from moiety_engine.simulator.driver import START_NS
from moiety_engine.simulator.pool import PoolDevice, PoolTerms
from moiety_platform.engine_client.base import EngineState
from moiety_platform.engine_client.prefix_blocks import PrefixBlocks
from moiety_platform.routing.choose import Prefix, choose
from moiety_platform.routing.prefix_cost import cheapest
from moiety_platform.routing.prefix_names import PrefixNames
from moiety_wire.classes import SHIPPED, STANDARD
from moiety_wire.engine_load import Load
from moiety_wire.messages import ModelCard, Sampling, Stopping, Submit
from moiety_wire.prefix_events import MAX_BLOCKS_PER_MESSAGE, PrefixEvents, pack_names
from moiety_workload.readers import MOONCAKE_BLOCK_TOKENS, load_workload
from moiety_workload.request import TraceRequest, Workload

DEVICE, POLICY = "a100-llama3-8b", "moiety"
ROUTINGS = ("random", "affinity", "kv-aware")
RATES_PER_S = {"conversations": (3.0, 5.0, 7.0), "agents": (2.0, 3.0, 4.0)}  # by trace, of the fleet
TICK_S, HEARTBEAT_S = 0.05, 0.5
NUM_GATEWAYS = 2
WARM_UP_PART = 0.25
SEEDS = 3
REAL_ENGINES, REAL_KV, REAL_CLIENTS = 3, "12MiB", 6  # 2 KiB of KV per token
TURN_TOKENS, ANSWER_TOKENS = 96, 16


class Replica(PoolDevice):
    """One simulated engine, with what it reports to gateways."""

    def __init__(self, workload: Workload, terms: PoolTerms, max_tokens: int, address: str) -> None:
        super().__init__(workload, terms, max_tokens, 0.0)
        self.address = address
        self.blocks = PrefixBlocks()
        self.blocks.apply(PrefixEvents(0, b"", is_start=True))
        self.open_of: list[int] = [0] * NUM_GATEWAYS
        self.unreported_of: list[int] = [0] * NUM_GATEWAYS  # sent since the last load report
        self._gateway_of: dict[int, int] = {}  # id of the request → its gateway
        self._changes = self._scheduler.groups.record_prefix_changes()
        self._seq = count(1)
        self.records_of_ended: list[Any] = []
        self.report(0.0)

    def send(self, request: TraceRequest, gateway: int) -> None:
        self._gateway_of[id(request)] = gateway
        self.open_of[gateway] += 1
        self.unreported_of[gateway] += 1
        self.submit(request)

    def publish(self, now_s: float) -> None:
        """Take the ends of requests and the changes of the cache up to now."""
        for record in self.ended:
            self.open_of[self._gateway_of.pop(id(record.request))] -= 1
        self.records_of_ended += self.ended
        self.ended.clear()
        assert self._changes is not None, "a model without recurrent states"
        while (found := self._changes.take(START_NS + round(now_s * 1e9))) is not None:
            self.blocks.apply(PrefixEvents(next(self._seq), pack_names(found[0]), pack_names(found[1])))

    def report(self, now_s: float) -> None:
        scheduler, pool = self._scheduler, self._scheduler.kv.pool
        self.load_at_s = now_s
        self.unreported_of = [0] * NUM_GATEWAYS
        self.load = Load(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_paused=0,
            kv_blocks_total=pool.num_blocks,
            kv_blocks_used=pool.num_used,
            kv_blocks_cached=pool.num_cached,
            block_size=scheduler.kv.block_size,
            steps_total=self._num_steps,
            prompt_tokens_total=scheduler.prompt_tokens_total,
            cached_tokens_total=scheduler.cached_tokens_total,
            output_tokens_total=scheduler.output_tokens_total,
            requests_total=len(self._records),
            classes=scheduler.class_loads(),
            pending_prefill_tokens=scheduler.queues.num_pending_tokens(),
            engine_id=self.address,
            seq=0,
        )


def _card() -> ModelCard:
    return ModelCard(
        engine_id="e", model="m", family="", tokenizer_json="", chat_template="", special_tokens={}, eos_token_ids=(),
        max_context_tokens=10**6, vocab_size=10**6, max_num_logprobs=0, created_unix_s=0, dtype="", device="",
    )  # fmt: skip


def measure(
    trace: str, routing: str, rate: float, num_replicas: int, seconds: float, mooncake: Path | None, seed: int
) -> dict[str, Any]:
    """Return the figures of one run, of a generated trace or of one that is published.

    `seed` is that of a generated trace; of a published one it is the third with which the run begins, 0 to 2.
    """
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{trace}.jsonl"
        if mooncake is None:
            generate_trace(path, trace, rate, seconds, seed)
        else:
            read_mooncake(mooncake, path, rate, seconds, seed / SEEDS)
        workload = load_workload(path, num_tenants=1)
    terms = PoolTerms(find_device(DEVICE), POLICY, {service.name: service for service in SHIPPED}, 0.0)
    longest = max(request.output_tokens for request in workload.requests)
    replicas = [Replica(workload, terms, longest, f"tcp://replica-{index}") for index in range(num_replicas)]
    sent = _serve(workload, replicas, routing, seed)
    measured = [
        record
        for replica in replicas
        for record in replica.records_of_ended
        if record.request.arrival_s >= WARM_UP_PART * workload.duration_s
    ]
    ttfts_s = sorted((record.first_ns - record.arrival_ns) / 1e9 for record in measured if record.first_ns)
    cached = sum(record.cached_tokens for record in measured)
    return {
        "trace": trace,
        "rate_per_s": rate,
        "routing": routing,
        "seed": seed,
        **describe_trace(workload),
        "hit_rate": round(cached / sum(record.request.input_tokens for record in measured), 4),
        "ttft_p50_s": round(ttfts_s[len(ttfts_s) // 2], 3),
        "ttft_p99_s": round(ttfts_s[len(ttfts_s) * 99 // 100], 3),
        "ttft_mean_s": round(statistics.fmean(ttfts_s), 3),
        "failed": sum(record.failure is not None for record in measured),
        "largest_share": round(max(sent.values()) / len(workload.requests), 4),
        "least_share": round(min(sent[replica.address] for replica in replicas) / len(workload.requests), 4),
        "took_s": round(time.monotonic() - began_s, 1),
    }


def _serve(workload: Workload, replicas: list[Replica], routing: str, seed: int) -> Counter[str]:
    """Run the workload to its end; return the number of requests of each replica."""
    rng, card, sent = random.Random(f"{routing} {seed}"), _card(), Counter[str]()
    gateways, by_address = cycle(range(NUM_GATEWAYS)), {replica.address: replica for replica in replicas}

    def send(request: TraceRequest, now_s: float) -> None:
        gateway = next(gateways)
        replica = replicas[rng.randrange(len(replicas))]
        if routing != "random":
            states = states_of(replicas, card, gateway, now_s)
            prefix = Prefix(_submit(request, replica))
            kv_aware = rng if routing == "kv-aware" else None
            if kv_aware is not None:
                names = prefix.block_names(MOONCAKE_BLOCK_TOKENS)
                while names is not None and not names.is_complete:
                    names.hash_slice()
            replica = by_address[choose(states, "m", STANDARD, prefix, kv_aware=kv_aware).address]
        sent[replica.address] += 1
        replica.send(request, gateway)

    send_workload(workload, replicas, send)
    return sent


def send_workload(workload: Workload, replicas: Sequence[Replica], send: Callable[[TraceRequest, float], None]) -> None:
    """Call `send` with each request and the time at which replicas were seen last, until all requests have ended."""
    now_s, tick = 0.0, 0
    waiting = list(reversed(workload.requests))
    while waiting or any(replica.num_open for replica in replicas):
        tick += 1
        until_s = tick * TICK_S
        while waiting and waiting[-1].arrival_s < until_s:
            send(waiting.pop(), now_s)
        now_s = until_s
        advance_replicas(replicas, tick, now_s)


def states_of(replicas: Sequence[Replica], card: ModelCard, gateway: int, now_s: float) -> list[EngineState]:
    """Return what a gateway knows of the replicas."""
    return [
        EngineState(
            one.address, True, "", card, one.load, one.open_of[gateway], now_s - one.load_at_s,
            prefix_blocks=one.blocks, num_unreported=one.unreported_of[gateway],
        )
        for one in replicas
    ]  # fmt: skip


def advance_replicas(replicas: Sequence[Replica], tick: int, now_s: float) -> None:
    """Run the replicas to `now_s`. In each tick, some of them report their load."""
    for index, replica in enumerate(replicas):
        replica.advance(now_s)
        replica.publish(now_s)
        if (tick + index) % round(HEARTBEAT_S / TICK_S) == 0:
            replica.report(now_s)


def _submit(request: TraceRequest, replica: Replica) -> Submit:
    return Submit(
        "r", 0, "m", request.tenant, STANDARD, replica._prompt(request), Sampling(), Stopping(max_tokens=1),
        1, request.tenant.encode(), 0,
    )  # fmt: skip


# ── real processes ──


@dataclass(frozen=True)
class RealCase:
    """Conversations of one real run: agents with a system prompt each (weights 1, 1/2, …), and turns."""

    name: str
    num_agents: int
    system_tokens: int
    num_conversations: int
    num_turns: int

    def prompts(self, seed: int) -> list[list[list[int]]]:
        """Return the prompts of the turns of each conversation; a turn repeats the prompt before it."""
        rng, weights = random.Random(f"{self.name} {seed}"), [1 / (1 + agent) for agent in range(self.num_agents)]
        systems = [_random_ids(rng, self.system_tokens) for _ in range(self.num_agents)]
        found = []
        for _ in range(self.num_conversations):
            (prompt,) = rng.choices(systems, weights)
            turns = []
            for _ in range(self.num_turns):
                prompt = [*prompt, *_random_ids(rng, TURN_TOKENS)]
                turns.append(prompt)
            found.append(turns)
        return found


REAL_CASES = (
    RealCase("agents", 8, 1024, 36, 3),
    RealCase("one agent", 1, 1024, 16, 3),
    RealCase("no prefix", 1, 0, 36, 1),
)


def _random_ids(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(10, 2000) for _ in range(num_tokens)]


async def measure_real(rounds: int) -> list[dict[str, Any]]:
    """Return the figures of all runs; the routings take turns, in another order in each round."""
    engines = [("--name", "demo", "--kv-memory-bytes", REAL_KV, "--host-kv-memory-bytes", "0")] * REAL_ENGINES
    everywhere = tuple(range(REAL_ENGINES))
    gateways = [GatewayPlan(everywhere, {"MOIETY_PREFIX_ROUTING": name}) for name in ("kv-aware", "affinity")]
    gateways += [GatewayPlan((engine,)) for engine in everywhere]
    runs = []
    async with real_fleet(engines, gateways) as fleet:
        for number in range(rounds):
            for case in REAL_CASES:
                for routing in (*ROUTINGS[number % 3 :], *ROUTINGS[: number % 3]):
                    figures = await _real_run(fleet, case, routing, number)
                    runs.append({"case": case.name, "routing": routing, "round": number} | figures)
                    print_runs(runs[-1:])
    return runs


async def _real_run(fleet: RealFleet, case: RealCase, routing: str, seed: int) -> dict[str, Any]:
    (key,) = await fleet.add_tenants([case.name])
    rng = random.Random(f"{routing} {seed}")
    choices = {"kv-aware": [0], "affinity": [1], "random": range(2, 2 + REAL_ENGINES)}[routing]

    async def converse(turns: list[list[int]]) -> list[Answer]:
        options = {"model": "demo", "max_tokens": ANSWER_TOKENS, "ignore_eos": True, "temperature": 0}
        return [
            await fleet.ask(rng.choice(choices), key, "/v1/completions", options | {"prompt": prompt})
            for prompt in turns
        ]

    before = await fleet.loads()
    answers = await run_in_turn([partial(converse, turns) for turns in case.prompts(seed)], REAL_CLIENTS)
    after = await fleet.loads()
    grown = [
        {name: now[name] - old[name] for name in ("prompt_tokens_total", "cached_tokens_total", "requests_total")}
        for old, now in zip(before, after, strict=True)
    ]
    ttfts_ms = sorted(answer.ttft_s * 1e3 for answer in answers)
    requests = [one["requests_total"] for one in grown]
    return {
        "requests": len(answers),
        "cached_share": sum(one["cached_tokens_total"] for one in grown)
        / sum(one["prompt_tokens_total"] for one in grown),
        "hit_rate": statistics.fmean(answer.cached_tokens > answer.prompt_tokens / 2 for answer in answers),
        "ttft_p50_ms": statistics.median(ttfts_ms),
        "ttft_p95_ms": ttfts_ms[len(ttfts_ms) * 95 // 100],
        "ttft_mean_ms": statistics.fmean(ttfts_ms),
        "largest_share": max(requests) / sum(requests),
    }


def measure_lookup(
    num_replicas: int = 16, num_blocks: int = 1_000_000, num_prompt_tokens: int = 20_000
) -> dict[str, Any]:
    """Return the times of one choice over full indexes, in microseconds, the medians of 51 runs.

    Every replica has the first 3/4 of the prompt, in blocks of 16 tokens, and one has all of it.
    """
    submit = Submit(
        "r", 0, "m", "t", STANDARD, [token * 7919 % 150_000 for token in range(num_prompt_tokens)], Sampling(),
        Stopping(max_tokens=1), 1, b"s", 0,
    )  # fmt: skip
    names = PrefixNames(submit, 16)
    slices_us: list[list[float]] = []
    for _ in range(51):
        names, slices = PrefixNames(submit, 16), []
        while not names.is_complete:
            slices.append(_micros(names.hash_slice))
        slices_us.append(slices)
    rng, states = random.Random(1), []
    tracemalloc.start()
    for index in range(num_replicas):
        blocks = PrefixBlocks()
        blocks.apply(PrefixEvents(0, b"", is_start=True))
        held = names.names if index == 0 else names.names[: len(names.names) * 3 // 4]
        others = (rng.getrandbits(60) for _ in range(num_blocks // num_replicas - len(held)))
        stored = [*held, *others]
        for seq, begin in enumerate(range(0, len(stored), MAX_BLOCKS_PER_MESSAGE), start=1):
            blocks.apply(PrefixEvents(seq, pack_names(stored[begin : begin + MAX_BLOCKS_PER_MESSAGE])))
        del stored
        load = Load(0, 0, 0, 1, 0, 0, 16, 1, 1, 0, 1, 1, engine_id="e", seq=0)
        states.append(EngineState(f"e{index}", True, "", _card(), load, 0, 0.1, prefix_blocks=blocks))
    index_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    num_indexed = sum(len(state.prefix_blocks or ()) for state in states)
    growing = PrefixBlocks()
    growing.apply(PrefixEvents(0, b"", is_start=True))
    parts = [pack_names(rng.getrandbits(60) for _ in range(MAX_BLOCKS_PER_MESSAGE)) for _ in range(51)]
    apply_us = [_micros(partial(growing.apply, PrefixEvents(seq, part))) for seq, part in enumerate(parts, start=1)]
    return {
        "replicas": num_replicas,
        "indexed_blocks": num_indexed,
        "prompt_tokens": num_prompt_tokens,
        "hash_whole_us": round(statistics.median(map(sum, slices_us))),
        "hash_longest_slice_us": round(statistics.median(map(max, slices_us))),
        "choose_us": round(statistics.median(_micros(partial(cheapest, states, names, rng)) for _ in range(51))),
        "apply_full_message_us": round(statistics.median(apply_us)),
        "bytes_per_block": round(index_bytes / num_indexed, 1),
    }


def _micros(call: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    call()
    return (time.perf_counter() - began_s) * 1e6


def merge_runs(earlier: dict[str, Any], settings: dict[str, Any], runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the runs, and those of other cases in an earlier result with the same settings, in the order of cases."""
    new = {(run["trace"], run["rate_per_s"]) for run in runs}
    if {name: earlier.get(name) for name in settings} == settings:
        runs = [*runs, *(run for run in earlier["runs"] if (run["trace"], run["rate_per_s"]) not in new)]
    order = [(trace, rate, routing) for trace, rates in RATES_PER_S.items() for rate in rates for routing in ROUTINGS]
    return sorted(runs, key=lambda run: order.index((run["trace"], run["rate_per_s"], run["routing"])))


def main() -> None:
    parser = make_simulation_parser("KV-aware routing beside affinity and random choice, simulated.", 240.0)
    parser.add_argument("--replicas", type=int, default=16)
    all_cases = [f"{trace}:{rate:g}" for trace, rates in RATES_PER_S.items() for rate in rates]
    parser.add_argument(
        "--cases",
        nargs="+",
        choices=all_cases,
        default=all_cases,
        help="Traces with requests per second. The file keeps the runs of the others.",
    )
    parser.add_argument("--mooncake", type=Path, help="a published trace of Mooncake, in place of the generated ones")
    parser.add_argument("--rates", nargs="+", type=float, default=[3.4], help="requests per second of this trace")
    parser.add_argument("--seeds", type=int, choices=range(1, SEEDS + 1), default=SEEDS, help="runs of each case")
    parser.add_argument("--real", action="store_true", help="measure processes over HTTP")
    parser.add_argument("--rounds", type=int, default=3, help="of real runs")
    args = parser.parse_args()
    if args.real:
        head = describe_real_runs({"engines": REAL_ENGINES, "kv_of_an_engine": REAL_KV, "clients": REAL_CLIENTS})
        runs = asyncio.run(measure_real(args.rounds))
        write_simulation(head | {"runs": summarize_runs(runs, ("case", "routing"), ("round",))}, args.out)
        return
    traces = [case.split(":") for case in args.cases]
    if args.mooncake is not None:
        traces = [[args.mooncake.stem, rate] for rate in args.rates]
    cases = [
        (trace, routing, float(rate), args.replicas, args.seconds, args.mooncake, seed)
        for trace, rate in traces
        for routing in ROUTINGS
        for seed in range(args.seeds)
    ]
    with ProcessPoolExecutor(args.jobs) as pool:
        runs = print_runs(pool.map(measure, *zip(*cases, strict=True)))
    runs = summarize_runs(runs, ("trace", "rate_per_s", "routing"))
    settings = {"device": DEVICE, "policy": POLICY, "replicas": args.replicas, "virtual_seconds": args.seconds}
    runs = [run | {"date": date.today().isoformat()} for run in runs]
    if args.mooncake is None and args.out is not None and args.out.exists():
        runs = merge_runs(json.loads(args.out.read_text()), settings, runs)
    lookup = {"lookup": measure_lookup(args.replicas)} if args.mooncake is None else {}
    result = settings | lookup | {"runs": runs}
    write_simulation(result, args.out)


if __name__ == "__main__":
    main()
