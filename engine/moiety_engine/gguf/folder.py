"""Folder of a GGUF file in the layout of a Hugging Face checkpoint, which the rest of the engine reads.

It holds the files that the metadata describe (configuration, tokenizer, chat template) and links to the GGUF files. It
is in the user's cache, named by the file's path, size and time; a changed file gets another folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from moiety_engine.errors import CheckpointError
from moiety_engine.gguf.config import config_of
from moiety_engine.gguf.header import GgufHeader, read_header
from moiety_engine.gguf.kept_types import quantization_of
from moiety_engine.gguf.tokenizer import generation_defaults, tokenizer_files

VERSION = 1  # of the files that are written; a change makes new folders


def folder_of(path: Path) -> Path:
    """Return the folder of the GGUF file at `path`, which is made if it does not exist. Raises CheckpointError."""
    header = read_header(path)
    target = _cache() / f"{path.stem[:80]}-{_key(header)}"
    if (target / "config.json").is_file():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=target.parent))
    except OSError as exc:
        raise CheckpointError(
            f"{target.parent} cannot be written ({exc}): the configuration and tokenizer of {path.name} are kept "
            "there; set XDG_CACHE_HOME to a folder that can be written"
        ) from exc
    try:
        _write(header, draft)
        draft.rename(target)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as exc:
        raise CheckpointError(f"{path} has metadata that cannot be used ({exc!r}); download it again") from exc
    except OSError as exc:
        if not (target / "config.json").is_file():  # another process has been faster
            raise CheckpointError(f"{target} cannot be written ({exc}); check the free space") from exc
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moiety" / "gguf"


def _key(header: GgufHeader) -> str:
    states = ((str(one), one.stat()) for one in header.paths)
    said = [f"{name} {state.st_size} {state.st_mtime_ns}" for name, state in states]
    return hashlib.sha256("\n".join([str(VERSION), *said]).encode()).hexdigest()[:16]


def _write(header: GgufHeader, folder: Path) -> None:
    config = config_of(header, lambda: _floats(header, "rope_freqs.weight"))
    files: dict[str, Any] = tokenizer_files(header)
    files["config.json"] = config | {"quantization_config": quantization_of(header)}
    files["generation_config.json"] = generation_defaults(header)
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        (folder / name).write_text(text, encoding="utf-8")
    for number, path in enumerate(header.paths, 1):
        name = "model.gguf" if len(header.paths) == 1 else f"model-{number:05d}-of-{len(header.paths):05d}.gguf"
        (folder / name).symlink_to(path)


def _floats(header: GgufHeader, name: str) -> list[float]:
    """Return the numbers of a small float32 tensor. Raises ValueError."""
    entry = header.tensors[name]
    if entry.type.name != "F32" or entry.num_bytes > 1 << 16:
        raise ValueError(f"{name} is {entry.type.name} of {entry.num_bytes} bytes")
    with entry.path.open("rb") as file:
        file.seek(entry.offset)
        found: list[float] = np.frombuffer(file.read(entry.num_bytes), dtype="<f4").tolist()
    return found
