"""Loading of a decoder's weights from a checkpoint's safetensors files; errors name the tensors.

`names` maps tensors on disk to parts of weights; `checkpoint_formats` defines how quantized tensors are read.
"""

from __future__ import annotations

import json
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import structlog
import torch
from safetensors import SafetensorError, safe_open

from moiety_engine.distribution.layout import SINGLE_RANK, RankPosition
from moiety_engine.model.checkpoint_formats.gguf_file import GgufTensorFile
from moiety_engine.model.checkpoint_formats.tensor_source import as_it_is, sources
from moiety_engine.model.direct_read import DirectRead
from moiety_engine.model.errors import WeightsError
from moiety_engine.model.families import kv_cache_scheme, stored_quantization
from moiety_engine.model.names import ignorable, placements, root_and_embedding
from moiety_engine.model.names.tensor_mapping import TensorMapping
from moiety_engine.model.offloading import expert_names
from moiety_engine.model.quantization_formats import KV_SCALES, refuse_by_tensors
from moiety_engine.model.stored_precision import StoredPrecision
from moiety_engine.model.tensor_shards import own_places, own_spec, whole_places
from moiety_engine.model.weight_quantizer import WeightQuantizer, products_among
from moiety_engine.model.weights import ModelWeights, allocate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

    from moiety_engine.model.checkpoint_formats.tensor_source import TensorSource
    from moiety_engine.model.names.tensor_mapping import Chosen, Shares
    from moiety_engine.model.offloading import Offloading
    from moiety_engine.model.spec import ModelSpec
    from moiety_kernels.quantization import WeightFormat

log = structlog.get_logger()

MAX_NAMES_SHOWN = 8
GGUF = ".gguf"


