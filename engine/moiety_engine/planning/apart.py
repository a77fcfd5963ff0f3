"""Whether attention and experts pay on GPUs of their own (MegaScale-Infer, 2504.02263). Pure; decode steps only.

Attention ranks hold a copy of attention each and serve requests of their own, expert ranks hold whole experts. A step's
requests go in micro-batches, so that one is at attention while another is at experts and others are on the way:

    a layer = max(micro-batches · max(attention, experts, one way), attention + experts + 2 · one way)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from moiety_engine.distribution.layout import Layout, Seat
from moiety_engine.errors import OutOfMemory
from moiety_engine.memory import Memory
from moiety_engine.model.shares import own_spec
from moiety_engine.model.spec import MoeSpec
from moiety_engine.planning.layouts import (
    MOST_SEQUENCES,
    Demand,
    activation_bytes,
    evaluate,
    list_layouts,
    most_within,
    with_replicated_experts,
)
from moiety_engine.planning.steps import Batch, Shape, attention_s, dispatch_s, experts_s, head_s, products_s
from moiety_engine.runner.memory import kv_budget_bytes

if TYPE_CHECKING:
    from moiety_engine.model.spec import LayerSpec, ModelSpec
    from moiety_engine.planning.machines import Machine, Network
    from moiety_engine.planning.models import Served

MICRO_BATCHES = (2, 3, 4)
PAYS = 1.05  # times the tokens/s of the best layout together, below which it is not worth its trouble


@dataclass(frozen=True, slots=True)
class Apart:
    """The best division of the GPUs, and the best layout with both on the same ones, both by output tokens/s a GPU of
    decode steps that keep the promised time a token; zero where none does."""

    attention_gpus: int
    expert_gpus: int
    micro_batches: int
    running: int
    tpot_s: float
    tokens_per_s_per_gpu: float
    together_tokens_per_s_per_gpu: float
    together: Layout | None

    @property
    def pays(self) -> bool:
        return self.tokens_per_s_per_gpu > PAYS * self.together_tokens_per_s_per_gpu


def compare(served: Served, num_gpus: int, machine: Machine, network: Network, demand: Demand) -> Apart | None:
    """None for a model without experts or a single GPU."""
    if num_gpus < 2 or not served.spec.moe_layers:
        return None
    decoding = replace(demand, prompts_elsewhere=True)
    found = [
        evaluate(served, layout, num_gpus, machine, network, decoding) for layout in list_layouts(num_gpus, served.spec)
    ]
    good = [one for one in found if one.problem is None]
    together = max(good, key=lambda one: one.tokens_per_s_per_gpu, default=None)
    speed = 0.0 if together is None else together.tokens_per_s_per_gpu
    best = Apart(0, 0, 0, 0, 0.0, 0.0, speed, None if together is None else together.layout)
    for replica in (size for size in range(2, num_gpus + 1) if num_gpus % size == 0):
        for experts in _counts(replica):
            for count in MICRO_BATCHES:
                tried = divide(served, replica - experts, experts, count, machine, network, decoding)
                if tried is not None and tried[1] > best.tokens_per_s_per_gpu:
                    running, each, tpot_s = tried
                    copies = num_gpus // replica
                    best = replace(
                        best,
                        attention_gpus=copies * (replica - experts),
                        expert_gpus=copies * experts,
                        micro_batches=count,
                        running=copies * running,
                        tpot_s=tpot_s,
                        tokens_per_s_per_gpu=each,
                    )
    return best


def _counts(replica: int) -> list[int]:
    """Of expert ranks: about every eighth of the GPUs."""
    return sorted({max(1, min(replica - 1, round(replica * eighths / 8))) for eighths in range(1, 8)})


def divide(
    served: Served, attention: int, experts: int, micro_batches: int, machine: Machine, network: Network, demand: Demand
) -> tuple[int, float, float] | None:
    """(requests at once, output tokens/s a GPU, seconds a token) of so many ranks of each kind; None if it does not fit
    or keep the promise."""
    spec = with_replicated_experts(served.spec, experts)
    held = own_spec(spec, Seat(Layout(1, experts, experts, 1)))
    bare = _without_experts(spec)
    room = _room(served, spec, bare, held, machine, demand)

    def step_s(each: int) -> float:
        return _step_s(served, held, attention, experts, each / micro_batches, micro_batches, machine, network, demand)

    each = most_within(lambda count: step_s(count) <= demand.tpot_s, min(room, MOST_SEQUENCES))
    if each < 1:
        return None
    seconds = step_s(each)
    return each * attention, each * attention / seconds / (attention + experts), seconds


def _room(served: Served, spec: ModelSpec, bare: ModelSpec, held: ModelSpec, machine: Machine, demand: Demand) -> int:
    """Requests whose cache an attention rank holds; 0, too, where the experts do not fit on theirs."""
    of_attention = served.weight_bytes(bare)
    of_experts = served.weight_bytes(held) - of_attention
    total = int(machine.memory_bytes)
    try:
        kv_budget_bytes(Memory(total - of_experts, total), activation_bytes(held, demand))
        kv_bytes = kv_budget_bytes(Memory(total - of_attention, total), activation_bytes(held, demand))
    except OutOfMemory:
        return 0
    return int(kv_bytes // served.kv_bytes_per_token(spec) // demand.mean_context)


def _without_experts(spec: ModelSpec) -> ModelSpec:
    def bare(layer: LayerSpec) -> LayerSpec:
        return replace(layer, ffn=replace(layer.ffn, held=())) if isinstance(layer.ffn, MoeSpec) else layer

    return replace(spec, layers=tuple(map(bare, spec.layers)))


def _step_s(
    served: Served,
    held: ModelSpec,
    attention: int,
    experts: int,
    rows: float,
    micro_batches: int,
    machine: Machine,
    network: Network,
    demand: Demand,
) -> float:
    """`rows`: of one micro-batch on one attention rank."""
    batch = Batch(decoding=rows, context=demand.mean_context)
    shape = Shape(1, experts, experts, 1, demand.balancedness)
    total = machine.overhead_s + head_s(held, machine, rows * micro_batches)
    known: dict[LayerSpec, float] = {}
    for layer in held.layers:
        if layer not in known:
            mine = products_s(served, held, layer, machine, rows) + attention_s(
                layer.attention, machine, batch, served.kv_itemsize
            )
            if isinstance(layer.ffn, MoeSpec):
                theirs = experts_s(served, layer.ffn, held.hidden_size, machine, rows * attention, shape)
                way = one_way_s(rows, held.hidden_size, layer.ffn.routing.top_k, attention, experts, network)
                known[layer] = pipelined_s(micro_batches, mine, theirs, way)
            else:
                known[layer] = micro_batches * mine
        total += known[layer]
    return total


def pipelined_s(micro_batches: int, attention: float, experts: float, one_way: float) -> float:
    """A layer: bound by its slowest part, or by one micro-batch's way through all of it."""
    return max(micro_batches * max(attention, experts, one_way), attention + experts + 2 * one_way)


def one_way_s(rows: float, hidden_size: int, top_k: int, attention: int, experts: int, network: Network) -> float:
    """bf16 rows from attention to experts or back, none of which stays: what the busier side sends or receives."""
    copies = experts * (1 - (1 - 1 / experts) ** top_k)
    busier = max(1.0, attention / experts)
    ranks = attention + experts
    sent = dispatch_s(rows * copies * busier, 2.0 * hidden_size, 1, ranks, network)
    return sent * ranks / (ranks - 1)
