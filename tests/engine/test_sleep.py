"""A sleeping replica has freed its memory, and answers as before after it wakes."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import weakref
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from moiety_engine.config import EngineConfig, Overlap, Speculate, TransferConfig
from moiety_engine.errors import OutOfMemory, SleepFileError
from moiety_engine.loop import EngineLoop
from moiety_engine.memory import Memory
from moiety_engine.messages import CoreSleep, CoreSlept, CoreSubmit
from moiety_engine.model import weight_file, weight_offload
from moiety_engine.model.batch import KvCache
from moiety_engine.model.families import read_spec
from moiety_engine.model.weight_offload import named_tensors, require_fit, weight_bytes
from moiety_engine.offline import run_all
from moiety_engine.runner.control_messages import ControlSender
from moiety_engine.runner.memory import kv_budget_bytes
from moiety_engine.runner.profiling import StepBounds, largest_step
from moiety_engine.server.sleep_mode import SleepMode
from moiety_engine.startup import load_loop
from moiety_wire.classes import STANDARD
from moiety_wire.engine_choices import LoadFormat
from moiety_wire.engine_load import SleepState
from moiety_wire.messages import Sampling

GIB = 1 << 30


def make_submit(key: int) -> CoreSubmit:
    prompt = [3 + (key * 31 + i * 7) % 300 for i in range(9 + 5 * key)]
    return CoreSubmit(key, "t", STANDARD, prompt, Sampling(temperature=0.0), 12, 0, [], 12, b"s", 0)


def own_loop(checkpoint: Path, **settings: Any) -> EngineLoop:
    """A loop with a model of its own, since the model is moved."""
    return load_loop(EngineConfig(model=str(checkpoint), name="t", device="cpu", dtype="float32", **settings))


def weights_on_device(loop: EngineLoop) -> int:
    return sum(tensor.untyped_storage().nbytes() for _, tensor in named_tensors(loop.executor.model._weights))


@pytest.mark.parametrize("overlap", [pytest.param(Overlap.OFF, marks=pytest.mark.thorough), Overlap.ON])
def test_a_sleeping_engine_frees_its_memory_and_answers_the_same_after_waking(
    checkpoint: Path, overlap: Overlap
) -> None:
    loop = own_loop(checkpoint, overlap=overlap, host_kv_memory_bytes=1 << 20)
    loop.warm_up()
    submits = [make_submit(key) for key in range(5)]
    before = {key: result.token_ids for key, result in run_all(loop, submits).items()}
    assert loop.executor.device_state is not None
    cache = weakref.ref(loop.executor.device_state.kv.layers[0].k_NGPd)
    assert loop.load().kv_blocks_cached > 0
    held = weights_on_device(loop)
    for _ in range(2):
        freed = loop.sleep()
        gc.collect()
        assert loop.asleep
        assert freed > held > 0
        assert weights_on_device(loop) == 0
        assert cache() is None, "somebody still holds the cache"
        assert loop.load().kv_blocks_cached == 0
        loop.wake()
        assert weights_on_device(loop) == held
        assert {key: result.token_ids for key, result in run_all(loop, submits).items()} == before


def test_the_weights_of_a_sleeping_engine_with_a_folder_are_in_a_file_and_not_in_memory(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "new" / "asleep"
    loop = own_loop(checkpoint, sleep_folder=str(folder))
    before = run_all(loop, [make_submit(0)])[0].token_ids
    monkeypatch.setattr(weight_file, "_CHUNK_BYTES", 1000)  # less than a tensor
    held = weights_on_device(loop)
    for _ in range(2):
        loop.sleep()
        assert weights_on_device(loop) == 0
        assert open_bytes(folder) == held
        assert not list(folder.iterdir()), "another program can read the weights"
        loop.wake()
        assert weights_on_device(loop) == held
        assert open_bytes(folder) == 0
        assert run_all(loop, [make_submit(0)])[0].token_ids == before


def test_an_engine_that_writes_its_weights_to_a_slow_disk_shows_that_it_is_alive(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = own_loop(checkpoint, sleep_folder=str(tmp_path))
    monkeypatch.setattr(weight_file, "_CHUNK_BYTES", 1000)
    monkeypatch.setattr(weight_file, "_SYNC_BYTES", 3000)
    written, at_syncs, at_beats = weights_on_device(loop), [0], [0]
    fdatasync = os.fdatasync

    def sync(descriptor: int) -> None:
        at_syncs.append(os.fstat(descriptor).st_size)
        fdatasync(descriptor)

    monkeypatch.setattr(os, "fdatasync", sync)
    loop.sleep(lambda: at_beats.append(open_bytes(tmp_path)))
    assert at_syncs[-1] == written and max(later - before for before, later in pairwise(at_syncs)) < 4000
    assert at_beats[-1] == written and max(later - before for before, later in pairwise(at_beats)) <= 1000
    num_beats = len(at_beats)
    loop.wake(lambda: at_beats.append(0))
    assert len(at_beats) - num_beats >= written // 1000


def open_bytes(folder: Path) -> int:
    """Return the bytes of the deleted files of the folder that this process has open."""
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    found = {str(link.readlink()): link.stat().st_size for link in links if link.exists()}
    return sum(size for target, size in found.items() if target.startswith(str(folder)))


@pytest.mark.parametrize("lacks", ["space", "rights", "space while it writes"])
def test_a_folder_without_room_for_the_weights_leaves_the_replica_awake(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    (tmp_path / "file").touch()
    loop = own_loop(checkpoint, sleep_folder=str(tmp_path / "file" if lacks == "rights" else tmp_path))
    held = weights_on_device(loop)
    if lacks == "space":
        monkeypatch.setattr(weight_file, "disk_usage", lambda _: shutil.disk_usage(tmp_path)._replace(free=held))
    if lacks == "space while it writes":
        monkeypatch.setattr(os, "fdatasync", full_disk)
    with pytest.raises(OutOfMemory, match=r"they stay on the device\. Free space there, or set"):
        loop.sleep()
    assert not loop.asleep
    assert (weights_on_device(loop), open_bytes(tmp_path)) == (held, 0)
    assert run_all(loop, [make_submit(0)])[0].finish is not None


def full_disk(_: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_host_without_memory_for_the_weights_in_the_file_leaves_the_replica_asleep(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = own_loop(checkpoint, sleep_folder=str(tmp_path))
    loop.sleep()
    with monkeypatch.context() as patched, pytest.raises(OutOfMemory, match="the weights need"):
        patched.setattr(weight_file, "available_bytes", lambda: 1000)
        loop.wake()
    assert loop.asleep
    assert weights_on_device(loop) == 0
    loop.wake()
    assert run_all(loop, [make_submit(0)])[0].token_ids


class BrokenDisk:
    """File of a disk that cannot be read any more."""

    def seek(self, _: int) -> None: ...
    def close(self) -> None: ...
    def readinto(self, _: memoryview) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def break_files(loop: EngineLoop, how: str) -> list[Any]:
    """Make the files of a sleeping engine unreadable, and return those that a broken disk has."""
    files = []
    for model in loop.executor._weights._models:
        copy: Any = model._weight_offload._copy
        files.append(copy._file)
        if how == "truncated":
            copy._file.truncate(sum(copy._sizes) - 1)
        else:
            copy._file = BrokenDisk()
    return files


@pytest.mark.parametrize(("how", "drafts"), [("truncated", False), ("broken", True)])
def test_an_engine_whose_file_cannot_be_read_loads_its_weights_from_the_checkpoint(
    checkpoint: Path, tmp_path: Path, how: str, drafts: bool
) -> None:
    settings = {"speculate": Speculate.DRAFT, "draft_model": str(checkpoint)} if drafts else {}
    loop = own_loop(checkpoint, sleep_folder=str(tmp_path), **settings)
    before, held = run_all(loop, [make_submit(0)])[0].token_ids, weights_on_device(loop)
    for _ in range(2):
        loop.sleep()
        files = break_files(loop, how)
        beats: list[int] = []
        with capture_logs() as logs:
            loop.wake(lambda: beats.append(0))  # noqa: B023 - called at once
        found = [one for one in logs if one["event"] == "sleep_file_unreadable"]
        assert len(found) == 1 + drafts
        assert found[0]["reason"] == ("Input/output error" if how == "broken" else weight_file.TOO_SHORT)
        for file in files:
            file.close()
        assert beats, "the engine server hears nothing of a long load"
        assert weights_on_device(loop) == held
        assert run_all(loop, [make_submit(0)])[0].token_ids == before


def test_an_engine_whose_file_and_checkpoint_cannot_be_read_stays_asleep_and_says_what_to_do(
    checkpoint: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    loop = own_loop(folder, sleep_folder=str(tmp_path / "asleep"))
    before = run_all(loop, [make_submit(0)])[0].token_ids
    loop.sleep()
    (file,) = break_files(loop, "broken")
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config + " ")
    for _ in range(2):
        with pytest.raises(SleepFileError, match=r"Input/output error; .* was changed .*Restart the engine") as caught:
            loop.wake()
        assert "--sleep-folder" in str(caught.value)
        assert loop.asleep and weights_on_device(loop) == 0
    copy: Any = loop.executor.model._weight_offload._copy
    copy._file = file  # the disk is back
    loop.wake()
    assert run_all(loop, [make_submit(0)])[0].token_ids == before


def test_a_host_without_room_for_the_weights_leaves_the_replica_awake(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = own_loop(checkpoint)
    monkeypatch.setattr(weight_offload, "available_bytes", lambda: 1000)
    with pytest.raises(OutOfMemory, match="they stay"):
        loop.sleep()
    assert not loop.asleep
    assert run_all(loop, [make_submit(0)])[0].finish is not None


def test_an_engine_without_memory_for_waking_stays_asleep_and_can_be_woken_later(checkpoint: Path) -> None:
    loop = own_loop(checkpoint)
    loop.sleep()
    fitting, loop.executor.sizes = loop.executor.sizes, replace(loop.executor.sizes, num_blocks=1 << 50)
    for _ in range(2):
        with pytest.raises(OutOfMemory, match="does not fit"):
            loop.wake()
        assert loop.asleep
        assert weights_on_device(loop) == 0
    loop.executor.sizes = fitting
    loop.wake()
    assert run_all(loop, [make_submit(0)])[0].token_ids


def test_a_late_failure_of_waking_frees_the_cache(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = own_loop(checkpoint, transfer=TransferConfig(listen="tcp://127.0.0.1:0"))
    loop.sleep()

    def no_room(_self: EngineLoop) -> None:
        raise OutOfMemory("no room for the largest step")

    with monkeypatch.context() as patched, pytest.raises(OutOfMemory, match="largest step"):
        patched.setattr(EngineLoop, "warm_up", no_room)
        loop.wake()
    assert loop.asleep and loop.intake.kv_connector.address
    assert not any(isinstance(held, KvCache) for held in vars(loop.intake.kv_connector._staging_buffer).values())
    loop.wake()
    assert run_all(loop, [make_submit(0)])[0].token_ids
    loop.close()


def test_sleep_waits_for_what_is_open_and_the_newest_wish_counts() -> None:
    sleep = SleepMode()
    assert sleep.next_command(0) is None
    sleep.ask(asleep=True)
    assert (sleep.state, sleep.next_command(2)) == (SleepState.FALLING_ASLEEP, None)
    sleep.ask(asleep=False)
    assert (sleep.state, sleep.next_command(2)) == (SleepState.AWAKE, None)
    sleep.ask(asleep=True)
    assert sleep.next_command(0) == CoreSleep(asleep=True)
    sleep.ask(asleep=False)  # while the core is busy with it
    assert (sleep.state, sleep.next_command(0)) == (SleepState.FALLING_ASLEEP, None)
    sleep.done(CoreSlept(asleep=True))
    assert (sleep.state, sleep.next_command(0)) == (SleepState.WAKING, CoreSleep(asleep=False))
    sleep.done(CoreSlept(asleep=False))
    assert (sleep.state, sleep.next_command(0)) == (SleepState.AWAKE, None)


def test_a_core_that_cannot_is_not_asked_for_ever_and_says_why() -> None:
    sleep = SleepMode()
    sleep.ask(asleep=True)
    sleep.next_command(0)
    sleep.done(CoreSlept(asleep=False, problem="no room"))
    assert (sleep.state, sleep.problem, sleep.next_command(0)) == (SleepState.AWAKE, "no room", None)
    sleep.ask(asleep=True)
    assert (sleep.problem, sleep.next_command(0)) == ("", CoreSleep(asleep=True))


def test_a_models_weights_are_counted_before_they_are_allocated(loops: Any, checkpoint: Path) -> None:
    held = sum({id(t): t.nbytes for _, t in named_tensors(loops.model._weights)}.values())
    assert weight_bytes(read_spec(checkpoint), torch.float32) == held


@pytest.mark.parametrize(
    ("memory", "advice"),
    [
        (Memory(70 * GIB, 80 * GIB), "smaller or a quantised model"),
        (Memory(70 * GIB, 140 * GIB), "end other processes on the GPU"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_with_the_figures_and_what_to_do(memory: Memory, advice: str) -> None:
    with pytest.raises(OutOfMemory) as refused:
        require_fit(90 * GIB, memory, torch.device("cuda"))
    said = str(refused.value)
    assert "90.00 GiB" in said
    assert "70.00 GiB free" in said
    assert advice in said


def test_a_model_larger_than_the_memory_is_refused_before_anything_is_allocated(
    checkpoint: Path, tmp_path: Path
) -> None:
    config = (checkpoint / "config.json").read_text().replace('"vocab_size": 320', '"vocab_size": 320000000000')
    (tmp_path / "config.json").write_text(config)
    for load_format in LoadFormat:
        with pytest.raises(OutOfMemory, match="the weights need"):
            load_loop(EngineConfig(model=str(tmp_path), name="t", device="cpu", load_format=load_format))


def test_the_cache_gets_what_weights_steps_and_reserve_leave() -> None:
    budget = kv_budget_bytes(Memory(80 * GIB, 100 * GIB), 5 * GIB)
    assert 70 * GIB < budget < 75 * GIB
    with pytest.raises(OutOfMemory, match=r"a step takes up to 79\.00 GiB.*--max-batch-tokens"):
        kv_budget_bytes(Memory(80 * GIB, 100 * GIB), 79 * GIB)


def test_the_step_that_memory_is_measured_with_is_the_largest_that_may_come(
    loops: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []
    hidden = loops.model.hidden

    def note(batch: Any, kv: Any, *more: Any) -> Any:
        seen.append((len(batch.token_ids_T), len(batch.wanted_rows_L)))
        return hidden(batch, kv, *more)

    monkeypatch.setattr(loops.model, "hidden", note)
    bounds = StepBounds(block_size=8, max_batch_tokens=700, max_running=5, max_context=512)
    kv_bytes = largest_step(loops.model, ControlSender(), bounds)
    assert seen == [(700, 2), (5, 5)]
    assert kv_bytes >= 702 // 8 * loops.model.kv_bytes_per_block(8)
