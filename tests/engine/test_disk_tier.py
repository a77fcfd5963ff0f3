"""The prefix cache's tier on disk: blocks return as they were written, or not at all."""

from __future__ import annotations

import gc
import os
import re
import shutil
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moiety_engine.config import EngineConfig
from moiety_engine.disk.folder import DiskFolder
from moiety_engine.disk.identity import digest_of_folder
from moiety_engine.disk.index import DiskIndex
from moiety_engine.disk.saving import Saver
from moiety_engine.errors import InvalidConfig
from moiety_engine.offline import run_all
from moiety_engine.startup import load_loop
from moiety_wire.messages import FinishReason

from .disk_tiers import (
    BLOCK_SIZE,
    LIMIT_S,
    Make,
    WorkClock,
    evict,
    files,
    flip,
    make,
    make_submit,
    mtime,
    num_cached,
    restart,
    run,
    settle,
    truncate,
)

__all__ = ["make"]  # fixtures


@pytest.mark.parametrize("host_bytes", [0, 1 << 14])
def test_evicted_blocks_come_back_from_disk_with_the_same_answer(make: Make, host_bytes: int) -> None:
    loop = make(host_kv_memory_bytes=host_bytes)
    first = run(loop, make_submit(1))
    evict(loop)
    again = run(loop, make_submit(1))
    load = loop.load()
    assert (num_cached(first), num_cached(again)) == (0, 40)
    assert again.token_ids == first.token_ids
    assert load.disk_restored_blocks_total + load.host_hit_blocks_total >= 10
    assert load.disk_waited_requests_total > 0
    assert load.disk_dropped_blocks_total == 0


def test_blocks_on_disk_are_found_after_a_restart(make: Make) -> None:
    first = run(make(), make_submit(1))
    loop = restart(make)
    again = run(loop, make_submit(1))
    assert num_cached(again) == 40
    assert again.token_ids == first.token_ids
    assert loop.load().disk_restored_blocks_total == 10


def test_no_other_tenant_finds_it_and_nobody_reads_whose_it_is(make: Make, tmp_path: Path) -> None:
    run(make(), make_submit(1, b"salt-of-acme", tenant="acme"))
    loop = restart(make)
    other = run(loop, make_submit(1, b"salt-of-globex", tenant="globex"))
    assert num_cached(other) == 0
    assert loop.load().disk_waited_requests_total == 0
    assert len(files(tmp_path)) == 3
    for path in files(tmp_path):
        assert re.fullmatch(r"[0-9a-f]{32}\.kv", path.name)
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o700
        contents = path.read_bytes()
        assert not [one for one in (b"acme", b"globex") if one in contents]


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "its first byte": lambda path: flip(path, 0),
    "its header": lambda path: flip(path, 40),
    "a block": lambda path: flip(path, 5000),
    "its end": truncate,
    "all of it": lambda path: path.write_bytes(b"somebody else's"),
}


@pytest.mark.parametrize("what", DAMAGES)
@pytest.mark.parametrize("when", ["before the start", "while it serves"])
def test_a_file_that_is_not_what_was_written_is_a_miss_and_is_removed(
    make: Make, tmp_path: Path, what: str, when: str
) -> None:
    first = run(make(), make_submit(1))
    if when == "before the start":
        make.end()
        (path,) = files(tmp_path)
        DAMAGES[what](path)
    loop = restart(make)
    if when == "while it serves":
        path = next(path for path in files(tmp_path) if path.stat().st_mtime == min(map(mtime, files(tmp_path))))
        DAMAGES[what](path)
    again = run(loop, make_submit(1))
    assert num_cached(again) == 0
    assert again.token_ids == first.token_ids
    assert not path.exists()
    assert num_cached(run(restart(make), make_submit(1))) == 40, "it was computed, and written once more"


def test_a_kill_in_the_middle_of_a_write_leaves_nothing_that_stays(make: Make, tmp_path: Path) -> None:
    loop = make()
    run(loop, make_submit(1))
    (whole,) = files(tmp_path)
    half = whole.with_name("f" * 32 + ".kv.tmp")
    half.write_bytes(whole.read_bytes()[:1000])
    loop = restart(make)
    assert not half.exists()
    assert num_cached(run(loop, make_submit(1))) == 40


def test_other_settings_and_other_weights_have_files_of_their_own(
    make: Make, loops: Any, checkpoint: Path, tmp_path: Path
) -> None:
    run(make(), make_submit(1))
    mine = files(tmp_path)
    assert num_cached(run(restart(make, block_size=8), make_submit(1))) == 0
    changed = tmp_path / "changed"
    shutil.copytree(checkpoint, changed)
    weights = changed / "model.safetensors"
    before = weights.stat()
    flip(weights, -1)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert num_cached(run(restart(make, model=str(changed)), make_submit(1))) == 0
    assert set(mine) <= set(files(tmp_path))
    assert len({path.parent for path in files(tmp_path)}) == 3
    assert num_cached(run(restart(make), make_submit(1))) == 40


def test_a_disk_that_fails_costs_no_request_and_is_left_alone_for_a_while(make: Make, tmp_path: Path) -> None:
    loop = make()
    (folder,) = (path for path in (tmp_path / "kv").iterdir() if path.is_dir())
    shutil.rmtree(folder)
    assert run(loop, make_submit(1)).token_ids
    load = loop.load()
    assert (load.disk_failed_writes_total, load.disk_dropped_blocks_total) == (1, 11)
    run(loop, make_submit(2))
    load = loop.load()
    assert (load.disk_failed_writes_total, load.disk_dropped_blocks_total) == (1, 22), "it was tried again at once"
    assert num_cached(run(loop, make_submit(2))) == 40


