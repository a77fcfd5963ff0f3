"""Files that only their owner may read, written atomically and flushed to the disk."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def create_private(path: Path, content: bytes) -> None:
    """Create a file, with its folder; of several concurrent processes, the file of the first one stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = _draft_of(path, content)
    try:
        os.link(draft, path)
    except FileExistsError:
        pass  # another process was first
    finally:
        draft.unlink()


def write_private(path: Path, content: bytes) -> None:
    """Create or replace a file. Raises OSError, and then changes nothing."""
    draft = _draft_of(path, content)
    try:
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def _draft_of(path: Path, content: bytes) -> Path:
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    return draft
