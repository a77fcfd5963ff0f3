"""Time of one step of a layout, by parts.

Pure functions.

Products and reads take the larger of the times of their bytes and their operations at the machine's speeds. Experts
take the time that the grouped GEMM's cost model predicts for one rank's share. Sums and exchanges take their bytes over
the links.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import torch

from moiety_engine.model.attention_options import IndexerSpec
from moiety_engine.model.recurrent_specs import RecurrentSpec
from moiety_engine.model.spec import AttentionSpec, LatentAttentionSpec, LayerSpec, MoeSpec
from moiety_engine.model.weights import LatentAttentionWeights, MoeWeights, allocate, products_of
from moiety_engine.planning.models import INDEX_KEY_ITEMSIZE
from moiety_kernels.bench.work import Speeds, Work, expected_active, floor_s
from moiety_kernels.grouped_gemm.tile_cost_model import LAUNCH_S, Problem, candidates, choose, seconds

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from moiety_engine.model.spec import ModelSpec
    from moiety_engine.planning.machines import GpuNetwork, Link, Machine
    from moiety_engine.planning.models import Served
    from moiety_kernels.grouped_gemm.tile_cost_model import Scales, Weights

_ITEM_BYTES = 2  # per activation
_STATE_FLOPS = 6.0  # per entry of the state: recall, correct, read
_PROMPT_ATTENTION = 0.5  # share of the peak; as in the simulator's H200
_KERNELS_A_LAYER = 8  # besides the experts' kernels; a few microseconds each


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """Work of one group of a replica in a step.

    `prompt_seen`: mean number of tokens that a prompt token attends to. `groups`: number of groups that have this work;
    the others are idle. `prompt_chunk`: mean number of a prompt's consecutive tokens in the step.
    """

    decoding: float = 0.0
    context: float = 0.0
    prompt_rows: float = 0.0
    prompt_seen: float = 0.0
    finished_prompts: float = 0.0
    groups: int = 1
    prompt_chunk: float = 0.0

    @property
    def rows(self) -> float:
        return self.decoding + self.prompt_rows


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of a step by parts. The parts run one after the other: nothing overlaps."""

    products_s: float = 0.0  # attention, dense and shared feed-forwards, and the head
    attention_s: float = 0.0
    experts_s: float = 0.0
    sums_s: float = 0.0
    exchanges_s: float = 0.0
    overhead_s: float = 0.0

    @property
    def total_s(self) -> float:
        return float(sum(getattr(self, field.name) for field in fields(self)))


NO_TIME = StepTimes()


@dataclass(frozen=True, slots=True)
class Shape:
    """Parallel layout of a stage: `groups` groups of `tp` ranks; the experts form `ep` parts over all ranks."""

    tp: int = 1
    groups: int = 1
    ep: int = 1
    pp: int = 1
    balancedness: float = 1.0  # mean load of the ranks that share experts, divided by the largest load
    dcp: int = 1  # ranks that divide the positions of a sequence
    pcp: int = 1  # of the groups, those with one cache, which divide the tokens of a step

    @property
    def ranks(self) -> int:
        return self.tp * self.groups


def busiest_step_times(
    served: Served, own: ModelSpec, shape: Shape, machine: Machine, network: GpuNetwork, batch: PlannedBatch
) -> StepTimes:
    """Return the step times of the slower one of `end_parts` if groups divide the step's tokens, else of any rank."""
    times = (step_times(served, own, shape, machine, network, part) for part in end_parts(batch, shape.pcp))
    return max(times, key=lambda one: one.total_s)


def end_parts(batch: PlannedBatch, pcp: int) -> list[PlannedBatch]:
    """Return the first and the last of the equal parts into which `pcp` groups divide the step of one cache.

    Decodes come first. The tokens of the last part see the most: the end of a prompt's chunk.
    """
    if pcp == 1:
        return [batch]
    rows = batch.rows / pcp
    decoding = min(batch.decoding, rows)
    last_decoding = max(0.0, batch.decoding - (pcp - 1) * rows)
    first = replace(
        batch, decoding=decoding, prompt_rows=rows - decoding, finished_prompts=0.0, groups=batch.groups * pcp
    )
    last = replace(
        batch,
        decoding=last_decoding,
        prompt_rows=rows - last_decoding,
        prompt_seen=batch.prompt_seen + max(0.0, batch.prompt_chunk - rows) / 2,
        groups=batch.groups * pcp,
    )
    return [first, last]


