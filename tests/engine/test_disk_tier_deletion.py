"""Deletion from the prefix cache's tier on disk: by size, idle time and retention, and of a tenant's blocks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from moiety_engine.disk import folder as folder_module
from moiety_engine.disk.records import owner_tag, read_head, write_file
from moiety_engine.sequence import Sequence

from .disk_tiers import Make, evict, files, flip, make, make_submit, num_cached, restart, run, settle

__all__ = ["make"]  # fixtures


def test_the_least_recently_used_blocks_are_deleted_when_the_disk_tier_is_full(make: Make, tmp_path: Path) -> None:
    run(make(), make_submit(0))
    (one,) = files(tmp_path)
    most = 4 * one.stat().st_size
    loop = make(disk_cache_bytes=most)
    for key in range(8):
        run(loop, make_submit(key))
        run(loop, make_submit(0))
        assert sum(path.stat().st_size for path in files(tmp_path)) == loop.load().disk_bytes_used <= most
        assert one.exists(), "it was used all the time"
    evict(loop)
    assert num_cached(run(loop, make_submit(1))) == 0


def test_blocks_on_disk_are_deleted_after_the_idle_time(make: Make, tmp_path: Path) -> None:
    run(make(), make_submit(1))
    make.end()
    (old,) = files(tmp_path)
    os.utime(old, (1e9, 1e9))
    loop = restart(make, disk_cache_ttl_s=3600.0)
    assert num_cached(run(loop, make_submit(1))) == 0
    assert not old.exists()


@pytest.mark.parametrize(
    ("said_s", "stays"),
    [((0.0,), False), ((3600.0,), True), ((0.0, 3600.0), True), ((3600.0, 60.0), True), ((0.001,), False)],
)
def test_retention_of_blocks_on_disk_survives_a_restart(
    make: Make, tmp_path: Path, said_s: tuple[float, ...], stays: bool
) -> None:
    loop = make()
    for keep_s in said_s:
        run(loop, make_submit(1, tenant="a", keep_s=keep_s))
    make.end()
    (kept,) = files(tmp_path)
    loop = make(disk_cache_bytes=4 * kept.stat().st_size)
    for key in range(2, 8):
        run(loop, make_submit(key))
    assert kept.exists() is stays
    assert num_cached(run(loop, make_submit(1, tenant="a"))) == (40 if stays else 0)


def test_a_file_with_an_unreadable_retention_mark_is_usable_and_not_retained(make: Make, tmp_path: Path) -> None:
    run(make(), make_submit(1, keep_s=3600.0))
    make.end()
    (torn,) = files(tmp_path)
    flip(torn, -1)
    loop = restart(make)
    assert loop.intake.disk is not None and loop.intake.disk.first.index.num_kept == 0
    assert num_cached(run(loop, make_submit(1))) == 40


def owners(tmp_path: Path) -> list[str]:
    """Return the tenant of each file on disk, for all models."""
    found = []
    for path in files(tmp_path):
        with path.open("rb") as file:
            tags = {owner_tag(one, bytes.fromhex(path.parent.name)): one for one in ("gone", "stays", "t")}
            found.append(tags[read_head(file)[0].owner])
    return sorted(found)


@pytest.mark.parametrize("host_bytes", [0, 1 << 14])
def test_a_tenant_that_is_forgotten_leaves_nothing_on_any_tier_and_others_keep_theirs(
    make: Make, tmp_path: Path, host_bytes: int
) -> None:
    run(make(block_size=8), make_submit(1, tenant="gone"), make_submit(2, tenant="stays"))  # another identity
    loop = make(host_kv_memory_bytes=host_bytes)
    ours = make_submit(1, b"its salt", tenant="gone", keep_s=60.0), make_submit(2, b"another salt", tenant="gone")
    run(loop, *ours, make_submit(3, tenant="stays"))
    assert owners(tmp_path) == ["gone"] * 3 + ["stays"] * 2
    loop.forget_tenants(["gone", "never there"])
    settle(loop)
    assert owners(tmp_path) == ["stays"] * 2
    assert [num_cached(run(loop, one)) for one in (*ours, ours[0], make_submit(3, tenant="stays"))] == [0, 0, 0, 40]
    assert owners(tmp_path) == ["stays"] * 2, "it left something once more"
    assert loop.scheduler.kv.retention.size == 0


def test_blocks_of_a_deleted_tenants_open_request_are_not_kept(make: Make, tmp_path: Path) -> None:
    loop = make(host_kv_memory_bytes=1 << 14)
    loop.submit(make_submit(1, tenant="gone", keep_s=60.0))
    loop.step()
    assert loop.scheduler.kv.find_prefix(Sequence(make_submit(1, tenant="gone"), order=0, seed=0))
    loop.forget_tenants(["gone"])
    assert not loop.scheduler.kv.find_prefix(Sequence(make_submit(1, tenant="gone"), order=0, seed=0))
    while not loop.scheduler.idle:
        loop.step()
    settle(loop)
    assert files(tmp_path) == []
    load = loop.load()
    assert (load.kv_blocks_used, load.kv_blocks_cached) == (0, 0)


def test_an_engine_that_was_away_forgets_what_it_finds_again(make: Make, tmp_path: Path) -> None:
    run(make(), make_submit(1, tenant="gone"))
    run(make(), make_submit(1, tenant="stays"))
    loop = make()
    assert owners(tmp_path) == ["gone", "stays"]
    loop.forget_tenants(["gone"])
    settle(loop)
    assert owners(tmp_path) == ["stays"]


def test_a_file_that_an_erasure_takes_away_while_it_is_written_stops_no_other(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = make()
    taken: list[Any] = []

    def take(file: Any, *rest: Any) -> int:
        num_bytes = write_file(file, *rest)
        if not taken:
            taken.append(Path(file.name))
            taken[0].unlink()
        return num_bytes

    monkeypatch.setattr(folder_module, "write_file", take)
    assert run(loop, make_submit(1)).token_ids
    run(loop, make_submit(2))
    load = loop.load()
    assert (load.disk_failed_writes_total, load.disk_dropped_blocks_total) == (0, 11)
    assert load.disk_written_blocks_total == 11, "the next one's are kept"
