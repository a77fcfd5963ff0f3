"""What keys and values on disk hang on: two engines share files only where all of this is alike."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import structlog
import torch

from moiety_engine.config import EngineConfig, LoadFormat

if TYPE_CHECKING:
    from moiety_engine.model.batch import KvCache
    from moiety_engine.model.transformer import Transformer

FORM = 2  # raised where files, or the arithmetic of keys and values, change in a way that nothing below says
IDENTITY_BYTES = 32
_KNOWN = "contents.json"

log = structlog.get_logger()


def identity_of(model: Transformer, config: EngineConfig, kv: KvCache, parent: Path) -> bytes:
    """`parent`: the cache's folder, where digests of large files are remembered."""
    device = model.device
    folder = Path(config.model)
    whole = config.load_format is not LoadFormat.DUMMY
    files = [folder / "config.json", *(sorted(folder.glob("*.safetensors")) if whole else [])]
    said = {
        "form": [FORM, version("moiety"), str(torch.__version__)],
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "contents": [(path.name, digest) for path, digest in zip(files, digests_of(files, parent), strict=True)],
        "weights": [config.load_format, config.quantization, str(model.dtype)],
        "arithmetic": [model.arithmetic.moe_kernel, model.arithmetic.invariant],
        "rotation": kv.rotation,
        "block_size": kv.block_size,
        "layers": [[(tuple(part.shape[1:]), str(part.dtype)) for part in layer.parts] for layer in kv.everything],
    }
    return hashlib.blake2b(msgspec.json.encode(said), digest_size=IDENTITY_BYTES).digest()


def digest_of_folder(folder: Path, parent: Path) -> bytes:
    """Of all that a folder of an adapter holds."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    found = [(path.name, digest) for path, digest in zip(files, digests_of(files, parent), strict=True)]
    return hashlib.blake2b(msgspec.json.encode(found), digest_size=IDENTITY_BYTES).digest()


def digests_of(files: Iterable[Path], parent: Path) -> list[str]:
    """Of each file's contents. What was read once is remembered as long as the file is the same to the file system:
    sizes and names of two checkpoints may be alike, and a time of change can be set, but not that of the inode."""
    known = _read_known(parent / _KNOWN)
    begin_s = time.monotonic()
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        found = list(pool.map(lambda path: _digest(path, known), files))
    fresh = {mark: digest for mark, digest in found if mark not in known}
    if fresh:
        log.info("disk_cache_read_checkpoint", num_files=len(fresh), took_s=round(time.monotonic() - begin_s, 2))
        _write_known(parent / _KNOWN, known | fresh)
    return [digest for _, digest in found]


def _digest(path: Path, known: dict[str, str]) -> tuple[str, str]:
    is_now = path.stat()
    mark = f"{is_now.st_dev}:{is_now.st_ino}:{is_now.st_size}:{is_now.st_mtime_ns}:{is_now.st_ctime_ns}"
    if mark not in known:
        with path.open("rb") as file:
            return mark, hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=IDENTITY_BYTES)).hexdigest()
    return mark, known[mark]


def _read_known(path: Path) -> dict[str, str]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, str])
    except (OSError, msgspec.MsgspecError):
        return {}


def _write_known(path: Path, known: dict[str, str]) -> None:
    """Whole or not at all. A folder that cannot be written is refused later, by whoever needs it."""
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        unfinished.touch(mode=0o600)
        unfinished.write_bytes(msgspec.json.encode(known))
        unfinished.rename(path)
    except OSError as exc:
        log.warning("disk_cache_cannot_remember", reason=str(exc))