def load(
    folder: Path,
    spec: ModelSpec,
    *,
    device: torch.device,
    dtype: torch.dtype,
    form: WeightFormat | None = None,
    rank_position: RankPosition = SINGLE_RANK,
    offloading: Offloading | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ModelWeights:
    """Read the checkpoint's safetensors files into newly allocated weights.

    `form`: quantization format of the products, if any. Files are memory-mapped, except tensors that go to host memory
    unchanged. Of a model over several ranks, only the part of the rank at `rank_position` is read. With `offloading`
    the products of experts go to its store; if the store is complete already, they are not read.

    `progress` is called with (bytes read, bytes in all). Raises WeightsError, naming the tensors, if one is missing,
    unexpected or of another shape.
    """
    shards = shard_paths(folder)
    total = sum(path.stat().st_size for path in shards)
    filled_on = device if form is None else torch.device("cpu")
    as_stored = form is not None and form.is_stored_as(spec.weight_format)
    # bfloat16 represents mxfp4 exactly, and other formats that are kept as stored are not filled in here
    exactly = dtype if form is None or as_stored else torch.float32
    own = own_spec(spec, rank_position)
    filling = offloading if offloading is not None and not offloading.is_whole else None
    experts_in = filling.store.empty if filling is not None and form is None else None
    weights = allocate(own, device=filled_on, dtype=dtype, product_dtype=exactly, experts_in=experts_in)
    shard_of = tensor_files(folder)
    _note_kv_scales(folder, shard_of)
    found = sources(shard_of, stored_quantization(folder))
    refuse_by_tensors(folder, found.keys() & shard_of.keys())
    wholes = placements(spec, weights, set(found)) if own is spec else whole_places(spec, set(found))
    zeros = _check_names(wholes, found, shard_of, spec, folder)
    wanted = (
        wholes
        if own is spec
        else own_places(own, weights, rank_position, rank_position.layers_of(len(spec.layers)).start, wholes)
    )
    wanted = _filled_with_zeros(wanted, zeros)
    if offloading is not None and offloading.is_whole:
        stored = expert_names(weights, wanted)
        wanted = {name: place for name, place in wanted.items() if name not in stored}
    fewer_bits = None
    if form is not None:
        groups_of = _groups_of_inputs(wanted, found, shard_of) if as_stored else {}
        fewer_bits = _fewer_bits(
            (spec, own, rank_position, form), weights, wanted, found, groups_of, device, offloading
        )
    _note_widened(wanted.keys(), found, dtype)
    starting_at = {found[name].names[0]: name for name in wanted}
    done, direct = 0, DirectRead()
    for path in shards:
        with open_tensors(path) as file:
            for start in file.keys():  # noqa: SIM118 - not a mapping
                name = starting_at.get(start)
                if name is None or shard_of[start] != path:
                    continue
                unchanged = fewer_bits is None and found[name].make is as_it_is
                if unchanged and direct.take(path, start, wanted[name]):
                    continue
                of_one = ((part, shard_of[part]) for part in found[name].names)
                parts = [file.get_tensor(part) if where == path else _tensor(where, part) for part, where in of_one]
                _fill_one(name, wanted[name], found[name], parts, f"{name} in {path}", fewer_bits)
                done += sum(part.numel() * part.element_size() for part in parts)
                if progress is not None:
                    progress(min(done, total), total)
    for num_bytes in direct.read(torch.get_num_threads()):
        done += num_bytes
        if progress is not None:
            progress(min(done, total), total)
    if progress is not None:
        progress(total, total)
    return weights if fewer_bits is None else fewer_bits.finish(dtype)


def _check_extra(
    extra: list[str],
    wholes: Mapping[str, TensorMapping | Shares],
    spec: ModelSpec,
    folder: Path,
    shard_of: Mapping[str, Path],
) -> None:
    """Raise WeightsError for tensors of the decoder that no weight uses; log the others, which belong to other models.

    Biases that are zero, which older GPTQ tools write for every matrix, are left out too.
    """
    extra = [name for name in extra if not ignorable(name, spec)]
    root, _ = root_and_embedding(wholes)
    layer = re.compile(re.escape(root) + r"layers\.(\d+)\.")
    own = []
    for name in extra:
        match = layer.match(name)
        if not name.startswith(root) or (match is not None and int(match[1]) >= spec.num_stored_layers):
            continue
        is_bias = name.endswith(".bias") and f"{name.removesuffix('bias')}weight" in wholes
        if not (is_bias and name in shard_of and not bool(_tensor(shard_of[name], name).any())):
            own.append(name)
    _complain("has unexpected", own, folder)
    if extra:
        log.info("tensors_ignored", first=extra[0], num_tensors=len(extra), reason="the model has no such part")


def _note_kv_scales(folder: Path, names: Iterable[str]) -> None:
    """Log that KV cache scales are ignored, if the checkpoint has any or configures a quantized KV cache."""
    scales, scheme = sorted(name for name in names if name.endswith(KV_SCALES)), kv_cache_scheme(folder)
    if scales or scheme:
        advice = "--kv-dtype sets the format of keys and values; in 8 bits each gets its own scale"
        log.info(
            "kv_scales_ignored", first=next(iter(scales), None), num_tensors=len(scales), scheme=scheme, advice=advice
        )


def _note_widened(names: Iterable[str], found: dict[str, TensorSource], dtype: torch.dtype) -> None:
    """Log the tensors that are dequantized because their format is not that of the checkpoint's products."""
    formats: dict[str, list[str]] = {}
    for name in sorted(names):
        if found[name].widened:
            formats.setdefault(found[name].widened, []).append(name)
    for kept, some in formats.items():
        why = "only products stay quantized, all of them in one format that a kernel reads"
        log.info(
            "checkpoint_widened", stored_as=kept, loaded_as=str(dtype), reason=why, first=some[0], num_tensors=len(some)
        )


def product_names(folder: Path, spec: ModelSpec) -> set[str]:
    """Return the names of the tensors on disk that belong to the large products. Raises WeightsError."""
    names = set(tensor_files(folder))
    weights = allocate(spec, device=torch.device("cpu"), dtype=torch.bfloat16)  # never written, so it uses no memory
    return products_among(weights, placements(spec, weights, names)) & names


def _fewer_bits(
    model: tuple[ModelSpec, ModelSpec, RankPosition, WeightFormat],
    weights: ModelWeights,
    wanted: dict[str, TensorMapping | Shares],
    found: dict[str, TensorSource],
    groups_of: Mapping[str, Tensor | None],
    device: torch.device,
    offloading: Offloading | None,
) -> WeightQuantizer:
    """Return the quantizer of the products.

    It quantizes all products, or, if the format is the stored one, those that are entirely quantized on disk.
    `model`: spec of the whole model, spec of the rank's part, position of the rank, and format of its weights.
    """
    spec, own, rank_position, form = model
    if not form.is_stored_as(spec.weight_format):
        return WeightQuantizer(weights, wanted, form, device, set(), offloading=offloading)
    wide = {name for name in wanted if not found[name].is_narrow}
    if form.of_experts_only:  # rounding reproduces mxfp4 exactly
        return WeightQuantizer(weights, wanted, form, device, wide, offloading=offloading)
    kept = StoredPrecision(spec, own, rank_position, weights, form, set(found), groups_of)
    narrow, products = (name for name in wanted if found[name].is_narrow), products_among(weights, wanted)
    others = {name: reason for name in narrow if (reason := kept.obstacle(name)) is not None}
    for reason in sorted(set(others.values())):
        if names := sorted(name for name in others.keys() & products if others[name] == reason):
            log.info("checkpoint_widened", stored_as=form.name, reason=reason, first=names[0], num_tensors=len(names))
    wide |= others.keys()
    return WeightQuantizer(weights, wanted, form, device, wide, kept, offloading)


def _groups_of_inputs(
    wanted: Iterable[str], found: Mapping[str, TensorSource], shard_of: Mapping[str, Path]
) -> dict[str, Tensor | None]:
    """Return the group of each input of quantized tensors, by their names; None if groups are in order."""
    groups_of: dict[str, Tensor | None] = {name: None for name in wanted if found[name].is_narrow}
    names = {name: found[name].order for name in groups_of if found[name].order}
    for path in sorted({shard_of[order] for order in names.values()}):
        with open_tensors(path) as file:
            groups_of |= {name: file.get_tensor(order) for name, order in names.items() if shard_of[order] == path}
    return groups_of


def _fill_one(
    name: str,
    place: TensorMapping | Shares,
    source: TensorSource,
    parts: list[Tensor],
    what: str,
    fewer_bits: WeightQuantizer | None,
) -> None:
    if isinstance(place, TensorMapping) and place.chosen is not None:
        parts = [part if part.numel() == 1 else _chosen(place.chosen, part, what) for part in parts]
    both = None if fewer_bits is None else fewer_bits.places(name, place)
    if both is None or source.keep is None:
        _fill(place, _made(source.make, parts, what), what)
    else:
        for target, tensor in zip(both, _made(source.keep, parts, what), strict=True):
            _fill(target, tensor, what)
    if fewer_bits is not None:
        fewer_bits.filled(place)


def _made(make: Callable[..., Any], parts: list[Tensor], what: str) -> Any:
    try:
        return make(*parts)
    except (RuntimeError, ValueError, IndexError) as exc:
        shapes = ", ".join(str(tuple(part.shape)) for part in parts)
        raise WeightsError(f"{what} is stored in parts of shapes {shapes}, which do not fit together: {exc}") from exc


def _chosen(chosen: Chosen, stack: Tensor, what: str) -> Tensor:
    """Return the chosen experts of a stack of stored tensors."""
    if stack.shape[:1] != (chosen.among,):
        raise WeightsError(
            f"{what} has shape {tuple(stack.shape)}, but config.json requires {chosen.among} experts; the "
            "weights and config.json belong to different models"
        )
    return stack[chosen.which]


def _fill(place: TensorMapping | Shares, source: Tensor, what: str) -> None:
    if source.shape != place.shape and isinstance(place, TensorMapping) and place.takes_transposed:
        source = source.mT
    if source.shape != place.shape:
        raise WeightsError(
            f"{what} has shape {tuple(source.shape)}, but config.json requires {place.shape}; the weights "
            "and config.json belong to different models"
        )
    place.fill(source)


def _tensor(path: Path, name: str) -> Tensor:
    with open_tensors(path) as file:
        tensor: Tensor = file.get_tensor(name)
    return tensor


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """Open a file of a checkpoint: its `keys()` are the tensors' names, `get_tensor` reads one by memory map."""
    if path.suffix == GGUF:
        yield GgufTensorFile(path)
        return
    with safe_open(path, framework="pt") as file:
        yield file


def shard_paths(folder: Path) -> list[Path]:
    """Return the files with the checkpoint's tensors; of a GGUF model's files only the first. Raises WeightsError."""
    index = _index(folder)
    if index:
        paths = sorted(set(index.values()))
        _complain("lacks the file", [str(path) for path in paths if not path.is_file()], folder)
        return paths
    single = folder / "model.safetensors"
    if not single.is_file():
        in_gguf = sorted(folder.glob(f"*{GGUF}"))[:1]
        if in_gguf:
            return in_gguf
        raise WeightsError(f"{folder} holds neither model.safetensors nor model.safetensors.index.json")
    return [single]


def tensor_files(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor: of several the one that the index names, or else the first.

    Raises WeightsError.
    """
    index = _index(folder)
    found: dict[str, Path] = {}
    for path in shard_paths(folder):
        found |= {name: path for name in _names(path) if name not in found or index.get(name, path) == path}
    return found


def _index(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor in the index; empty if there is no index."""
    path = folder / "model.safetensors.index.json"
    if not path.is_file():
        return {}
    try:
        return {
            name: folder / file for name, file in json.loads(path.read_text(encoding="utf-8"))["weight_map"].items()
        }
    except (ValueError, KeyError, AttributeError, TypeError) as exc:
        raise WeightsError(f"{path} is not an index of safetensors shards: {exc}") from exc


def _names(path: Path) -> list[str]:
    try:
        with open_tensors(path) as file:
            return list(file.keys())
    except SafetensorError as exc:
        raise WeightsError(f"{path} is not a complete safetensors file ({exc}); download it again") from exc


def check_tensor_names(folder: Path, spec: ModelSpec) -> None:
    """Check that the checkpoint has all tensors of the model and no unexpected ones, without reading any.

    Raises WeightsError.
    """
    shard_of = tensor_files(folder)
    found = sources(shard_of, stored_quantization(folder))
    refuse_by_tensors(folder, found.keys() & shard_of.keys())
    _check_names(whole_places(spec, set(found)), found, shard_of, spec, folder)


def _check_names(
    wholes: Mapping[str, TensorMapping | Shares],
    found: Mapping[str, TensorSource],
    shard_of: Mapping[str, Path],
    spec: ModelSpec,
    folder: Path,
) -> set[str]:
    """Return the names of tensors that the checkpoint lacks and that are zero then.

    Raises WeightsError if other tensors are missing, or if tensors are unexpected.
    """
    zeros = {name for name in wholes.keys() - found.keys() if name.endswith(spec.zero_if_absent)}
    _complain("lacks", sorted(wholes.keys() - found.keys() - zeros), folder)
    parts_on_disk = {part for name in wholes.keys() - zeros for part in found[name].names}
    _complain("lacks", sorted(parts_on_disk - shard_of.keys()), folder)
    _check_extra(sorted(found.keys() - wholes.keys()), wholes, spec, folder, shard_of)
    return zeros


def _filled_with_zeros(
    wanted: dict[str, TensorMapping | Shares], absent: set[str]
) -> dict[str, TensorMapping | Shares]:
    """Fill the weights of absent tensors with zeros, and return the mappings of the other tensors."""
    for name in absent & wanted.keys():
        wanted[name].fill(torch.zeros(wanted[name].shape))
    return {name: place for name, place in wanted.items() if name not in absent}


def _complain(how: str, names: list[str], folder: Path) -> None:
    if names:
        more = f" and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else ""
        raise WeightsError(
            f"the checkpoint in {folder} {how} {', '.join(names[:MAX_NAMES_SHOWN])}{more}; "
            "its files and its config.json do not belong together"
        )
