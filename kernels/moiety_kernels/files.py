"""Atomic writes of files that others may read at any time."""

from __future__ import annotations

import tempfile
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write the file atomically: readers see the old file or the new one."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".new", delete=False, encoding="utf-8") as file:
        file.write(text)
    Path(file.name).replace(path)
