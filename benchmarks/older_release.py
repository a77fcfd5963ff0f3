"""Sources of an older release, from git."""

from __future__ import annotations

import io
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def take_sources(commit: str, folder: Path, names: Sequence[str]) -> Path:
    """Extract the named top-level folders of a commit, and return the folder. Raises CalledProcessError."""
    archive = subprocess.run(["git", "archive", commit, *names], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
    return folder
