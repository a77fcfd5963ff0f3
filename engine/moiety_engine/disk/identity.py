"""Identity of keys and values on disk: two engines share files only where all of its parts are equal."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import structlog
import torch

from moiety_engine.checkpoint import weight_files
from moiety_engine.config import EngineConfig
from moiety_engine.disk.records import RANK_BYTES
from moiety_wire.engine_choices import LoadFormat

if TYPE_CHECKING:
    from moiety_engine.model.batch import KvCache
    from moiety_engine.model.transformer import Transformer

FORM = 3  # increment where files or KV arithmetic change in a way that the parts below do not show
IDENTITY_BYTES = 32
_KNOWN = "contents.json"

log = structlog.get_logger()


def identity_of(digests: Sequence[bytes], rank: int) -> bytes:
    """Return the identity of a rank's KV, from the digests of all ranks with layers (`digest_of_rank`)."""
    common = hashlib.blake2b(b"".join(digests), digest_size=IDENTITY_BYTES - RANK_BYTES).digest()
    return common + rank.to_bytes(RANK_BYTES, "big")


def digest_of_rank(model: Transformer, config: EngineConfig, kv: KvCache, parent: Path) -> bytes:
    """Return the digest of what this rank's KV depends on, including the layout of the ranks.

    `parent`: the cache's folder, where digests of large files are cached.
    """
    device = model.device
    folder = Path(config.model)
    whole = config.load_format is not LoadFormat.DUMMY
    files = [folder / "config.json", *(weight_files(folder) if whole else [])]
    said = {
        "form": [FORM, version("moiety"), str(torch.__version__)],
        "ranks": [model.ranks.rank_position.rank, str(model.ranks.rank_position.layout)],
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
    """Return the digest of all files in an adapter's folder."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    found = [(path.name, digest) for path, digest in zip(files, digests_of(files, parent), strict=True)]
    return hashlib.blake2b(msgspec.json.encode(found), digest_size=IDENTITY_BYTES).digest()


def digests_of(files: Iterable[Path], parent: Path) -> list[str]:
    """Return the digest of each file's contents.

    Digests are cached as long as the file system shows the same file. Two checkpoints may have equal names and sizes,
    and an mtime can be set, but the inode's ctime cannot.
    """
    known = _read_known(parent / _KNOWN)
    begin_s = time.monotonic()
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        found = list(pool.map(lambda path: _digest(path, known), files))
    fresh = {mark: digest for mark, digest in found if mark not in known}
    if fresh:
        log.info("checkpoint_digests_computed", num_files=len(fresh), duration_s=round(time.monotonic() - begin_s, 2))
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
    """Write the cached digests atomically. A folder that cannot be written is refused later, where it is needed."""
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        unfinished.touch(mode=0o600)
        unfinished.write_bytes(msgspec.json.encode(known))
        unfinished.rename(path)
    except OSError as exc:
        log.warning(
            "disk_cache_digests_not_saved",
            reason=str(exc),
            advice="make the folder of --disk-cache writable; until then every start reads the whole checkpoint",
        )
