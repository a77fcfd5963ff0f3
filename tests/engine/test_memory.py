"""The amount of memory for the KV cache."""

from __future__ import annotations

from pathlib import Path

import psutil

from moiety_engine.memory import available_bytes


def test_a_containers_limit_counts_where_it_is_lower_than_the_machines_memory(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert available_bytes(tmp_path) == 600_000


def test_no_limit_means_the_machines_memory(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert 0 < available_bytes(tmp_path) <= psutil.virtual_memory().total


def test_files_that_are_kept_in_memory_only_while_nobody_needs_it_do_not_count_as_used(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("950000\n")  # a checkpoint was just downloaded
    (tmp_path / "memory.stat").write_text("anon 200000\nfile 700000\nactive_file 100000\ninactive_file 600000\n")
    assert available_bytes(tmp_path) == 750_000
