"""All layouts of a model on a number of GPUs: memory fit, concurrent requests, speed and cost. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from moiety_engine.distribution.layout import Layout, RankPosition
from moiety_engine.errors import InvalidConfig, OutOfMemory
from moiety_engine.memory import Memory
from moiety_engine.model.context_parallel import require_shared_cache, require_shared_positions
from moiety_engine.model.spec import MoeSpec
from moiety_engine.model.tensor_shards import check_cuts, own_spec
from moiety_engine.planning.steps import NO_TIME, PlannedBatch, Shape, StepTimes, busiest_step_times, has_kernel
from moiety_engine.runner.memory import kv_budget_bytes
from moiety_kernels.quantization.weight import GPU_PACK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from moiety_engine.model.spec import ModelSpec
    from moiety_engine.planning.machines import GpuNetwork, Machine
    from moiety_engine.planning.models import Served
    from moiety_kernels.quantization.weight import WeightFormat

MAX_SEQUENCES = 8192  # per group; larger batches gain nothing
MAX_STAGES = 8
NO_ROOM = "the KV cache does not hold one request of this length"
LATE = "a first token takes"


@dataclass(frozen=True, slots=True)
class TrafficDemand:
    """Request lengths and SLO targets, as averages and without queueing."""

    input_tokens: int
    output_tokens: int
    ttft_s: float
    tpot_s: float
    gpu_hour_usd: float
    max_batch_tokens: int = 8192  # prompt tokens per step
    balancedness: float = 0.9
    prompts_elsewhere: bool = False  # other GPUs compute prompts; all steps here decode

    @property
    def mean_context(self) -> float:
        """Mean number of tokens that a decoding request has in the cache."""
        return self.input_tokens + self.output_tokens / 2


@dataclass(frozen=True, slots=True)
class LayoutCandidate:
    """A layout and its predicted figures. `problem`: why it is unsuitable; figures that were not computed are zero."""

    layout: Layout
    replicas: int
    in_engine: bool
    problem: str | None = None
    weight_bytes: int = 0  # per rank
    kv_bytes_per_token: int = 0  # per rank, of a request of mean length
    kv_tokens: int = 0  # per group
    most_running: int = 0  # requests that fit into the memory of all replicas
    running: int = 0  # requests that decode at once within the SLO, over all replicas
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    decode: StepTimes = NO_TIME  # the step with `running` requests
    prefill: StepTimes = NO_TIME  # a prompt alone, or its largest chunk
    tokens_per_s: float = 0.0  # output tokens of all GPUs
    tokens_per_s_per_gpu: float = 0.0
    usd_per_million_tokens: float = 0.0  # output tokens

    @property
    def num_caches(self) -> int:
        """Number of KV caches with requests of their own, over all replicas."""
        return self.layout.dp // self.layout.pcp * self.replicas


def list_layouts(num_gpus: int, spec: ModelSpec) -> Iterator[Layout]:
    """Yield all layouts whose ranks divide the GPUs. DP attention goes with whole experts."""
    for ranks in _divisors(num_gpus):
        for pp in (one for one in _divisors(ranks) if one <= MAX_STAGES):
            for tp in _divisors(ranks // pp):
                dp = ranks // pp // tp
                if dp == 1:
                    yield from (Layout(tp, 1, ep, pp) for ep in _divisors(tp) if ep == 1 or spec.moe_layers)
                elif pp == 1 and spec.moe_layers:
                    yield Layout(tp, dp, dp * tp)


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]


def with_replicated_experts(spec: ModelSpec, ep: int) -> ModelSpec:
    """Return the spec with the experts padded to a multiple of `ep`; the extra ones are further replicas."""

    def padded(ffn: MoeSpec) -> MoeSpec:
        slots = -(-ffn.num_experts // ep) * ep + ffn.zero_experts
        return replace(ffn, routing=replace(ffn.routing, num_experts=slots, num_groups=1, group_score="best"))

    layers = (replace(one, ffn=padded(one.ffn)) if isinstance(one.ffn, MoeSpec) else one for one in spec.layers)
    return replace(spec, layers=tuple(layers))


def evaluate_layouts(
    served: Served, num_gpus: int, machine: Machine, network: GpuNetwork, demand: TrafficDemand
) -> Iterator[LayoutCandidate]:
    """Evaluate all layouts, and context parallelism on those that it can make suitable (`with_context_parallel`)."""
    for layout in list_layouts(num_gpus, served.spec):
        found = evaluate(served, layout, num_gpus, machine, network, demand)
        yield found
        for one in with_context_parallel(found, num_gpus, served.spec):
            try:
                require_shared_positions(served.spec, one)
                require_shared_cache(served.spec, one)
            except InvalidConfig:
                continue
            yield evaluate(served, one, num_gpus, machine, network, demand)


def with_context_parallel(found: LayoutCandidate, num_gpus: int, spec: ModelSpec) -> Iterator[Layout]:
    """Yield the layouts with context parallelism that solve the problem of a layout without it.

    Where the cache does not hold a request, the ranks of a group divide its positions (decode context parallelism).
    Where the TTFT is missed, groups divide the tokens of each step (prefill context parallelism): those of DP
    attention, or, for a model without experts, several groups of the layout's ranks.
    """
    layout, problem = found.layout, found.problem or ""
    if problem == NO_ROOM:
        yield from (replace(layout, dcp=dcp) for dcp in _divisors(layout.tp) if dcp > 1)
    if not problem.startswith(LATE) or layout.pp > 1:
        return
    if layout.dp > 1:
        yield replace(layout, pcp=layout.dp)
    elif not spec.moe_layers:
        yield from (replace(layout, dp=pcp, pcp=pcp) for pcp in _divisors(num_gpus // layout.tp) if pcp > 1)


def evaluate(
    served: Served, layout: Layout, num_gpus: int, machine: Machine, network: GpuNetwork, demand: TrafficDemand
) -> LayoutCandidate:
    """Find the most concurrent requests that attain the TPOT target, and the figures at that number."""
    if machine.tiled and served.form is not None and served.form.in_halves:
        served = replace(served, form=None)  # no GPU kernel reads NVFP4: the engine dequantizes it
    replicas = num_gpus // layout.num_ranks
    found = LayoutCandidate(layout, replicas, in_engine=experts_come_out_even(served.spec, layout.ep))
    try:
        own, of_all_layers = _own(served.spec, layout)
        if served.form is not None:
            check_cuts(_as_read(served.form, machine), served.spec, layout)
    except InvalidConfig as exc:
        return replace(found, problem=str(exc))
    if not _has_kernels(served, own, machine):
        return replace(found, problem="no kernel supports experts of this width")
    found = _fill_memory(found, served, own, machine, demand)
    if found.problem is not None:
        return found
    return _fill_times(found, served, of_all_layers, machine, network, demand)


def _fill_memory(
    found: LayoutCandidate, served: Served, own: ModelSpec, machine: Machine, demand: TrafficDemand
) -> LayoutCandidate:
    weights = served.weight_bytes(own)
    kv_bytes_per_token = served.kv_bytes_per_token(own, demand.mean_context, found.layout.dcp)
    found = replace(found, weight_bytes=weights, kv_bytes_per_token=kv_bytes_per_token)
    free = Memory(int(machine.memory_bytes) - weights, int(machine.memory_bytes))
    shared = shared_cache_bytes(served, own, found.layout, demand)
    try:
        kv_bytes = kv_budget_bytes(free, activation_bytes(own, demand, found.layout.pcp) + shared)
    except OutOfMemory:
        return replace(found, problem="the weights leave no memory for the KV cache")
    kv_tokens = kv_bytes // found.kv_bytes_per_token
    most = int(kv_tokens // demand.mean_context) * found.num_caches
    short = kv_tokens < demand.input_tokens + demand.output_tokens
    problem = NO_ROOM if short else None
    return replace(found, kv_tokens=kv_tokens, most_running=most, problem=problem)


def _fill_times(
    found: LayoutCandidate, served: Served, own: ModelSpec, machine: Machine, network: GpuNetwork, demand: TrafficDemand
) -> LayoutCandidate:
    """Add the times. `own`: the share of one rank of each stage, over all stages together."""
    layout = found.layout
    shape = Shape(layout.tp, layout.dp, layout.ep, layout.pp, demand.balancedness, layout.dcp, layout.pcp)

    def step(batch: PlannedBatch) -> StepTimes:
        return busiest_step_times(served, own, shape, machine, network, batch)

    def decode(running: int) -> StepTimes:
        return step(mixed_batch(demand, running, layout.dp // layout.pcp))

    most = min(found.most_running // found.num_caches, MAX_SEQUENCES)
    if not demand.prompts_elsewhere:
        most = min(most, max(1, demand.max_batch_tokens * demand.output_tokens // demand.input_tokens))
    running = most_within(lambda count: decode(count).total_s <= demand.tpot_s, most)
    times = decode(max(1, running))
    chunk = min(demand.input_tokens, demand.max_batch_tokens)
    alone = PlannedBatch(prompt_rows=chunk, prompt_seen=demand.input_tokens / 2, finished_prompts=1, prompt_chunk=chunk)
    prefill = step(alone)
    ttft_s = times.total_s + demand.input_tokens / chunk * prefill.total_s
    found = replace(found, decode=times, prefill=prefill, tpot_s=times.total_s, ttft_s=ttft_s)
    if running < 1:
        return replace(found, problem=f"one request takes {1000 * times.total_s:.0f} ms a token")
    if ttft_s > demand.ttft_s and not demand.prompts_elsewhere:
        return replace(found, problem=f"{LATE} {ttft_s:.2f} s")
    together = running * found.num_caches
    each = together / times.total_s / (layout.num_ranks * found.replicas)
    return replace(
        found,
        running=together,
        tokens_per_s=together / times.total_s,
        tokens_per_s_per_gpu=each,
        usd_per_million_tokens=usd_per_million(each, demand.gpu_hour_usd),
    )


def usd_per_million(tokens_per_s_per_gpu: float, gpu_hour_usd: float) -> float:
    return gpu_hour_usd / (3600 * tokens_per_s_per_gpu) * 1e6


def mixed_batch(demand: TrafficDemand, running: int, groups: int) -> PlannedBatch:
    """Return an average step where requests arrive as fast as they end.

    Each decoding request brings its share of prompt tokens.
    """
    each = 0.0 if demand.prompts_elsewhere else demand.input_tokens / demand.output_tokens
    chunk = min(demand.input_tokens, demand.max_batch_tokens, running * each)
    return PlannedBatch(
        decoding=running,
        context=demand.mean_context,
        prompt_rows=running * each,
        prompt_seen=demand.input_tokens / 2,
        finished_prompts=running * each / demand.input_tokens,
        groups=groups,
        prompt_chunk=chunk,
    )


def _own(spec: ModelSpec, layout: Layout) -> tuple[ModelSpec, ModelSpec]:
    """Return the share of the first rank, which holds the most, and the shares of one rank of each stage together."""
    if layout.dp > 1:
        spec = with_replicated_experts(spec, layout.ep)
    own = own_spec(spec, RankPosition(layout))
    return own, own if layout.pp == 1 else own_spec(spec, RankPosition(replace(layout, pp=1)))


def _as_read(form: WeightFormat, machine: Machine) -> WeightFormat:
    """Return the weight format as the machine's kernels expect it to be packed."""
    return replace(form, pack=GPU_PACK) if machine.tiled and form.bits == 4 else form


