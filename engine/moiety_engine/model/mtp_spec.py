"""Multi-token prediction (MTP) layers, as published with DeepSeek-V3.

The first one follows a model's last layer, and predicts the token after the next one from the next token and the
model's hidden state; each further one predicts the token after that. Each is loaded as a model of one layer that uses
the model's vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import structlog
import torch
from safetensors import safe_open

from moiety_engine.model.checkpoint import tensor_files
from moiety_engine.model.errors import UnsupportedModelError, WeightsError
from moiety_engine.model.names import mtp_prefix
from moiety_wire.engine_choices import LoadFormat

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from moiety_engine.model.spec import ModelSpec

_NUM_COMPARED = 16  # rows of a vocabulary
_INSTEAD = "use --speculate ngram, or --speculate draft with a --draft-model"

log = structlog.get_logger()


def mtp_spec(spec: ModelSpec, index: int = 0) -> ModelSpec:
    """Return the spec of an MTP layer alone. Raises UnsupportedModelError if the model has none."""
    if spec.mtp is None:
        raise UnsupportedModelError(
            f"--speculate mtp needs an MTP layer, which this {spec.family} checkpoint with "
            f"{len(spec.layers)} layers does not have: its config.json sets no num_nextn_predict_layers, "
            f"which the families with MTP in docs/models.md support; {_INSTEAD}"
        )
    return replace(
        spec,
        layers=(spec.mtp_layers[index],),
        ignored_prefixes=("",),  # all other tensors belong to the model
        mtp_layers=(),
        mtp_after=len(spec.layers),
        mtp_index=index,
        block_starts=(),
    )


def require_mtp(folder: Path, spec: ModelSpec, load_format: LoadFormat) -> None:
    """Check that the checkpoint has a usable MTP layer, before weights are read. Raises ModelError."""
    mtp_spec(spec)
    if load_format is LoadFormat.DUMMY:
        return
    files = tensor_files(folder)
    names, prefix = spec.mtp_names, mtp_prefix("model.", len(spec.layers), files)
    projection = f"{prefix}eh_proj.weight" if names is None else f"{names.projection}.weight"
    if projection not in files:
        raise WeightsError(
            f"the model in {folder} has an MTP layer as published, but the files have no {projection}: "
            "transformers leaves MTP layers out; download the checkpoint as it was published, or "
            f"{_INSTEAD}"
        )
    for index in range(len(spec.mtp_layers)):
        for copy, own in _copies(spec, index, files):
            name, of_model = f"{copy}.weight", f"{own}.weight"
            if name in files and not _alike(files, name, of_model):
                raise UnsupportedModelError(
                    f"{name} differs from {of_model}, and an MTP layer must share the model's own: {_INSTEAD}"
                )


def _copies(spec: ModelSpec, index: int, files: dict[str, Path]) -> tuple[tuple[str, str], ...]:
    """Return the names of copies of the model's vocabulary that an MTP layer may have, with those of the model."""
    if spec.mtp_names is not None:
        return spec.mtp_names.at(index).copies
    prefix = mtp_prefix("model.", len(spec.layers), files, index)
    head = "model.embed_tokens" if spec.tie_word_embeddings else "lm_head"
    return (f"{prefix}embed_tokens", "model.embed_tokens"), (f"{prefix}shared_head.head", head)


def num_mtp_layers(folder: Path, spec: ModelSpec, load_format: LoadFormat) -> int:
    """Return how many MTP layers of the checkpoint are loaded: those in the files, from the first one on.

    Some checkpoints have fewer of them than config.json says; a warning is logged then. With random weights there are
    as many as config.json says.
    """
    num_layers = len(spec.mtp_layers)
    if load_format is LoadFormat.DUMMY:
        return num_layers
    files = tensor_files(folder)
    count = 0
    while count < num_layers and _has_layer(spec, count, files):
        count += 1
    if count < num_layers:
        log.warning("mtp_layers_missing", num_layers=num_layers, num_found=count, folder=str(folder))
    return max(1, count)


def _has_layer(spec: ModelSpec, index: int, files: dict[str, Path]) -> bool:
    if spec.mtp_names is None:
        return f"{mtp_prefix('model.', len(spec.layers), files, index)}eh_proj.weight" in files
    prefixes = [prefix for _, prefix in spec.mtp_names.at(index).layer]
    return any(name.startswith(prefix) for prefix in prefixes for name in files)


def _alike(files: dict[str, Path], name: str, of_model: str) -> bool:
    """Return whether two vocabulary-sized tensors agree in some sampled rows."""
    if of_model not in files:
        return True
    one, other = (_some_rows(files[each], each) for each in (name, of_model))
    return torch.equal(one, other)


def _some_rows(path: Path, name: str) -> Tensor:
    with safe_open(path, framework="pt") as file:
        rows = file.get_slice(name)
        count = rows.get_shape()[0]
        return torch.cat([rows[row : row + 1].float() for row in range(0, count, -(-count // _NUM_COMPARED))])