def step_times(
    served: Served, own: ModelSpec, shape: Shape, machine: Machine, network: GpuNetwork, batch: PlannedBatch
) -> StepTimes:
    """Return the step times of the busiest rank; `own` is its share of all layers."""
    total = StepTimes(overhead_s=machine.overhead_s)
    for layer, count in Counter(own.layers).items():
        products = products_s(served, own, layer, machine, batch.rows)
        attention = attention_s(layer.attention, machine, batch, served.kv_bytes(layer.attention) / shape.dcp)
        experts = sums = exchanges = 0.0
        row_bytes = own.hidden_size * _ITEM_BYTES
        if isinstance(layer.ffn, MoeSpec):
            stage_rows = batch.rows * batch.groups
            experts = experts_s(served, layer.ffn, own.hidden_size, machine, stage_rows, shape)
            if shape.groups > 1:
                width = layer.ffn.input_width(own.hidden_size)
                exchanges = exchange_s(served, layer.ffn, batch.rows / shape.tp, width, shape.ranks, network)
        exchanges += context_exchange_s(layer.attention, batch.rows, shape.dcp, network)
        exchanges += shared_cache_s(served.kv_bytes(layer.attention), batch.rows, shape, network)
        num_sums = 1 if layer.ffn is None else 2 if shape.groups == 1 or not isinstance(layer.ffn, MoeSpec) else 1
        sums = num_sums * sum_s(batch.rows * row_bytes, shape.tp, network)
        total = _plus(total, StepTimes(products, attention, experts, sums, exchanges), count)
    head = head_s(own, machine, batch.decoding + batch.finished_prompts)
    embedded = sum_s(batch.rows * own.hidden_size * _ITEM_BYTES, shape.tp, network)
    handed_on = (shape.pp - 1) * send_s(batch.rows * own.hidden_size * _ITEM_BYTES, shape.ranks, network)
    return _plus(total, StepTimes(products_s=head, sums_s=embedded, exchanges_s=handed_on), 1)


def _plus(total: StepTimes, more: StepTimes, count: int) -> StepTimes:
    both = ((getattr(total, field.name), getattr(more, field.name)) for field in fields(StepTimes))
    return StepTimes(*(left + count * right for left, right in both))


# ── one rank's products ──


def products_s(served: Served, own: ModelSpec, layer: LayerSpec, machine: Machine, rows: float) -> float:
    """Return the seconds of a layer's products, without the routed experts."""
    weights = allocate(replace(own, layers=(layer,), vocab_size=1), device=torch.device("meta"), dtype=torch.bfloat16)
    (layer_weights,) = weights.layers
    narrow: Iterable[Tensor] = products_of(layer_weights.attention)
    wide: list[Tensor] = []
    if isinstance(layer_weights.attention, LatentAttentionWeights):
        wide += [layer_weights.attention.key_up_HLd, layer_weights.attention.value_up_HdL]
        if (indexer := layer_weights.attention.indexer) is not None:
            wide += [indexer.query_up_QC, indexer.key_ID, indexer.head_weight_HD]
    if isinstance(layer_weights.ffn, MoeWeights):
        wide.append(layer_weights.ffn.router_ED)
        narrow = [*narrow, *products_of(layer_weights.ffn.shared), *products_of(layer_weights.ffn.latent)]
    else:
        narrow = [*narrow, *products_of(layer_weights.ffn)]
    bits = _dense_itemsize(served)
    launches = _KERNELS_A_LAYER * LAUNCH_S if machine.tiled else 0.0
    sized = [(tensor, bits) for tensor in narrow] + [(tensor, _ITEM_BYTES) for tensor in wide]
    return launches + sum(product_s(tensor.shape, itemsize, machine, rows) for tensor, itemsize in sized)


def head_s(own: ModelSpec, machine: Machine, rows: float) -> float:
    return product_s((own.vocab_size, own.hidden_size), _ITEM_BYTES, machine, rows)


def product_s(shape: tuple[int, ...], itemsize: float, machine: Machine, rows: float) -> float:
    """Return the seconds of a weight [..., outputs, inputs] times `rows` rows, at the bf16 rate."""
    numel = 1
    for size in shape:
        numel *= size
    moved = numel * itemsize + rows * (numel / shape[-1] + shape[-1]) * _ITEM_BYTES
    return floor_s(Work(2.0 * rows * numel, moved), _speeds(machine))


