"""S7 and S8, the KV cache: prefix hits with tenants' salts, and preemption when blocks are short."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from random import Random

from msgspec.structs import replace as change

from moiety_engine.simulator.capacity import Capacity, at_load, measure_capacity
from moiety_engine.simulator.devices import A100_LLAMA3_8B, H200_QWEN3_30B_A3B, SimulatedDevice
from moiety_engine.simulator.records import Record
from moiety_engine.simulator.simulate import simulate
from moiety_wire.classes import PRIORITY, SHIPPED
from moiety_workload.request import TraceRequest, Workload
from moiety_workload.transforms import cut
from scenarios.claims import OURS, Ask, Measurement, Scenario, Settings
from scenarios.offers import AZURE_CODE, MOONCAKE, PATIENT, SHARES, draw_classes, load

_LOADS = (0.5, 0.7)  # the target is for the first: the more runs, the fewer blocks are left to remember with
_BURST_LOAD = 1.5
_LESS_KV = 10
_TIERS = {"device and host": H200_QWEN3_30B_A3B.host_tokens, "device alone": 0}


def measure_hits(settings: Settings, seed: int) -> Measurement:
    found = Measurement()
    whole = cut(load(settings.traces, MOONCAKE, seed), seed * 600.0, settings.duration_s)
    capacity = measure_capacity(whole, H200_QWEN3_30B_A3B)
    for factor in _LOADS:
        workload = _some_conversations(whole, factor / capacity.offered, capacity.model.of_request, seed)
        for name, host_tokens in _TIERS.items():
            device = change(H200_QWEN3_30B_A3B, host_tokens=host_tokens)
            _measure_tier(found, f"{factor} C, {name}", workload, device, capacity)
        found.notes.append(f"seed {seed}: {len(workload.requests)} of {len(whole.requests)} requests at {factor} C")
    return found


def _measure_tier(
    found: Measurement, name: str, workload: Workload, device: SimulatedDevice, capacity: Capacity
) -> None:
    size = workload.prefix_block_tokens or 0
    prompts = sum(request.input_tokens for request in workload.requests)
    lru = lru_hits(workload.requests, size, (device.kv_tokens + device.host_tokens) // size)
    found.put(f"{name}: hits", "LRU", lru / prompts)
    for policy in (OURS, "fcfs"):
        records = simulate(workload, device, policy, classes=[PATIENT], capacity=capacity).run.records
        hits = sum(record.cached_tokens for record in records)
        found.put(f"{name}: hits ÷ LRU's", policy, hits / lru)
        found.put(f"{name}: hits", policy, hits / prompts)
        external, tempting = cross_tenant_tokens(records, size)
        found.put(f"{name}: external", policy, external)
        found.put(f"{name}: tempting", policy, tempting)


def _some_conversations(workload: Workload, part: float, work: Callable[[TraceRequest], float], seed: int) -> Workload:
    """Return random whole conversations that make up so much of the work."""
    if part >= 1:
        return workload
    rng = Random(f"conversations {seed}")
    by_conversation: dict[str, list[TraceRequest]] = defaultdict(list)
    for number, request in enumerate(workload.requests):
        by_conversation[request.conversation or f"alone {number}"].append(request)
    names = list(by_conversation)
    rng.shuffle(names)
    wanted = part * sum(map(work, workload.requests))
    kept: list[TraceRequest] = []
    taken = 0.0
    for name in names:
        if taken >= wanted:
            break
        kept += by_conversation[name]
        taken += sum(map(work, by_conversation[name]))
    return replace(workload, requests=tuple(sorted(kept, key=lambda request: request.arrival_s)))


def lru_hits(requests: Iterable[TraceRequest], block_tokens: int, num_blocks: int) -> int:
    """Return the prompt tokens that an LRU cache of so many blocks holds when the prompts arrive in order.

    Blocks are identified by (tenant, block). At least one token of a prompt is computed, as in an engine, and a block
    that is not full is not kept.
    """
    cache: OrderedDict[tuple[str, int], None] = OrderedDict()
    hits = 0
    for request in requests:
        keys = [(request.tenant, block) for block in request.prefix_ids[: request.input_tokens // block_tokens]]
        found = 0
        while found < min(len(keys), (request.input_tokens - 1) // block_tokens) and keys[found] in cache:
            found += 1
        hits += found * block_tokens
        for key in reversed(keys):  # of a prompt, the end is forgotten first
            cache[key] = None
            cache.move_to_end(key)
        while len(cache) > num_blocks:
            cache.popitem(last=False)
    return hits


def cross_tenant_tokens(records: Sequence[Record], block_tokens: int) -> tuple[int, int]:
    """Return (hits that the own tenant cannot have stored, tokens that only other tenants' requests would hit).

    The first counts tokens for which no earlier request of the tenant has the same prefix.
    """
    seen_by: dict[int, set[str]] = defaultdict(set)
    external = tempting = 0
    for record in sorted(records, key=lambda record: record.scheduled_ns or record.end_ns):
        request = record.request
        usable = request.prefix_ids[: (request.input_tokens - 1) // block_tokens]
        own = any_one = 0
        for block in usable:
            if request.tenant not in seen_by[block]:
                break
            own += 1
        for block in usable:
            if not seen_by[block]:
                break
            any_one += 1
        external += max(0, record.cached_tokens - own * block_tokens)
        tempting += (any_one - own) * block_tokens
        for block in request.prefix_ids:
            seen_by[block].add(request.tenant)
    return external, tempting


def measure_bursts(settings: Settings, seed: int) -> Measurement:
    found = Measurement()
    window = cut(load(settings.traces, AZURE_CODE), seed * 600.0, settings.duration_s)
    scarce = change(A100_LLAMA3_8B, kv_tokens=A100_LLAMA3_8B.kv_tokens // _LESS_KV)
    classes = [change(service, on_overload="queue") if service is not PRIORITY else service for service in SHIPPED]
    for name, host_tokens in (("host tier", scarce.host_tokens), ("no host tier", 0)):
        device = change(scarce, host_tokens=host_tokens)
        capacity = measure_capacity(window, device)
        offered = at_load(window, capacity, _BURST_LOAD, seed)
        requests = draw_classes(offered.requests, list(SHARES), seed, weights=list(SHARES.values()))
        workload = replace(offered, requests=requests)
        for policy in (OURS, "fcfs", "strict-priority"):
            figures = simulate(workload, device, policy, classes=classes, capacity=capacity).figures
            found.put(f"{name}: recomputed", policy, figures["recomputed_fraction"])
            found.put(f"{name}: most", policy, figures["max_preemptions"])
            found.put(f"{name}: forbidden", policy, figures["forbidden_preemptions"])
            found.put(f"{name}: preemptions", policy, figures["preemptions"])
            found.put(f"{name}: copied", policy, figures["copied_blocks"])
    return found


def _hit_asks() -> tuple[Ask, ...]:
    asks = []
    for name in (f"{factor} C, {tier}" for factor in _LOADS for tier in _TIERS):
        wanted = 0.95 if name.startswith(str(_LOADS[0])) else None
        asks += [
            Ask(f"{name}: hits ÷ LRU's", f"{name}: tokens hit ÷ those of the LRU", at_least=wanted),
            Ask(f"{name}: hits", f"{name}: prompt tokens hit", form="{:.1%}"),
            Ask(f"{name}: external", f"{name}: tokens hit that another tenant put there", at_most=0, form="{:,.0f}"),
            Ask(
                f"{name}: tempting",
                f"{name}: tokens that only others' requests would have given (what that check can see)",
                form="{:,.0f}",
            ),
        ]
    return tuple(asks)


def _burst_asks() -> tuple[Ask, ...]:
    asks = []
    for name in ("host tier", "no host tier"):
        asks += [
            Ask(f"{name}: recomputed", f"{name}: tokens recomputed, of all computed", at_most=0.03, form="{:.2%}"),
            Ask(f"{name}: most", f"{name}: most preemptions of a request", at_most=2, form="{:.0f}"),
            Ask(f"{name}: forbidden", f"{name}: preemptions of what may not be", at_most=0, form="{:.0f}"),
            Ask(f"{name}: preemptions", f"{name}: preemptions", form="{:.0f}"),
            Ask(f"{name}: copied", f"{name}: blocks copied to and from the host", form="{:.0f}"),
        ]
    return tuple(asks)


S7 = Scenario(
    "S7",
    "Prefix hits of salted tenants",
    "h200-qwen3-30b-a3b, ten minutes of Mooncake's conversations (blocks of 512 tokens), spread over 20 tenants by "
    f"conversation; as many whole conversations as make {_LOADS[0]} and {_LOADS[1]} C. The LRU has the same capacity "
    "in tokens, finds only what its tenant sent, and is asked in the order of arrival with nothing running beside it.",
    _hit_asks(),
    measure_hits,
)
S8 = Scenario(
    "S8",
    "Bursts with few blocks",
    f"a100-llama3-8b with a {_LESS_KV}th of its KV memory (else nothing is ever preempted), ten minutes of the Azure "
    f"code trace with its own bursts at {_BURST_LOAD} C; every request in priority (0.2), standard (0.5) or batch "
    "(0.3) at random, where only priority turns any away.",
    _burst_asks(),
    measure_bursts,
)
SCENARIOS = (S7, S8)
