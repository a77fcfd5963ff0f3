"""Comparison of attention–FFN disaggregation (MegaScale-Infer, 2504.02263) with shared GPUs.

Pure functions; decode steps only. Each attention rank holds a copy of attention and serves its own requests. Expert
ranks hold whole experts and may be GPUs of another kind. A step's requests are split into micro-batches, so that one
micro-batch computes attention while another computes experts and others are in transfer:

    a layer = max(micro-batches · max(attention, experts, one way), attention + experts + 2 · one way)

The best ratio makes attention and experts take equally long. The two arrangements are compared by the output tokens/s
that the price of one GPU buys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from moiety_engine.distribution.layout import Layout, RankPosition
from moiety_engine.errors import InvalidConfig, OutOfMemory
from moiety_engine.memory import Memory
from moiety_engine.model.spec import MoeSpec
from moiety_engine.model.tensor_shards import own_spec
from moiety_engine.planning.layouts import (
    MAX_SEQUENCES,
    TrafficDemand,
    activation_bytes,
    evaluate,
    experts_come_out_even,
    list_layouts,
    most_within,
    with_replicated_experts,
)
from moiety_engine.planning.machines import GpuNetwork, Machine
from moiety_engine.planning.steps import PlannedBatch, Shape, attention_s, dispatch_s, experts_s, head_s, products_s
from moiety_engine.runner.memory import kv_budget_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moiety_engine.model.spec import LayerSpec, ModelSpec
    from moiety_engine.planning.layouts import LayoutCandidate
    from moiety_engine.planning.models import Served

MICRO_BATCHES = (1, 2, 3, 4)
PAYS = 1.05  # factor over the tokens/s of the best layout together; below it, disaggregation does not pay


@dataclass(frozen=True, slots=True)
class Sides:
    """Hardware for attention and for experts. `price`: price of an expert GPU relative to an attention GPU."""

    attention: Machine
    experts: Machine
    network: GpuNetwork
    price: float = 1.0

    @property
    def between(self) -> GpuNetwork:
        """Network between the two sides. GPUs of two kinds are on different hosts."""
        one_kind = self.attention == self.experts
        return self.network if one_kind else replace(self.network, inside=self.network.across)


@dataclass(frozen=True, slots=True)
class AttentionFfnLayout:
    """Split of the GPUs into attention and expert GPUs, with `replicas` copies.

    Speeds are output tokens/s of decode steps that attain the TPOT target, per price of one GPU; zero where no split
    attains it. `in_engine`: no rank needs a copy of an expert.
    """

    replicas: int = 0
    attention_gpus: int = 0  # per replica
    expert_gpus: int = 0
    micro_batches: int = 0
    running: int = 0  # over all replicas
    tpot_s: float = 0.0
    tokens_per_s_per_gpu: float = 0.0
    in_engine: bool = True


@dataclass(frozen=True, slots=True)
class AttentionFfnComparison:
    """The best disaggregated layout and the best layout with both on the same GPUs, for decode steps alone."""

    apart: AttentionFfnLayout
    together: Layout | None
    together_tokens_per_s_per_gpu: float

    @property
    def pays(self) -> bool:
        return self.apart.tokens_per_s_per_gpu > PAYS * self.together_tokens_per_s_per_gpu


def compare(served: Served, num_gpus: int, sides: Sides, demand: TrafficDemand) -> dict[str, AttentionFfnComparison]:
    """Compare the two arrangements among layouts that the engine supports ("advised") and among all ("best_of_all").

    Returns an empty dict for a model without experts, for one that the engine refuses (see `why_not_apart`), or for a
    single GPU.
    """
    if num_gpus < 2 or not served.spec.moe_layers or why_not_apart(served.spec):
        return {}
    decoding = replace(demand, prompts_elsewhere=True)
    found = [
        evaluate(served, layout, num_gpus, sides.attention, sides.network, decoding)
        for layout in list_layouts(num_gpus, served.spec)
    ]
    good = [one for one in found if one.problem is None]
    divided = list(_divisions(served, num_gpus, sides, decoding))
    ours = _best([one for one in divided if one.in_engine], [one for one in good if one.in_engine])
    return {"advised": ours, "best_of_all": _best(divided, good)}


def why_not_apart(spec: ModelSpec) -> str:
    """Return why the engine refuses expert ranks for a model with experts; "" if it does not."""
    try:
        own_spec(spec, RankPosition(Layout(ffn_ranks=1)))
    except InvalidConfig as exc:
        return str(exc)
    return ""


def _best(divided: list[AttentionFfnLayout], layouts: list[LayoutCandidate]) -> AttentionFfnComparison:
    apart = max(divided, key=lambda one: one.tokens_per_s_per_gpu, default=AttentionFfnLayout())
    together = max(layouts, key=lambda one: one.tokens_per_s_per_gpu, default=None)
    return AttentionFfnComparison(
        apart, *((None, 0.0) if together is None else (together.layout, together.tokens_per_s_per_gpu))
    )


def _divisions(served: Served, num_gpus: int, sides: Sides, demand: TrafficDemand) -> Iterator[AttentionFfnLayout]:
    """Yield the splits that fit into memory and attain the TPOT target."""
    for replica in (size for size in range(2, num_gpus + 1) if num_gpus % size == 0):
        for experts in _counts(replica, served.spec):
            for micro_batches in MICRO_BATCHES:
                tried = divide(served, replica - experts, experts, micro_batches, sides, demand)
                if tried is not None:
                    copies = num_gpus // replica
                    yield replace(tried, replicas=copies, running=copies * tried.running)


def _counts(replica: int, spec: ModelSpec) -> list[int]:
    """Return the numbers of expert ranks to try: each eighth of the GPUs, and those that divide the experts evenly."""
    eighths = {max(1, min(replica - 1, round(replica * part / 8))) for part in range(1, 8)}
    return sorted(eighths | {count for count in range(1, replica) if experts_come_out_even(spec, count)})


def divide(
    served: Served, attention: int, experts: int, micro_batches: int, sides: Sides, demand: TrafficDemand
) -> AttentionFfnLayout | None:
    """Evaluate one split into attention and expert ranks; None if it does not fit or misses the TPOT target."""
    layout = Layout(dp=attention, ep=experts, ffn_ranks=experts)
    spec = with_replicated_experts(served.spec, experts)
    ours, theirs = own_spec(spec, RankPosition(layout)), own_spec(spec, RankPosition(layout, attention))
    capacity = _kv_capacity(served, ours, theirs, sides, demand)

    def step_s(each: int) -> float:
        return _step_s(served, ours, theirs, layout, each / micro_batches, micro_batches, sides, demand)

    each = most_within(lambda count: step_s(count) <= demand.tpot_s, min(capacity, MAX_SEQUENCES))
    if each < 1:
        return None
    seconds = step_s(each)
    speed = each * attention / seconds / (attention + experts * sides.price)
    even = experts_come_out_even(served.spec, experts)
    return AttentionFfnLayout(1, attention, experts, micro_batches, each * attention, seconds, speed, even)


def _kv_capacity(served: Served, ours: ModelSpec, theirs: ModelSpec, sides: Sides, demand: TrafficDemand) -> int:
    """Return how many requests' KV cache fits on an attention rank; 0 also where the experts do not fit on theirs."""
    activations = activation_bytes(theirs, demand)
    kv_bytes = []
    for own, machine in ((theirs, sides.experts), (ours, sides.attention)):
        total = int(machine.memory_bytes)
        try:
            kv_bytes.append(kv_budget_bytes(Memory(total - served.weight_bytes(own), total), activations))
        except OutOfMemory:
            return 0
    return int(kv_bytes[-1] // served.kv_bytes_per_token(ours, demand.mean_context) // demand.mean_context)


def _step_s(
    served: Served,
    ours: ModelSpec,
    theirs: ModelSpec,
    layout: Layout,
    rows: float,
    micro_batches: int,
    sides: Sides,
    demand: TrafficDemand,
) -> float:
    """Return the seconds of a step. `rows`: rows of one micro-batch on one attention rank."""
    machine, size, experts = sides.attention, ours.hidden_size, layout.ffn_ranks
    batch = PlannedBatch(decoding=rows, context=demand.mean_context)
    shape = Shape(1, experts, experts, 1, demand.balancedness)
    total = machine.overhead_s + head_s(ours, machine, rows * micro_batches)
    known: dict[LayerSpec, float] = {}
    for layer, answering in zip(ours.layers, theirs.layers, strict=True):
        if layer not in known:
            mine = products_s(served, ours, layer, machine, rows)
            mine += attention_s(layer.attention, machine, batch, served.kv_bytes(layer.attention))
            if isinstance(answering.ffn, MoeSpec):
                given = experts_s(served, answering.ffn, size, sides.experts, rows * layout.dp, shape)
                way = one_way_s(rows, size, answering.ffn.routing.top_k, layout.dp, experts, sides.between)
                known[layer] = pipelined_s(micro_batches, mine, given, way)
            else:
                known[layer] = micro_batches * mine
        total += known[layer]
    return total


def pipelined_s(micro_batches: int, attention: float, experts: float, one_way: float) -> float:
    """Return the time of a layer: bound by its slowest part, or by one micro-batch's path through all parts."""
    return max(micro_batches * max(attention, experts, one_way), attention + experts + 2 * one_way)


def one_way_s(rows: float, hidden_size: int, top_k: int, attention: int, experts: int, network: GpuNetwork) -> float:
    """Return the time to move bf16 rows from attention to experts or back, bound by the side that moves more.

    No row stays on its rank.
    """
    copies = experts * (1 - (1 - 1 / experts) ** top_k)
    busier = max(1.0, attention / experts)
    ranks = attention + experts
    sent = dispatch_s(rows * copies * busier, 2.0 * hidden_size, 1, ranks, network)
    return sent * ranks / (ranks - 1)
