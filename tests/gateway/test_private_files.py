"""Private files: who may read them, and what a failed or concurrent write leaves."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from moiety_platform.private_files import create_private, write_private


def test_a_created_file_is_its_owners_and_the_first_one_stays(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "key"
    create_private(path, b"first")
    create_private(path, b"second")
    assert path.read_bytes() == b"first"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(path.parent.iterdir()) == [path]


def test_a_written_file_replaces_one_that_others_could_read(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_bytes(b"old")
    path.chmod(0o644)
    write_private(path, b"new")
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    (path / "inside").mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        write_private(path, b"new")
    assert list(tmp_path.iterdir()) == [path]