def attention_s(
    attention: AttentionSpec | LatentAttentionSpec | RecurrentSpec,
    machine: Machine,
    batch: PlannedBatch,
    kv_bytes: float,
) -> float:
    """Return the seconds of a layer's attention.

    Counts the cache reads of decoding (`kv_bytes` per token) and the pairs that prompt tokens attend to. A recurrent
    layer reads and writes the state of each decode, and multiplies each token with it.
    """
    if isinstance(attention, RecurrentSpec):
        numel = attention.matrix_values
        decoding = floor_s(Work(_STATE_FLOPS * numel * batch.decoding, 8.0 * numel * batch.decoding), _speeds(machine))
        prompts = batch.prompt_rows * _STATE_FLOPS * numel / (_PROMPT_ATTENTION * machine.speeds.flops_bf16)
        return decoding + prompts
    if isinstance(attention, LatentAttentionSpec):  # absorbed: scores and sums are over latent rows
        pair_flops = 2.0 * attention.num_heads * (2 * attention.latent_width + attention.rope.rotary_width)
        if attention.indexer is not None:
            return _sparse_s(attention, attention.indexer, machine, batch, pair_flops, kv_bytes)
        window = None
    else:
        pair_flops = 2.0 * attention.num_heads * (attention.head_dim + attention.value_width)
        window = attention.window
    context, seen = (length if window is None else min(length, window) for length in (batch.context, batch.prompt_seen))
    read = batch.decoding * context
    decoding = floor_s(Work(read * pair_flops, read * kv_bytes), _speeds(machine))
    return decoding + batch.prompt_rows * seen * pair_flops / (_PROMPT_ATTENTION * machine.speeds.flops_bf16)


def _sparse_s(
    attention: LatentAttentionSpec,
    indexer: IndexerSpec,
    machine: Machine,
    batch: PlannedBatch,
    pair_flops: float,
    kv_bytes: float,
) -> float:
    """Return the seconds of sparse attention: index keys of the whole context, and rows of the selected tokens."""
    index_bytes = attention.index_key_width * INDEX_KEY_ITEMSIZE
    index_flops = 0.0 if indexer.reuses else 2.0 * indexer.num_heads * indexer.head_dim
    chosen, seen = (min(length, indexer.top_k) for length in (batch.context, batch.prompt_seen))
    scored, in_prompts = (length if length > indexer.top_k else 0.0 for length in (batch.context, batch.prompt_seen))
    flops = chosen * pair_flops + scored * index_flops
    moved = chosen * (kv_bytes - index_bytes) + scored * index_bytes
    decoding = floor_s(Work(batch.decoding * flops, batch.decoding * moved), _speeds(machine))
    prompts = batch.prompt_rows * (seen * pair_flops + in_prompts * index_flops)
    return decoding + prompts / (_PROMPT_ATTENTION * machine.speeds.flops_bf16)


def experts_s(
    served: Served, ffn: MoeSpec, hidden_size: int, machine: Machine, stage_rows: float, shape: Shape
) -> float:
    """Return seconds of a layer's experts on the rank with the most rows; routing is even but for `balancedness`."""
    routing, hidden_size = ffn.routing, ffn.input_width(hidden_size)
    skew = shape.balancedness if shape.ep > 1 else 1.0
    pairs = stage_rows * routing.top_k * ffn.num_held / routing.num_experts / skew
    if pairs <= 0:
        return 0.0
    top_k = min(ffn.num_held, max(1, round(routing.top_k * ffn.num_held / routing.num_experts)))
    tokens = max(1, round(pairs / top_k))
    if not machine.tiled:
        active = expected_active(ffn.num_held, top_k, tokens)
        numel = (ffn.activation.num_inputs + 1) * hidden_size * ffn.width
        moved = active * numel * _expert_itemsize(served) + 2 * pairs * (hidden_size + ffn.width) * _ITEM_BYTES
        return floor_s(Work(2.0 * pairs * numel, moved), _speeds(machine))
    weights, scales = _kind(served)
    problem = Problem(ffn.num_held, top_k, hidden_size, ffn.width, tokens, weights=weights, scales=scales)
    return seconds(problem, choose(problem, machine.speeds), machine.speeds)


def has_kernel(served: Served, ffn: MoeSpec, hidden_size: int, machine: Machine) -> bool:
    """Return whether the grouped GEMM has tiles for experts of a rank's width."""
    weights, scales = _kind(served)
    problem = Problem(ffn.num_held, 1, ffn.input_width(hidden_size), ffn.width, 64, weights=weights, scales=scales)
    return not machine.tiled or bool(candidates(problem, machine.speeds))


def _kind(served: Served) -> tuple[Weights, Scales]:
    form = served.form
    if form is None:
        return "wide", "none"
    if form.bits == 4:
        return ("mxfp4" if form.floating else "int4"), "group"
    return ("fp8" if form.floating else "int8"), ("row" if form.group is None else "block")


def _expert_itemsize(served: Served) -> float:
    form = served.form
    if form is None:
        return _ITEM_BYTES
    return form.bits / 8 + (0 if form.group is None else 4 * form.num_scales(form.group) / form.group)


