"""Writer of checkpoints whose large products are packed integers or float8.

The formats are `pack-quantized` and `float-quantized` of compressed-tensors, which other engines read too.
"""

from __future__ import annotations

import fcntl
import json
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import structlog
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from moiety_engine.errors import CheckpointError
from moiety_engine.model.checkpoint import product_names, shard_paths, tensor_files
from moiety_engine.model.checkpoint_formats.compressed_tensors import FLOAT_FORMAT, METHOD, PACKED_FORMAT
from moiety_engine.model.checkpoint_formats.integers import SCALES, to_packed
from moiety_engine.model.families import read_spec
from moiety_kernels.quantization.reference import round_to

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import Tensor

    from moiety_kernels.quantization import WeightFormat

DRAFT = ".part"
_UNFINISHED = ".unfinished"
_INDEX = "model.safetensors.index.json"
_WEIGHT = ".weight"

log = structlog.get_logger()


def write_quantized(
    source: Path, target: Path, form: WeightFormat, progress: Callable[[int, int], None]
) -> tuple[int, int]:
    """Write `source`, quantized, to the new folder `target`; return the bytes of tensors (before, after).

    `progress` is called with (bytes done, bytes in all). Raises CheckpointError, or ModelError if `source` cannot be
    read; `target` does not exist then.
    """
    spec = read_spec(source)
    if json.loads((source / "config.json").read_text(encoding="utf-8")).get("quantization_config"):
        raise CheckpointError(f"{source} is quantized already; use the unquantized checkpoint")
    if target.exists():
        raise CheckpointError(f"{target} exists already and is not overwritten; name a new folder")
    shards = shard_paths(source)
    chosen = product_names(source, spec)
    stacked = sorted(name for name in chosen if not name.endswith(_WEIGHT))
    if stacked:
        raise CheckpointError(
            f"{stacked[0]} holds all experts of a layer in one tensor, which the written format does not "
            f"support; load the checkpoint with --quantization {form.name} instead"
        )
    draft = target.with_name(target.name + DRAFT)
    try:
        with _begun(draft):
            try:
                sizes = _write(source, draft, shards, chosen, form, progress)
                (draft / _UNFINISHED).unlink()
                draft.rename(target)
            except BaseException:
                shutil.rmtree(draft, ignore_errors=True)
                raise
    except (OSError, SafetensorError) as exc:
        raise CheckpointError(
            f"{target} cannot be written ({exc}); check free space and permissions, or use another folder"
        ) from exc
    return sizes


@contextmanager
def _begun(draft: Path) -> Iterator[None]:
    """Hold the draft folder, empty except for a marker file that stays locked for the duration.

    Deletes the files that a killed run left there. Raises CheckpointError or OSError.
    """
    if draft.exists() and not (draft / _UNFINISHED).is_file():
        raise CheckpointError(f"{draft} exists and was not left by an earlier run; move it away")
    draft.mkdir(parents=True, exist_ok=True)
    with (draft / _UNFINISHED).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise CheckpointError(f"{draft} is being written by another run; wait for that run, or end it") from exc
        left = [path for path in draft.iterdir() if path.name != _UNFINISHED]
        if left:
            log.warning(
                "quantization_restarted", folder=str(draft), reason="an earlier run was killed", num_files=len(left)
            )
        for path in left:
            path.unlink()
        yield


def _write(
    source: Path, target: Path, shards: list[Path], chosen: set[str], form: WeightFormat,
    progress: Callable[[int, int], None],
) -> tuple[int, int]:  # fmt: skip
    for path in source.iterdir():
        if path.is_file() and path.suffix != ".safetensors" and path.name != _INDEX:
            shutil.copyfile(path, target / path.name)
    total, done, after = sum(path.stat().st_size for path in shards), 0, 0
    shard_of: dict[str, str] = {}
    kept: set[str] = set()
    file_of = tensor_files(source)
    for path in shards:
        written: dict[str, Tensor] = {}
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                if file_of[name] != path:
                    continue
                tensor = file.get_tensor(name)
                if name in chosen:
                    written |= {name + end: part for end, part in _packed(tensor, form).items()}
                else:
                    written[name] = tensor
                    kept.add(name)
                done += tensor.numel() * tensor.element_size()
                progress(min(done, total), total)
        save_file(written, target / path.name, metadata={"format": "pt"})
        shard_of |= dict.fromkeys(written, path.name)
        after += sum(part.numel() * part.element_size() for part in written.values())
    if len(shards) > 1 or shards[0].name != "model.safetensors":
        index = {"metadata": {"total_size": after}, "weight_map": dict(sorted(shard_of.items()))}
        (target / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    _describe(target / "config.json", form, kept)
    return done, after


def _packed(weight_NK: Tensor, form: WeightFormat) -> dict[str, Tensor]:
    q_NK, scales_NG = round_to(weight_NK, form)
    if form.is_float8:
        return {"": q_NK, SCALES: scales_NG}
    return to_packed(q_NK, scales_NG.to(torch.float32), form.bits)


def _describe(path: Path, form: WeightFormat, kept: set[str]) -> None:
    config = json.loads(path.read_text(encoding="utf-8"))
    weights: dict[str, Any] = {
        "num_bits": form.bits,
        "type": "float" if form.floating else "int",
        "symmetric": True,
        "dynamic": False,
        "strategy": "channel" if form.group is None else "group",
    }
    if form.group is not None:
        weights["group_size"] = form.group
    rows = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True, "strategy": "token"}
    linear = sorted(name.removesuffix(_WEIGHT) for name in kept if name.endswith(_WEIGHT))
    config["quantization_config"] = {
        "quant_method": METHOD,
        "format": FLOAT_FORMAT if form.floating else PACKED_FORMAT,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": rows if form.floating else None,  # as GPU engines expect for float8
                "output_activations": None,
            }
        },
        "ignore": [name for name in linear if "norm" not in name and "embed" not in name],
    }
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