def test_the_write_queue_is_bounded_and_keeps_the_newest_blocks(tmp_path: Path) -> None:
    folder = DiskFolder(tmp_path, b"i" * 32, 16)
    saver = Saver(folder, DiskIndex(1 << 20), most_waiting=20)
    for first in range(10):
        saver.offer("t", [bytes([first, place]) for place in range(8)])
    assert (saver.dropped_blocks_total, saver.is_quiet) == (64, False)
    saver.close()
    folder.close()


def test_an_engine_that_sleeps_holds_no_cache_for_what_is_still_being_written(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = make()
    goes_on, write = threading.Event(), loop.intake.disk.first.folder.write

    def waits(*args: Any) -> Any:
        assert goes_on.wait(60.0)
        return write(*args)

    monkeypatch.setattr(loop.intake.disk.first.folder, "write", waits)
    loop.submit(make_submit(1))
    while not (loop.intake.disk.first.saver.is_writing and loop.scheduler.idle):
        loop.step()
    cache = weakref.ref(loop.executor.device_state.kv.layers[0].k_NGPd)
    loop.sleep()
    gc.collect()
    assert cache() is None
    goes_on.set()
    end = time.monotonic() + 60.0
    while not loop.intake.disk.is_quiet:
        assert time.monotonic() < end
        loop.run_maintenance()
    assert loop.intake.disk.first.saver.written_blocks_total
    loop.wake()  # the model is others', too


def test_a_disk_that_stands_still_holds_nobody_up(make: Make) -> None:
    loop = make()
    goes_on = threading.Event()
    loop.intake.disk.first.saver._writer.submit(goes_on.wait, LIMIT_S)
    for key in range(20):
        assert run_all(loop, [make_submit(key)])[key].finish is not None
    assert loop.load().disk_written_blocks_total == 0
    goes_on.set()
    settle(loop)
    load = loop.load()
    assert load.disk_dropped_blocks_total + load.disk_written_blocks_total == 20 * 11
    assert load.disk_written_blocks_total > 0


def test_requests_aborted_during_a_disk_read_end_and_credit_during_it_counts(make: Make) -> None:
    run(make(), make_submit(1))
    loop = restart(make)
    gone, poor = make_submit(1), msgspec.structs.replace(make_submit(1), key=7, credit_tokens=1)
    loop.submit(gone)
    loop.submit(poor)
    assert loop.load().num_waiting == 2
    loop.abort(1)
    loop.extend(7, 4, last=True)
    outputs = []
    limit_s = time.monotonic() + LIMIT_S
    while loop.waits_for_others or not loop.scheduler.idle:
        loop.step()
        assert time.monotonic() < limit_s
        step = loop.take_outputs()
        outputs += step.outputs if step else []
    ends = {output.key: output.finish for output in outputs if output.finish}
    assert ends[1].reason is FinishReason.ABORT
    assert (ends[7].num_output_tokens, ends[7].num_cached_tokens) == (4, 40)


def test_requests_do_not_wait_for_the_disk_when_computing_is_faster(make: Make) -> None:
    loop = make()
    run(loop, make_submit(1))
    evict(loop)
    loop.intake.disk.first.restorer.rate.observe(1, 1e9)
    assert num_cached(run(loop, make_submit(1))) == 0
    assert loop.load().disk_passed_over_requests_total == 1


def test_an_adapter_that_changes_under_its_name_finds_nothing_of_the_old_one(
    loops: Any, checkpoint: Path, tmp_path: Path
) -> None:
    salts = []
    for contents in (b"old", b"new", b"new"):
        folder = tmp_path / "adapter"
        folder.mkdir(exist_ok=True)
        (folder / "adapter_model.safetensors").write_bytes(contents)
        salts.append(digest_of_folder(folder, tmp_path / "kv"))
    assert salts[0] != salts[1] == salts[2]


def test_a_sleeping_engine_has_written_all_blocks_and_finds_them_after_waking(checkpoint: Path, tmp_path: Path) -> None:
    config = EngineConfig(model=str(checkpoint), name="t", device="cpu", dtype="float32", block_size=BLOCK_SIZE)
    clock = WorkClock()
    with load_loop(msgspec.structs.replace(config, disk_cache=str(tmp_path / "kv")), clock_ns=clock) as loop:
        clock.loop = loop
        first = run_all(loop, [make_submit(1)])[1]
        loop.sleep()
        loop.wake()
        again = run(loop, make_submit(1))
    assert num_cached(again) == 40
    assert again.token_ids == first.token_ids


def test_two_engines_do_not_share_a_folder_and_the_tier_needs_prefix_caching(
    make: Make, loops: Any, tmp_path: Path
) -> None:
    make()
    with pytest.raises(InvalidConfig, match="another engine of this model uses this folder"):
        loops.make(disk_cache=str(tmp_path / "kv"), block_size=BLOCK_SIZE)
    with pytest.raises(InvalidConfig, match="--no-prefix-caching"):
        EngineConfig(model="", name="", disk_cache="kv", prefix_caching=False)


def test_an_index_of_a_hundred_thousand_blocks_is_read_from_headers_alone(tmp_path: Path) -> None:
    folder = DiskFolder(tmp_path, b"i" * 32, 16)
    block = memoryview(bytes(16))
    hashes = [number.to_bytes(16, "little") for number in range(100_000)]
    for begin in range(0, len(hashes), 500):
        folder.write(b"o" * 16, hashes[begin : begin + 500], [block] * 500)
    index = DiskIndex(1 << 30)
    for stored in folder.scan():
        index.add(stored)
    folder.close()
    assert index.num_blocks == 100_000
    assert index.num_bytes == sum(path.stat().st_size for path in tmp_path.rglob("*.kv"))