def _dense_itemsize(served: Served) -> float:
    form = served.form
    only_experts = form is not None and form.of_experts_only
    return _ITEM_BYTES if only_experts else _expert_itemsize(served)


def _speeds(machine: Machine) -> Speeds:
    return Speeds(machine.reached * machine.speeds.memory_bytes_per_s, machine.reached * machine.speeds.flops_bf16)


# ── between ranks ──


def sum_s(num_bytes: float, ranks: int, network: GpuNetwork) -> float:
    """Return the seconds of an all-reduce over neighbouring ranks.

    It scatters and gathers inside a host, and reduces parts between hosts.
    """
    if ranks == 1:
        return 0.0
    inside = min(ranks, network.node_gpus)
    hosts = -(-ranks // network.node_gpus)
    time = _ring_s(num_bytes, inside, network.inside)
    return time + _ring_s(num_bytes / inside, hosts, network.across)


def _ring_s(num_bytes: float, ranks: int, link: Link) -> float:
    if ranks == 1:
        return 0.0
    return 2 * (num_bytes * (ranks - 1) / ranks / link.bytes_per_s + link.latency_s)


def exchange_s(served: Served, ffn: MoeSpec, rows: float, hidden_size: int, ranks: int, network: GpuNetwork) -> float:
    """Return the seconds of dispatch and combine of a rank's rows.

    One copy goes to each rank that has a chosen expert, in 8 bits if the weights are float8, and returns in bf16.
    """
    itemsize = 1.0 if served.form is not None and served.form.is_float8 else float(_ITEM_BYTES)
    both_ways = (itemsize, float(_ITEM_BYTES))
    return sum(dispatch_s(rows, hidden_size * size, ffn.routing.top_k, ranks, network) for size in both_ways)


def dispatch_s(rows: float, row_bytes: float, top_k: int, ranks: int, network: GpuNetwork) -> float:
    """Return the seconds of one direction.

    Rows that stay on the rank cost nothing; both kinds of links work in parallel.
    """
    if ranks == 1:
        return 0.0
    copies = ranks * (1 - (1 - 1 / ranks) ** top_k)
    neighbours = min(ranks, network.node_gpus) - 1
    inside_s = rows * copies * row_bytes * neighbours / ranks / network.inside.bytes_per_s
    if neighbours + 1 == ranks:
        return inside_s + network.inside.latency_s
    across_s = rows * copies * row_bytes * (ranks - 1 - neighbours) / ranks / network.across.bytes_per_s
    return max(inside_s, across_s) + network.across.latency_s


def context_exchange_s(
    attention: AttentionSpec | LatentAttentionSpec | RecurrentSpec, rows: float, dcp: int, network: GpuNetwork
) -> float:
    """Return the seconds of a layer's gather of queries and exchange of partial results among `dcp` ranks.

    Partial results and their LSE are float32.
    """
    if dcp == 1 or isinstance(attention, RecurrentSpec):
        return 0.0
    link = network.inside if dcp <= network.node_gpus else network.across
    if isinstance(attention, LatentAttentionSpec):
        width, value_width = attention.latent_width + attention.rope.rotary_width, attention.latent_width
    else:
        width, value_width = attention.head_dim, attention.value_width
    num_bytes = rows * (dcp - 1) * attention.num_heads * (width * _ITEM_BYTES + 4 * (value_width + 1))
    return num_bytes / link.bytes_per_s + 2 * link.latency_s


def shared_cache_s(kv_bytes: float, rows: float, shape: Shape, network: GpuNetwork) -> float:
    """Return the seconds of a layer's all-gather of the keys and values of a step, `rows` tokens on each rank.

    A rank receives the rows of all other groups, from other hosts by its own port.
    """
    if shape.pcp == 1 or not kv_bytes:
        return 0.0
    neighbours = min(shape.pcp, max(1, network.node_gpus // shape.tp)) - 1
    inside_s = neighbours * rows * kv_bytes / network.inside.bytes_per_s
    if neighbours + 1 == shape.pcp:
        return inside_s + network.inside.latency_s
    across_s = (shape.pcp - 1 - neighbours) * rows * kv_bytes / network.across.bytes_per_s
    return max(inside_s, across_s) + network.across.latency_s


def send_s(num_bytes: float, stage_ranks: int, network: GpuNetwork) -> float:
    """Return the seconds to send activations to the next stage, which is on another host where a stage fills a host."""
    link = network.across if stage_ranks >= network.node_gpus else network.inside
    return num_bytes / link.bytes_per_s + link.latency_s
