"""From what the user calls a model to a folder with its files. Reads no weights and imports no torch."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import moiety_demo
from moiety_engine.errors import CheckpointError

NEEDED_FILES = ("*.json", "*.safetensors", "*.jinja")
UNNEEDED_FILES = ("original/*", "consolidated*", "onnx/*")
MOST_HEADER_BYTES = 100 << 20  # of a safetensors file, as its format says
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve_checkpoint(model: str, needed: tuple[str, ...] = NEEDED_FILES) -> Path:
    """The folder of a checkpoint: `model` as a path or as a hub id, of which the files that are `needed` are downloaded
    if they are not in the cache; "" is the bundled demo model. Raises CheckpointError."""
    if not model:
        return _existing(moiety_demo.checkpoint_path(), "the bundled demo model")
    folder = Path(model).expanduser()
    if folder.is_dir():
        return _existing(folder, model)
    if not _HUB_ID.fullmatch(model):
        raise CheckpointError(f"{model} is neither a folder nor a hub id such as 'organisation/model'")
    return _existing(_download(model, needed), model)


def fingerprint(folder: Path) -> str:
    """Two copies of a checkpoint have the same: that of config.json, of which tensors there are, and of the sizes of
    the files."""
    digest = hashlib.sha256()
    for path in sorted([folder / "config.json", *folder.glob("*.safetensors.index.json")]):
        digest.update(path.name.encode() + path.read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"{path.name} {path.stat().st_size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(min(MOST_HEADER_BYTES, int.from_bytes(file.read(8), "little"))))
    return digest.hexdigest()


def model_name(model: str) -> str:
    """What clients call a model if no name is given."""
    return Path(model).name if model else "moiety-demo"


def _existing(folder: Path, what: str) -> Path:
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{what}: {folder} has no config.json; give a checkpoint in Hugging Face's format")
    return folder.resolve()


def _download(hub_id: str, needed: tuple[str, ...]) -> Path:
    # Optional and slow to import: only hub ids need it.
    import httpx  # noqa: PLC0415
    from huggingface_hub import snapshot_download  # noqa: PLC0415
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError  # noqa: PLC0415

    try:
        found = snapshot_download(hub_id, allow_patterns=list(needed), ignore_patterns=list(UNNEEDED_FILES))
    except LocalEntryNotFoundError as exc:
        raise CheckpointError(
            f"{hub_id} is neither a folder here nor in the hub's cache, and the hub cannot be reached; go online once, "
            "or give the path of a checkpoint folder"
        ) from exc
    except (HfHubHTTPError, HFValidationError, httpx.HTTPError, OSError) as exc:
        raise CheckpointError(
            f"{hub_id} cannot be fetched from the hub ({exc}); check the id and, for a gated model, HF_TOKEN"
        ) from exc
    return Path(found)
