"""Recurrent states in the disk tier: they are stored with the blocks after which they are, and a prompt continues there
after a restart as if its states had never left the device."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from moiety_engine.config import EngineConfig, Speculate
from moiety_engine.disk.records import read_head
from moiety_engine.disk.state_rows import MIN_KEYS, num_state_pieces, piece_keys
from moiety_engine.errors import InvalidConfig
from moiety_engine.loop import EngineLoop
from moiety_engine.loop_setup import build_loop
from moiety_engine.messages import CoreSubmit
from moiety_engine.model.loading import load_model
from moiety_engine.model.transformer import Transformer
from moiety_engine.offline import Result
from moiety_wire.classes import BATCH
from moiety_wire.messages import Sampling

from .disk_tiers import WorkClock, num_cached, run

BLOCK_SIZE, NUM_BLOCKS, MAX_RUNNING = 4, 200, 4
THOROUGH = ("deepseek_v4", "falcon_h1", "jamba", "kimi_linear", "lfm2_moe", "minimax", "zaya")
VARIANTS = ["qwen3_next", "nemotron_h", *(pytest.param(one, marks=pytest.mark.thorough) for one in THOROUGH)]


@dataclass
class DiskLoops:
    """DiskLoops of one model, which stand for processes that follow each other over one folder."""

    model: Transformer
    folder: Path
    disk: Path

    def make(self, *, num_snapshots: int = 12, block_size: int = BLOCK_SIZE, **settings: Any) -> EngineLoop:
        model, clock = self.model, WorkClock()
        memory = NUM_BLOCKS * model.kv_bytes_per_block(block_size) + (MAX_RUNNING + num_snapshots) * model.state_bytes
        usual = {"disk_cache": str(self.disk), "block_size": block_size, "kv_memory_bytes": memory}
        usual |= {"model": str(self.folder), "name": "tiny", "max_running": MAX_RUNNING, "max_batch_tokens": 64}
        loop = build_loop(model, EngineConfig(**usual | settings), clock_ns=clock)
        clock.loop = loop
        return loop

    def restart(self, **settings: Any) -> EngineLoop:
        """Return a loop of a new process, which has measured the time of a step."""
        loop = self.make(**settings)
        run(loop, submit(99, prompt(99, 30)))
        return loop


MakeLoops = Callable[[str], DiskLoops]


@pytest.fixture
def make_loops(tmp_path: Path) -> MakeLoops:
    from tests.model.conftest import write_checkpoint

    def make(variant: str) -> DiskLoops:
        folder = tmp_path / "checkpoint"
        folder.mkdir()
        write_checkpoint(folder, variant)
        model = load_model(folder, device="cpu", dtype="float32")
        return DiskLoops(model, folder, tmp_path / "disk")

    return make


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, 300), k=length)


def submit(key: int, prompt_ids: list[int], num_output: int = 6) -> CoreSubmit:
    return CoreSubmit(key, "t", BATCH, prompt_ids, Sampling(temperature=0.0), num_output, 0, [], num_output, b"s", 0)


def alone(loops: DiskLoops, prompt_ids: list[int], **settings: Any) -> list[int]:
    """Return the answer of a loop without caches."""
    with loops.make(disk_cache="", prefix_caching=False, **settings) as loop:
        return run(loop, submit(0, prompt_ids)).token_ids


def check_all_slots_are_free(loop: EngineLoop) -> None:
    for ledger in loop.scheduler.groups:
        assert ledger.states is not None
        assert (ledger.states.pool.num_used, ledger.pool.num_used) == (0, 0)


def files(loops: DiskLoops) -> list[Path]:
    return sorted(loops.disk.rglob("*.kv"))


def damage(path: Path, is_damaged: Callable[[bytes], bool]) -> int:
    """Flip a bit in each block or piece that is to be damaged, and return their number."""
    with path.open("rb") as file:
        header, first = read_head(file)
    contents, places = bytearray(path.read_bytes()), [i for i, one in enumerate(header.hashes) if is_damaged(one)]
    for place in places:
        contents[first + place * header.block_bytes + header.block_bytes // 2] ^= 1
    path.write_bytes(contents)
    return len(places)


def hashes_of(path: Path) -> list[bytes]:
    with path.open("rb") as file:
        return list(read_head(file)[0].hashes)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_prompt_continues_from_its_state_after_a_restart(make_loops: MakeLoops, variant: str) -> None:
    loops = make_loops(variant)
    size = 32 if variant == "deepseek_v4" else BLOCK_SIZE  # a multiple of its entries
    first = prompt(1, 4 * size + 45)
    whole = (len(first) - 1) // size * size
    with loops.make(block_size=size) as loop:
        answer = run(loop, submit(0, first)).token_ids
    turn = first + answer + prompt(2, 20)
    expected = alone(loops, turn, block_size=size)
    with loops.restart(block_size=size) as loop:
        assert loop.intake.disk is not None
        result = run(loop, submit(1, turn))
        assert (num_cached(result), result.token_ids) == (whole, expected)
        restorer = loop.intake.disk.first.restorer
        num_pieces = num_state_pieces(loop.executor.awake().kv)
        assert restorer.restored_blocks_total == whole // size + num_pieces > whole // size
        assert restorer.lost_files_total == 0
        check_all_slots_are_free(loop)


@pytest.mark.parametrize("damaged", ["everything", "states", "one piece"])
def test_a_damaged_state_is_refused_and_the_prompt_computed(make_loops: MakeLoops, damaged: str) -> None:
    loops = make_loops("nemotron_h")
    first = prompt(1, 61)
    with loops.make() as loop:
        run(loop, submit(0, first))
        num_pieces = num_state_pieces(loop.executor.awake().kv)
    keys = {key for path in files(loops) for one in hashes_of(path) for key in piece_keys(one, num_pieces)}
    there = [key for path in files(loops) for key in hashes_of(path) if key in keys]
    assert len(there) == num_pieces > 1
    wanted = {"everything": lambda _: True, "states": keys.__contains__, "one piece": {there[-1]}.__contains__}[damaged]
    assert sum(damage(path, wanted) for path in files(loops)) > 0
    expected = alone(loops, first)
    with loops.restart() as loop:
        assert loop.intake.disk is not None
        result = run(loop, submit(1, first))
        assert (num_cached(result), result.token_ids) == (0, expected)
        assert loop.intake.disk.first.restorer.lost_files_total > 0
        check_all_slots_are_free(loop)
        again = run(loop, submit(2, [*first, *result.token_ids, 5]))
        assert num_cached(again) == 60, "what was computed is cached as usual"


def test_many_prompts_share_few_slots(make_loops: MakeLoops) -> None:
    """States are written while others evict them, and read by more requests than have a slot; drafts use slots too."""
    loops = make_loops("qwen3_next")
    prompts = [prompt(seed, 37 + 8 * seed) for seed in range(6)]
    for settings in ({"num_snapshots": 1}, {"num_snapshots": 12, "speculate": Speculate.NGRAM}):
        expected = {key: alone(loops, one) for key, one in enumerate(prompts)}
        for _ in range(2):
            with loops.restart(**settings) as loop:
                found = ask_all(loop, prompts)
                assert {key: one.token_ids for key, one in found.items()} == expected
                check_all_slots_are_free(loop)
    assert sum(map(num_cached, found.values())) > 0


def ask_all(loop: EngineLoop, prompts: list[list[int]]) -> dict[int, Result]:
    from moiety_engine.offline import run_all

    from .disk_tiers import settle

    found = run_all(loop, [submit(key, one) for key, one in enumerate(prompts)])
    settle(loop)
    return found


def test_deleted_and_sleeping(make_loops: MakeLoops) -> None:
    loops = make_loops("nemotron_h")
    first = prompt(1, 61)
    with loops.make() as loop:
        expected = run(loop, submit(0, first)).token_ids
        loop.sleep()
        loop.wake()
        result = run(loop, submit(1, first))
        assert (num_cached(result), result.token_ids) == (60, expected), "a replica that slept reads its states again"
        assert files(loops)
        loop.forget_tenants(["t"])
        run(loop, submit(2, prompt(3, 9)))
    assert files(loops) == []


def test_keys_of_states_that_are_neither_written_nor_read_are_forgotten_while_the_disk_is_busy(
    make_loops: MakeLoops,
) -> None:
    with make_loops("qwen3_next").make() as loop:
        disk = loop.intake.disk
        assert disk is not None
        group = disk.first
        states = group.states
        assert states is not None
        offered = states.note(b"offered")
        group.saver.offer("t", offered)
        for number in range(MIN_KEYS // states.num_pieces + 1):  # searches whose requests do not wait for the disk
            states.note(number.to_bytes(16, "big"))
        assert not disk.is_quiet
        group.forget_unused_keys()
        assert states.num_keys == len(offered)
        assert all(map(states.is_piece, offered))
        for number in range(MIN_KEYS // states.num_pieces + 1):
            states.note(number.to_bytes(16, "big"))
        disk.run_copies(loop.executor.awake())  # drops the offer, which the device has not
        assert states.num_keys == 0


def test_several_stages_are_refused(make_loops: MakeLoops) -> None:
    with pytest.raises(InvalidConfig, match=r"stores states only if each rank has all layers: leave out --disk-cache"):
        make_loops("nemotron_h").make(pp=2)
