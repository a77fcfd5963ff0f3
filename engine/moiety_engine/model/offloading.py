"""Expert offloading of a model: the weights to store, the kind of store, and the memory budget of the expert cache.

With several ranks each rank offloads the experts that it holds, to a store of its own and with its own cache.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from moiety_engine.checkpoint import fingerprint, weight_files
from moiety_engine.config import Offload
from moiety_engine.distribution.layout import SINGLE_RANK
from moiety_engine.errors import InvalidConfig
from moiety_engine.model.names.tensor_mapping import addresses
from moiety_engine.model.spec import MoeSpec
from moiety_engine.model.tensor_shards import own_spec
from moiety_engine.model.weights import LayerWeights, ModelWeights, MoeWeights, allocate
from moiety_engine.offload.cache import ExpertCache, slots_a_layer
from moiety_engine.offload.file import ExpertFile
from moiety_engine.offload.pinned import PinnedExperts
from moiety_kernels.quantization import QuantizedWeight
from moiety_wire.engine_choices import LoadFormat

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from moiety_engine.config import OffloadConfig
    from moiety_engine.distribution.layout import RankPosition
    from moiety_engine.memory import Memory
    from moiety_engine.model.names.tensor_mapping import Shares, TensorMapping
    from moiety_engine.model.spec import ModelSpec
    from moiety_engine.offload.cache import Store
    from moiety_kernels.quantization import Weight, WeightFormat

_SCALES, _ORDER = "_scales", "_order"  # suffixes to the name of a quantized weight


class Offloading:
    """Owner of the store of a model's experts while its checkpoint is read. `keep` moves finished weights there."""

    def __init__(self, store: Store) -> None:
        self.store = store

    @property
    def is_whole(self) -> bool:
        """Return whether the store already holds all experts from an earlier start."""
        return self.store.is_whole

    def keep(self, weight: Weight) -> Weight:
        """Move a weight to the store, release its old memory, and return the stored weight."""
        if isinstance(weight, QuantizedWeight):
            order = None if weight.order_K is None else self._keep(weight.order_K)
            return QuantizedWeight(self._keep(weight.values_NK), self._keep(weight.scales_NG), weight.format, order)
        return self._keep(weight)

    def _keep(self, tensor: Tensor) -> Tensor:
        if self.store.holds(tensor):
            return tensor
        kept = self.store.empty(tuple(tensor.shape), tensor.dtype)
        kept.copy_(tensor)
        tensor.untyped_storage().resize_(0)
        return kept

    def cache(
        self, weights: ModelWeights, form: WeightFormat | None, budget_bytes: int, top_k: int, config: OffloadConfig
    ) -> tuple[ModelWeights, ExpertCache]:
        """Finish the store; return the weights with cache slots in place of experts, and the cache.

        The budget determines the number of slots. `form`: format of quantized experts. `top_k`: most experts of the
        rank that a token needs. Raises InvalidConfig.
        """
        mixtures = [layer.ffn for layer in weights.layers if isinstance(layer.ffn, MoeWeights)]
        if not self.is_whole:
            self.store.finish([{name: self._keep(part) for name, part in _parts(one)} for one in mixtures])
        cache = ExpertCache(self.store, budget_bytes, top_k, weights.embedding_VD.device, config)
        slots = iter(cache.slots)
        layers = tuple(_with_slots(layer, slots, form) for layer in weights.layers)
        return replace(weights, layers=layers), cache


def open_store(
    settings: OffloadConfig,
    folder: Path,
    spec: ModelSpec,
    where: torch.device,
    made_of: str,
    load_format: LoadFormat,
    rank_position: RankPosition = SINGLE_RANK,
) -> Offloading | None:
    """Open the store for the rank's experts of the checkpoint in `folder`.

    Returns None if experts are not offloaded, or if the rank has none. `spec`: that of the whole model. `made_of`: type
    and format of the weights. Raises InvalidConfig.
    """
    if settings.what is Offload.NONE:
        return None
    if not spec.moe_layers:
        raise InvalidConfig(f"a {spec.family} model has no experts to offload: leave out --offload")
    if spec.has_zero_experts:
        raise InvalidConfig(f"--offload is not available for {spec.family}, some of whose experts have no weights")
    if load_format is LoadFormat.DUMMY:
        raise InvalidConfig("random weights are not offloaded: leave out --load-format or --offload")
    own = own_spec(spec, rank_position)
    if not own.moe_layers or not _mixture(own).num_held:
        return None
    if where.type == "cuda":
        if settings.folder:
            raise InvalidConfig("with a GPU, offloaded experts are kept in host memory: leave out --offload-folder")
        return Offloading(PinnedExperts())
    if not settings.folder:
        raise InvalidConfig(
            "without a GPU, offloaded experts are kept in a file of the size of all experts: set "
            "--offload-folder to a folder on a disk that is not memory"
        )
    if not hasattr(os, "posix_fallocate"):
        raise InvalidConfig("expert offloading to a file is available on Linux only: leave out --offload")
    key = _key(folder, made_of + _part_of(own, rank_position))
    return Offloading(ExpertFile(Path(settings.folder).expanduser(), key))