def experts_come_out_even(spec: ModelSpec, ep: int) -> bool:
    """Return whether no rank needs a copy of an expert."""
    mixtures = [layer.ffn for layer in spec.layers if isinstance(layer.ffn, MoeSpec)]
    return all(ffn.num_experts % ep == 0 for ffn in mixtures)


def _has_kernels(served: Served, own: ModelSpec, machine: Machine) -> bool:
    mixtures = {layer.ffn for layer in own.layers if isinstance(layer.ffn, MoeSpec)}
    return all(has_kernel(served, ffn, own.hidden_size, machine) for ffn in mixtures)


def activation_bytes(own: ModelSpec, demand: TrafficDemand, pcp: int = 1) -> int:
    """Return the activation bytes of the largest step, whose rows `pcp` groups divide.

    Counts the residual stream and a layer's intermediates, and each routed pair's hidden and output row.
    """
    mixtures = [layer.ffn for layer in own.layers if isinstance(layer.ffn, MoeSpec)]
    pairs = max((one.routing.top_k * (one.width + own.hidden_size) for one in mixtures), default=0)
    return int(-(-demand.max_batch_tokens // pcp) * 2 * (8 * own.hidden_size + pairs))


def shared_cache_bytes(served: Served, own: ModelSpec, layout: Layout, demand: TrafficDemand) -> int:
    """Return the bytes of a layer's keys and values of the largest step, which the groups of PCP exchange."""
    if layout.pcp == 1:
        return 0
    return demand.max_batch_tokens * max(served.kv_bytes(layer.attention) for layer in own.layers)


def most_within(holds: Callable[[int], bool], most: int) -> int:
    """Return the largest count up to `most` for which `holds` is true, or 0; `holds` must be monotonic."""
    low, high = 0, max(0, most)
    while low < high:
        middle = (low + high + 1) // 2
        if holds(middle):
            low = middle
        else:
            high = middle - 1
    return low
