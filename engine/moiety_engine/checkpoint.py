"""Resolution of a user's model argument to a checkpoint folder. Reads no weights and imports no torch."""

from __future__ import annotations

import hashlib
import json
import re
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import moiety_demo
from moiety_engine.errors import CheckpointError
from moiety_engine.gguf.folder import folder_of
from moiety_engine.gguf.header import read_header

NEEDED_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.tiktoken", "tiktoken.model")
UNNEEDED_FILES = ("original/*", "consolidated*", "onnx/*")
MAX_HEADER_BYTES = 100 << 20  # limit of a safetensors header, by its format
_SAMPLE_BYTES, _MAX_SAMPLES = 4096, 4096
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve_checkpoint(model: str, needed: tuple[str, ...] = NEEDED_FILES) -> Path:
    """Return the folder of a checkpoint.

    `model` is a path of a folder or of a GGUF file, a hub id, whose `needed` files are downloaded if they are not in
    the cache, or "" for the bundled demo model. Raises CheckpointError.
    """
    if not model:
        return _existing(moiety_demo.checkpoint_path(), "the bundled demo model")
    folder = Path(model).expanduser()
    if folder.is_dir():
        return _existing(folder, model)
    if folder.suffix == ".gguf":
        if not folder.is_file():
            raise CheckpointError(f"{model} does not exist; give the path of a GGUF file")
        return folder_of(folder).resolve()
    if not _HUB_ID.fullmatch(model):
        raise CheckpointError(
            f"{model!r} is neither a folder nor a hub id such as 'organisation/model', nor a file that ends in .gguf"
        )
    return _existing(_download(model, needed), model)


def fingerprint(folder: Path) -> str:
    """Return a fingerprint that is equal for copies of a checkpoint, wherever they are.

    It covers config.json, preprocessor_config.json, the list of tensors, the sizes of the files, and some KiB from the
    middle of each tensor, or of 4,096 evenly spread tensors where there are more.

    So it detects weights of another training run in the same shapes, and a file of another version. It does not detect
    a change of a few rows of a tensor, nor of one tensor among very many: a caller that needs this must read
    everything, as the disk cache does once.
    """
    digest = hashlib.sha256()
    further = [*folder.glob("preprocessor_config.json"), *folder.glob("*.safetensors.index.json")]
    for path in sorted([folder / "config.json", *further]):
        digest.update(path.name.encode() + path.read_bytes())
    tensors: list[tuple[Path, int, int]] = []
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"{path.name} {path.stat().st_size}".encode())
        with path.open("rb") as file:
            num_bytes = min(MAX_HEADER_BYTES, int.from_bytes(file.read(8), "little"))
            header = file.read(num_bytes)
        digest.update(header)
        tensors += [(path, 8 + num_bytes + begin, 8 + num_bytes + end) for begin, end in _places(header)]
    for path in sorted(folder.glob("*.gguf"))[:1]:
        for name, entry in sorted(read_header(path).tensors.items(), key=lambda one: (one[1].path, one[1].offset)):
            digest.update(f"{name} {entry.type.name} {entry.shape}".encode())
            tensors.append((entry.path, entry.offset, entry.offset + entry.num_bytes))
    for path, of_file in groupby(tensors[:: -(-len(tensors) // _MAX_SAMPLES) or 1], key=itemgetter(0)):
        with path.open("rb") as file:
            for _, begin, end in of_file:
                file.seek(max(begin, (begin + end - _SAMPLE_BYTES) // 2))
                digest.update(file.read(min(_SAMPLE_BYTES, end - begin)))
    return digest.hexdigest()


def weight_files(folder: Path) -> list[Path]:
    """Return the files with weights in a checkpoint folder."""
    return sorted([*folder.glob("*.safetensors"), *folder.glob("*.gguf")])


def _places(header: bytes) -> list[tuple[int, int]]:
    """Return the begin and end of tensors after a file's header; empty where it is invalid.

    The loader of the file reports an invalid header in detail.
    """
    try:
        found = [one["data_offsets"] for name, one in json.loads(header).items() if name != "__metadata__"]
        return sorted((begin, end) for begin, end in found if 0 <= int(begin) <= int(end))
    except (ValueError, KeyError, TypeError, AttributeError):
        return []


def _existing(folder: Path, what: str) -> Path:
    if not (folder / "config.json").is_file():
        in_gguf = next(iter(sorted(folder.glob("*.gguf"))), None)
        advice = "give a checkpoint in Hugging Face's format" if in_gguf is None else f"give the path of {in_gguf.name}"
        raise CheckpointError(f"{what}: {folder} has no config.json; {advice}")
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
            f"{hub_id} is neither a local folder nor in the hub's cache, and the hub is not reachable; "
            "connect to the internet once, or give the path of a checkpoint folder"
        ) from exc
    except (HfHubHTTPError, HFValidationError, httpx.HTTPError, OSError) as exc:
        raise CheckpointError(
            f"{hub_id} cannot be downloaded from the hub ({exc}); check the id and, for a gated model, HF_TOKEN"
        ) from exc
    return Path(found)
