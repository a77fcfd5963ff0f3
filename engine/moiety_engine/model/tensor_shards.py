"""Sharding of a model over ranks: the spec of one rank's part, and the shards of a checkpoint's tensors that fill it.

A rank has some attention heads, some columns of each feed-forward and of the vocabulary, and some experts or shards of
experts. Its weights match its own spec, so the code that computes with them is independent of other ranks. The cut of a
tensor follows from its whole shape and the shape of the rank's part.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from moiety_engine.distribution.layout import RankPosition, divide
from moiety_engine.errors import InvalidConfig
from moiety_engine.model.attention_options import DividedNormSpec
from moiety_engine.model.context_parallel import require_shared_cache, require_shared_positions
from moiety_engine.model.conv_attention_spec import ConvAttentionSpec
from moiety_engine.model.names import placements
from moiety_engine.model.names.tensor_mapping import Chosen, Shares, TensorMapping
from moiety_engine.model.recurrent_specs import RecurrentSpec
from moiety_engine.model.routed_attention_spec import RoutedAttentionSpec
from moiety_engine.model.spec import AttentionSpec, LatentAttentionSpec, LayerSpec, ModelSpec, MoeSpec
from moiety_engine.model.weights import ModelWeights, allocate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from moiety_engine.distribution.layout import Layout
    from moiety_engine.model.spec import DenseSpec
    from moiety_kernels.quantization import WeightFormat

_EXPERT = re.compile(r"\bexperts\.(\d+)\.")
_LAYER = re.compile(r"(?:\blayers|\btransformer\.blocks)\.(-?\d+)\.")
# JetMoe has experts of attention, too, of which each rank has a part of the heads of all.
_EXPERT_TENSOR = re.compile(
    r"(?<!\bself_attention\.)\bexperts\.(?!e_score)|\b(?:block_sparse_moe|mlp)\.(?:input|output)_linear\."
)
_HALVES = re.compile(
    r"\b(?:experts\.gate_up_proj|experts\.fc1\.weight|(?:block_sparse_moe|mlp)\.input_linear\.weight)$"
)  # rows of gate, then as many rows of up
_BIAS_OF_EXPERTS = "mlp.bias"  # that all experts of a layer have
_BIAS_OF_ROUTERS = "gate.down_proj.bias"  # of a router with hidden layers, which every rank computes whole
_MAX_PIECES = 64  # largest number of pieces that an error message suggests
_ADDED_ONCE = (
    "o_proj.bias",
    "attention.dense.bias",
    "mamba.out_proj.bias",
    "mixer.out_proj.bias",
    "conv.out_proj.bias",
    "down_proj.bias",
    "down_proj_bias",
    "self_attention.experts.bias",
    _BIAS_OF_EXPERTS,
)  # biases of sums over ranks: only one rank adds them


def own_spec(spec: ModelSpec, rank_position: RankPosition) -> ModelSpec:
    """Return the spec of the rank's part of the model. Raises InvalidConfig if the model cannot be divided that way."""
    if rank_position.layout.num_ranks == 1:
        return spec
    tp = rank_position.layout.tp
    if tp * tp > spec.vocab_size:
        raise InvalidConfig(f"a vocabulary of {spec.vocab_size} is too small for --tp {tp}")
    if max(rank_position.layout.ep - 1, rank_position.layout.ffn_ranks) and not (
        spec.moe_layers or rank_position.layout.excluded
    ):
        option = "--ffn-ranks could have" if rank_position.layout.ffn_ranks else "--ep could divide"
        raise InvalidConfig(f"a {spec.family} model has no experts, which {option} needs: leave it out")
    if rank_position.layout.ffn_ranks and spec.has_normed_experts:
        raise InvalidConfig(
            f"--ffn-ranks is not available for {spec.family}, which normalizes the output of experts before anything "
            "is added to it: use --ep or --tp"
        )
    if rank_position.layout.ffn_ranks and spec.has_latent_experts:
        raise InvalidConfig(
            f"--ffn-ranks is not available for this {spec.family} model, whose experts compute in a width of their "
            "own: use --ep or --tp"
        )
    if rank_position.layout.ffn_ranks and spec.defers_experts:
        raise InvalidConfig(
            f"--ffn-ranks is not available for {spec.family}, which adds the output of experts one layer later: use "
            "--ep or --tp"
        )
    has_routers = any(isinstance(one.ffn, MoeSpec) and one.ffn.router_mlp is not None for one in spec.layers)
    if rank_position.layout.ffn_ranks and has_routers:
        raise InvalidConfig(
            f"--ffn-ranks is not available for {spec.family}, whose routers continue those of the layers before: use "
            "--dp-attention with --ep, or --pp, instead"
        )
    require_shared_positions(spec, rank_position.layout)
    require_shared_cache(spec, rank_position.layout)
    if rank_position.layout.pp > len(spec.layers):
        raise InvalidConfig(f"--pp {rank_position.layout.pp} is more than the model's {len(spec.layers)} layers")
    _check_stages(spec, rank_position.layout)
    held = rank_position.layers_of(len(spec.layers))
    layers = tuple(_own_layer(spec.layers[index], rank_position) for index in held)
    starts = tuple(spec.block_starts[index] for index in held) if spec.block_starts else ()
    elsewhere = rank_position.pp_rank or rank_position.expert_rank is not None
    vision = None if rank_position.expert_rank is not None else spec.vision
    rows = 0 if elsewhere else -(-spec.vocab_size // tp)
    return replace(spec, vocab_size=rows, layers=layers, vision=vision, block_starts=starts)


def own_places(
    own: ModelSpec,
    weights: ModelWeights,
    rank_position: RankPosition,
    first_layer: int,
    wholes: Mapping[str, TensorMapping | Shares],
) -> dict[str, TensorMapping | Shares]:
    """Return the mapping of the rank's part of each tensor, by name on disk; tensors without a part here are absent.

    `weights` belong to the `own` spec, whose layers start at index `first_layer` of the model; `wholes` are the
    mappings of whole tensors.
    """
    first_layer = 0 if own.block_starts else first_layer  # these are indices on disk already
    cut: dict[str, TensorMapping | Shares] = {}
    present = {_of_layer(name, -first_layer) for name in wholes}
    for own_name, place in placements(own, weights, present).items():
        if not math.prod(place.shape):
            continue
        name = _of_layer(_of_expert(own, own_name), first_layer)
        assert name not in cut, f"{name} must be cut like its counterpart on the rank"
        cut[name] = _cut(name, place, wholes[name], rank_position)
    return cut


def places_on_rank(
    spec: ModelSpec,
    own: ModelSpec,
    weights: ModelWeights,
    rank_position: RankPosition,
    present: set[str],
    groups: Callable[[int], int] | None = None,
) -> dict[str, TensorMapping | Shares]:
    """Return the mappings like `own_places`, also for a single rank.

    `weights` may have `groups` (of inputs) in place of inputs.
    """
    if own is spec:
        return placements(spec, weights, present)
    first_layer = rank_position.layers_of(len(spec.layers)).start
    return own_places(own, weights, rank_position, first_layer, whole_places(spec, present, groups))


def whole_places(
    spec: ModelSpec, present: set[str], groups: Callable[[int], int] | None = None
) -> dict[str, TensorMapping | Shares]:
    """Return mappings for all names of the model's checkpoint, with whole shapes; they cannot be filled.

    With `groups`, products have that many groups in place of their inputs.
    """
    nowhere = allocate(spec, device=torch.device("meta"), dtype=torch.bfloat16, groups=groups)
    return placements(spec, nowhere, present)


def own_range(full: int, own: int, rank_position: RankPosition, *, of_experts: bool = False) -> slice:
    """Return the rank's range of a dimension of `full` values, of which it has `own`; `of_experts`: of an expert."""
    if of_experts:
        return _range(full, own, rank_position.cut_rank, rank_position.expert_cuts)
    return _range(full, own, rank_position.tp_rank, rank_position.layout.tp)


def check_cuts(form: WeightFormat, spec: ModelSpec, layout: Layout) -> None:
    """Raise InvalidConfig if products in `form` would be cut inside a group with a common scale or inside a pack.

    The layout must divide the model; see `own_spec`.
    """
    for cut in _cuts(spec, layout):
        if (form.of_experts_only and not cut.of_experts) or cut.keeps_whole(form, cut.num_pieces):
            continue
        numbers = (n for n in range(1, min(cut.width, _MAX_PIECES) + 1) if cut.width % n == 0)
        possible = ", ".join(str(n) for n in numbers if cut.keeps_whole(form, n))
        raise InvalidConfig(
            f"{cut.option} {cut.num_pieces} cuts the model's {cut.width} {cut.what} into pieces of "
            f"{cut.width // cut.num_pieces}, but {form.name} needs multiples of "
            f"{math.lcm(form.pack, form.group or 1)}: use one of these numbers of pieces: {possible}; or "
            "use --quantization none"
        )


# ── where products are cut ──


@dataclass(frozen=True, slots=True)
class _Cut:
    """Cut of products' inputs into pieces by an option; for experts also of the outputs of gate and up."""

    what: str
    width: int
    option: str
    num_pieces: int
    of_experts: bool = False

    def keeps_whole(self, form: WeightFormat, num_pieces: int) -> bool:
        """Return whether no piece boundary lies inside a pack or block; float8 blocks may span several whole pieces."""
        piece = self.width // num_pieces
        blocks = [form.group or 1, form.rows if self.of_experts else 1]
        whole = all(piece % block == 0 or (form.is_float8 and block % piece == 0) for block in blocks)
        return num_pieces == 1 or (whole and piece % form.pack == 0)


def _cuts(spec: ModelSpec, layout: Layout) -> Iterator[_Cut]:
    for layer in spec.layers:
        attention, ffn = layer.attention, layer.ffn
        yield _Cut("columns of all heads", attention.output_width, "--tp", layout.tp)
        if ffn is None:
            continue
        if not isinstance(ffn, MoeSpec):
            yield _Cut("columns of a feed-forward", ffn.width, "--tp", layout.tp)
            continue
        yield _Cut(*_cut_experts(ffn, RankPosition(layout)), of_experts=True)
        if ffn.shared is not None:
            yield _Cut("columns of shared experts", ffn.shared.dense.width, "--tp", layout.tp)


def _check_stages(spec: ModelSpec, layout: Layout) -> None:
    """Raise InvalidConfig if a pipeline stage begins with a layer that uses the selection of the stage before it."""
    if layout.pp > 1 and spec.layer_embeddings is not None:
        raise InvalidConfig(
            f"--pp is not available for this {spec.family} model, whose layers add embeddings of each token and read "
            "the keys and values of earlier layers: use --tp instead"
        )
    for stage in range(1, layout.pp):
        first = next(layer for layer in range(len(spec.layers)) if layout.stage_of(layer, len(spec.layers)) == stage)
        if spec.layers[first - 1].defers_experts:
            raise InvalidConfig(
                f"--pp {layout.pp} begins a stage with layer {first}, which adds the output of experts of the stage "
                "before it: use another number of stages, or --tp instead"
            )
        if spec.layers[first].shares_input:
            raise InvalidConfig(
                f"--pp {layout.pp} begins a stage with layer {first}, which reads the input of a layer of the stage "
                "before it: use another number of stages, or --tp instead"
            )
        indexer = getattr(spec.layers[first].attention, "indexer", None)
        if indexer is not None and indexer.reuses:
            raise InvalidConfig(
                f"--pp {layout.pp} begins a stage with layer {first}, which attends to the tokens that a layer of the "
                "stage before it has selected: use another number of stages, or --tp and --ep instead"
            )


def _cut_experts(mixture: MoeSpec, rank_position: RankPosition) -> tuple[str, int, str, int]:
    """Return the cut of experts: the dimension's name, its width, the option, and the number of pieces."""
    option = "ffn-ranks ÷ ep =" if rank_position.layout.ffn_ranks else "dp-attention × tp ÷ ep ="
    return "columns of an expert", mixture.width, option, rank_position.expert_cuts


# ── the rank's own spec ──


def _own_layer(layer: LayerSpec, rank_position: RankPosition) -> LayerSpec:
    attention = _own_attention(layer.attention, rank_position.layout.tp)
    dense = None if layer.ffn is None or isinstance(layer.ffn, MoeSpec) else _own_dense(layer.ffn, rank_position)
    ffn = _own_mixture(layer.ffn, rank_position) if isinstance(layer.ffn, MoeSpec) else dense
    return replace(layer, attention=attention, ffn=ffn, only_experts=rank_position.expert_rank is not None)


def _own_attention(
    attention: AttentionSpec | LatentAttentionSpec | RecurrentSpec, tp: int
) -> AttentionSpec | LatentAttentionSpec | RecurrentSpec:
    if isinstance(attention, ConvAttentionSpec):
        _require_matching_heads(attention.num_kv_heads, tp)
    if not isinstance(attention, AttentionSpec | LatentAttentionSpec):
        heads_of = {name: divide(getattr(attention, name), tp, what, "--tp") for name, what in attention.divided_heads}
        return replace(attention, **heads_of)
    heads = divide(attention.num_heads, tp, "query heads", "--tp")
    if isinstance(attention, LatentAttentionSpec):
        return replace(attention, num_heads=heads)
    num_kv = attention.num_kv_heads
    _require_matching_heads(num_kv, tp)
    if isinstance(attention, RoutedAttentionSpec) and num_kv % tp:
        raise InvalidConfig(
            f"--tp {tp} does not divide the model's {num_kv} key-value heads, of which each expert of attention has a "
            "query: use a divisor"
        )
    divided = DividedNormSpec(max(1, tp // num_kv)) if attention.qk_norm == "full" and tp > 1 else None
    return replace(attention, num_heads=heads, num_kv_heads=max(1, num_kv // tp), divided_norm=divided)


def _require_matching_heads(num_kv: int, tp: int) -> None:
    if num_kv % tp and tp % num_kv:
        raise InvalidConfig(
            f"--tp {tp} and the model's {num_kv} key-value heads do not match: one must divide the other"
        )


def _own_dense(dense: DenseSpec, rank_position: RankPosition) -> DenseSpec:
    return replace(dense, width=divide(dense.width, rank_position.layout.tp, "columns of a feed-forward", "--tp"))


def _own_mixture(mixture: MoeSpec, rank_position: RankPosition) -> MoeSpec:
    shared = mixture.shared
    held = rank_position.slots_of(mixture.num_experts)
    what, width, option, num_pieces = _cut_experts(mixture, rank_position)
    return replace(
        mixture,
        width=divide(width, num_pieces, what, option),
        held=() if rank_position.layout.ffn_ranks and rank_position.expert_rank is None else held,
        shared=None if shared is None else replace(shared, dense=_own_dense(shared.dense, rank_position)),
    )


def _of_layer(name: str, further: int) -> str:
    """Return the tensor name with its layer index increased by `further`."""
    found = _LAYER.search(name)
    if found is None:
        return name
    return f"{name[: found.start(1)]}{int(found[1]) + further}{name[found.end(1) :]}"


def _of_expert(own: ModelSpec, name: str) -> str:
    """Return the name on disk of a tensor of this rank, with the expert's index among all experts."""
    expert, layer = _EXPERT.search(name), _LAYER.search(name)
    if expert is None or layer is None:
        return name
    ffn = own.layers[_place(own, int(layer[1]))].ffn
    assert isinstance(ffn, MoeSpec) and ffn.held is not None
    return f"{name[: expert.start(1)]}{ffn.held[int(expert[1])]}{name[expert.end(1) :]}"


def _place(own: ModelSpec, stored: int) -> int:
    """Return the index, among this rank's layers, of the layer that has the index `stored` in names on disk."""
    if own.mtp_after is not None:
        return 0  # the only layer of an MTP model
    starts = own.block_starts
    return starts.index(stored if stored in starts else stored - 1) if starts else stored


# ── the rank's parts of tensors ──


def _cut(
    name: str, place: TensorMapping | Shares, of_whole: TensorMapping | Shares, rank_position: RankPosition
) -> TensorMapping | Shares:
    """Return the mapping of the rank's part of a tensor with the mapping `of_whole`."""
    whole = of_whole.shape
    of_experts = _EXPERT_TENSOR.search(name) is not None
    index = rank_position.cut_rank if of_experts or name.endswith(_BIAS_OF_EXPERTS) else rank_position.tp_rank
    if index and name.endswith(_ADDED_ONCE) and not name.endswith(_BIAS_OF_ROUTERS):
        return _taking(place, whole, lambda source: torch.zeros(place.shape))
    stacked = of_experts and _EXPERT.search(name) is None
    if place.shape == whole and not stacked:
        return place
    parts = rank_position.expert_cuts if of_experts else rank_position.layout.tp
    if isinstance(place, TensorMapping) and isinstance(of_whole, TensorMapping) and place.sections:
        return _of_sections(place, of_whole, index, parts)
    ranges = [_range(full, own, index, parts) for own, full in zip(place.shape, whole, strict=True)]
    if isinstance(place, TensorMapping) and isinstance(of_whole, TensorMapping) and place.rows_of_expert:
        return _of_joined_experts(place, of_whole, rank_position)
    if stacked:
        assert isinstance(place, TensorMapping)
        return _of_stack(name, place, whole, ranges[1:], rank_position)
    if (
        isinstance(place, TensorMapping) and ranges[0].stop > whole[0]
    ):  # the last ranks' parts of a vocabulary are smaller
        num_rows = max(0, whole[0] - ranges[0].start)
        place = replace(place, view=place.view[:num_rows])
    return _taking(place, whole, lambda source: source[tuple(ranges)])


def _of_sections(place: TensorMapping, of_whole: TensorMapping, index: int, parts: int) -> TensorMapping:
    """Return the mapping of the rank's part of a tensor that joins sections, each of which is cut alone."""
    ranges = [_range(full, own, index, parts) for own, full in zip(place.sections, of_whole.sections, strict=True)]

    def of_each(source: Tensor) -> Tensor:
        sections = torch.split(source, list(of_whole.sections))
        return torch.cat([rows[of_rank] for rows, of_rank in zip(sections, ranges, strict=True)])

    return _part(place, of_whole.shape, of_each)


def _range(full: int, own: int, index: int, parts: int) -> slice:
    """Return the rank's range of a dimension.

    All parts have the same size; if there are more ranks than distinct parts, some ranks have the same part.
    """
    start = index * own if own * (parts - 1) < full else index * full // parts // own * own
    return slice(start, start + own) if own != full else slice(0, full)


def _of_stack(
    name: str, place: TensorMapping, whole: tuple[int, ...], ranges: list[slice], rank_position: RankPosition
) -> TensorMapping:
    """Return the mapping of the rank's part of a tensor that stacks all experts: those that its slots hold."""
    held = rank_position.slots_of(whole[0])
    in_order = held == tuple(range(held[0], held[0] + len(held)))
    chosen = Chosen(slice(held[0], held[0] + len(held)) if in_order else list(held), whole[0])
    width, index = place.shape[1] // 2, rank_position.cut_rank
    columns = slice(index * width, (index + 1) * width)

    def both_halves(source: Tensor) -> Tensor:
        gate, up = source.chunk(2, dim=1)
        return torch.cat((gate[:, columns], up[:, columns]), dim=1)

    def in_ranges(source: Tensor) -> Tensor:
        return source[(slice(None), *ranges)]

    halves = _HALVES.search(name) is not None and place.shape[1] != whole[1]
    part = _part(place, (len(held), *whole[1:]), both_halves if halves else in_ranges)
    return replace(part, chosen=chosen, takes_transposed=place.takes_transposed)


def _of_joined_experts(place: TensorMapping, of_whole: TensorMapping, rank_position: RankPosition) -> TensorMapping:
    """Return the mapping of the rank's part of a tensor that joins the rows of all experts."""
    num_rows, full, own = of_whole.shape[0], of_whole.rows_of_expert, place.rows_of_expert
    first = rank_position.cut_rank * own
    held = rank_position.slots_of(num_rows // full)
    rows = [expert * full + first + row for expert in held for row in range(own)]
    in_order = rows == list(range(rows[0], rows[0] + len(rows)))
    return replace(place, chosen=Chosen(slice(rows[0], rows[-1] + 1) if in_order else rows, num_rows))


def _taking(
    place: TensorMapping | Shares, whole: tuple[int, ...], part: Callable[[Tensor], Tensor]
) -> TensorMapping | Shares:
    """Return `place` changed to take a part of a tensor with the shape `whole`."""
    if isinstance(place, TensorMapping):
        return _part(place, whole, part)
    share = place.divide
    return Shares(place.views, whole, lambda source: share(part(source)))


def _part(place: TensorMapping, whole: tuple[int, ...], part: Callable[[Tensor], Tensor]) -> TensorMapping:
    arrange = place.arrange
    return TensorMapping(place.view, whole, part if arrange is None else lambda source: arrange(part(source)))