def _part_of(own: ModelSpec, rank_position: RankPosition) -> str:
    """Return a description of the rank's part of the experts, which no rank with other experts has."""
    if rank_position.layout.num_ranks == 1:
        return ""
    stage, held = f"{rank_position.pp_rank} of {rank_position.layout.pp}", _mixture(own).held
    stage = "all" if rank_position.expert_rank is not None else stage
    return f" stage {stage}, experts {held}, shard {rank_position.cut_rank} of {rank_position.expert_cuts}"


def _key(folder: Path, made_of: str) -> str:
    """Return the key of an expert file: a digest of the checkpoint's fingerprint, weight format, path and file times.

    The times are included because the fingerprint covers little of the files' contents.
    """
    digest = hashlib.sha256(f"{fingerprint(folder)} {made_of} {folder.resolve()}".encode())
    for path in weight_files(folder):
        digest.update(f"{path.name} {path.stat().st_mtime_ns}".encode())
    return digest.hexdigest()[:24]


def budget(
    settings: OffloadConfig,
    spec: ModelSpec,
    dtype: torch.dtype,
    form: WeightFormat | None,
    all_bytes: int,
    memory: Memory,
) -> tuple[int, int]:
    """Return (bytes of device memory for expert slots, bytes of all experts) on a rank.

    `spec`: that of the rank's part of the model, which takes `all_bytes`. `memory`: that of the rank. Raises
    InvalidConfig if the experts of one token would not fit.
    """
    one_each = _expert_bytes(spec, dtype, form)
    experts_bytes = sum(one_each) * _mixture(spec).num_held
    given = settings.memory_bytes
    if given is None:
        given = max(0, memory.free_bytes - (all_bytes - experts_bytes)) // 2
    slots = slots_a_layer(given, one_each, _mixture(spec).num_held, most_chosen(spec))
    return sum(one_each) * slots, experts_bytes


def most_chosen(spec: ModelSpec) -> int:
    """Return the most experts of this rank that a token needs."""
    mixture = _mixture(spec)
    return min(mixture.routing.top_k, mixture.num_held)


def _mixture(spec: ModelSpec) -> MoeSpec:
    """Return the spec of the first MoE layer; all MoE layers have the same."""
    ffn = spec.layers[spec.moe_layers[0]].ffn
    assert isinstance(ffn, MoeSpec)
    return ffn


def _expert_bytes(spec: ModelSpec, dtype: torch.dtype, form: WeightFormat | None) -> list[int]:
    """Return the bytes of one expert of each MoE layer, biases included."""
    weights = allocate(spec, device=torch.device("meta"), dtype=dtype)
    mixtures = [layer.ffn for layer in weights.layers if isinstance(layer.ffn, MoeWeights)]
    return [
        sum(_bytes(part, form if part.dim() > 2 else None) for _, part in _parts(one)) // _mixture(spec).num_held
        for one in mixtures
    ]


def expert_names(weights: ModelWeights, places: Mapping[str, TensorMapping | Shares]) -> set[str]:
    """Return the names of the tensors on disk that belong to experts, biases included."""
    mixtures = (layer.ffn for layer in weights.layers if isinstance(layer.ffn, MoeWeights))
    own = {part.untyped_storage().data_ptr() for one in mixtures for _, part in _parts(one)}
    return {name for name, place in places.items() if addresses(place) & own}


def _parts(weights: MoeWeights) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors of a layer's experts; each tensor has one expert per row."""
    for name, weight in (("gate_up", weights.gate_up_E2FD), ("down", weights.down_EDF)):
        if isinstance(weight, QuantizedWeight):
            yield name, weight.values_NK
            yield name + _SCALES, weight.scales_NG
            if weight.order_K is not None:
                yield name + _ORDER, weight.order_K
        else:
            yield name, weight
    for name, bias in (("gate_up_bias", weights.gate_up_bias_E2F), ("down_bias", weights.down_bias_ED)):
        if bias is not None:
            yield name, bias


def _with_slots(layer: LayerWeights, slots: Iterator[dict[str, Tensor]], form: WeightFormat | None) -> LayerWeights:
    if not isinstance(layer.ffn, MoeWeights):
        return layer
    parts = next(slots)

    def weight(name: str) -> Weight:
        if name + _SCALES not in parts:
            return parts[name]
        assert form is not None, "scales without a format"
        return QuantizedWeight(parts[name], parts[name + _SCALES], form, parts.get(name + _ORDER))

    ffn = replace(
        layer.ffn,
        gate_up_E2FD=weight("gate_up"),
        down_EDF=weight("down"),
        gate_up_bias_E2F=parts.get("gate_up_bias"),
        down_bias_ED=parts.get("down_bias"),
    )
    return replace(layer, ffn=ffn)


def _bytes(part: Tensor, form: WeightFormat | None) -> int:
    if form is None:
        return part.nbytes
    rows, width = part.numel() // part.shape[-1], part.shape[-1]
    orders = 4 * part.shape[0] * width if form.ordered else 0
    return orders + rows * (width * form.bits // 8 + 4 * form.num_scales(width))
