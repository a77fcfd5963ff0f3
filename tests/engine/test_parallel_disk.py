"""The prefix cache's tier on disk over several ranks, in real processes on gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from moiety_engine.config import EngineConfig
from moiety_engine.disk.records import read_head
from moiety_engine.distribution.layout import layout_of
from moiety_engine.planning.layout_support import LAYOUTS, why_unavailable

from .rank_processes import Alone, RankProcesses, assert_same, ranks_of, requests, settings_of, thorough

FAMILY = "qwen3_moe"
OVER_RANKS = [layout for layout in LAYOUTS if LAYOUTS[layout] and not why_unavailable("Disk cache", layout)]
SHOWN = ("TP", "expert ranks")
DIVIDED = "decode_context_parallel"  # on four ranks, which have more ranks than the model has key heads
ANSWERS = ("token_ids", "best", "vectors")


def start(
    processes: RankProcesses,
    alone: Alone,
    disk: Path,
    layout: str,
    lacks: str = "",
    first: int = 0,
    naps: bool = False,
    family: str = FAMILY,
) -> dict[str, Any]:
    """Start an engine on the ranks of a layout, answer the waves of requests from `first` on, and end it.

    Return the answers of rank 0."""
    config = settings_of(alone.folders[family], **LAYOUTS[layout])
    config = msgspec.structs.replace(config, disk_cache=str(disk))
    waves, expected = requests()[first:], alone.says(family)
    keys = [str(one.key) for wave in waves for one in wave]
    answers = {name: {key: expected[name][key] for key in keys if key in expected[name]} for name in ANSWERS}
    ours, *others = processes.work(*ranks_of(config), waves=waves, hurries=0.01, lacks=lacks, naps=naps)
    assert not any(other["error"] for other in others)
    assert_same(expected | answers, ours)
    found: dict[str, Any] = ours
    return found


def files_of_ranks(disk: Path) -> list[list[Path]]:
    """Return the files of each rank that has layers, by rank."""
    return [sorted(folder.glob("*.kv")) for folder in sorted(disk.iterdir(), key=rank_of) if folder.is_dir()]


def damage_every_block(path: Path) -> None:
    with path.open("rb") as file:
        header, first = read_head(file)
    contents = bytearray(path.read_bytes())
    for place in range(len(header.hashes)):
        contents[first + place * header.block_bytes] ^= 1
    path.write_bytes(contents)


def rank_of(folder: Path) -> int:
    return int(folder.name[-4:], 16) if folder.is_dir() else -1


@pytest.mark.parametrize("layout", [one if one in SHOWN else thorough(one) for one in OVER_RANKS])
def test_ranks_restore_what_they_wrote_before_a_restart_and_say_the_same(
    processes: RankProcesses, alone: Alone, tmp_path: Path, layout: str
) -> None:
    start(processes, alone, tmp_path, layout, naps=layout == "TP")
    written = files_of_ranks(tmp_path)
    num_ranks = layout_of(EngineConfig(model="folder", name="name", **LAYOUTS[layout])).attention_ranks
    assert len(written) == num_ranks, "one folder for each rank with layers"
    assert all(written)
    if "dp_attention" not in LAYOUTS[layout]:
        names = [[path.name for path in of_rank] for of_rank in written]
        assert names[0] == names[1], "a file is whole only where each rank has its part"
    again = start(processes, alone, tmp_path, layout, first=2)
    assert again["num_restored"] > 0
    assert again["disk"] == {"lost": 0, "failed": 0}


@pytest.mark.parametrize(
    "layout", [one if one in SHOWN else thorough(one) for one in OVER_RANKS if not {"pp", DIVIDED} & {*LAYOUTS[one]}]
)
def test_ranks_restore_their_parts_of_recurrent_states(
    processes: RankProcesses, alone: Alone, tmp_path: Path, layout: str
) -> None:
    start(processes, alone, tmp_path, layout, family="qwen3_next")
    again = start(processes, alone, tmp_path, layout, first=2, family="qwen3_next")
    assert again["num_restored"] > 0
    assert again["disk"] == {"lost": 0, "failed": 0}


def test_another_layout_reads_nothing_of_the_first(processes: RankProcesses, alone: Alone, tmp_path: Path) -> None:
    start(processes, alone, tmp_path, "TP")
    again = start(processes, alone, tmp_path, "PP", first=2)
    assert again["num_restored"] == 0
    assert len(files_of_ranks(tmp_path)) == 4


def test_a_full_disk_of_one_rank_costs_the_cache_and_no_answer(
    processes: RankProcesses, alone: Alone, tmp_path: Path
) -> None:
    ours = start(processes, alone, tmp_path, "TP", lacks="disk")
    assert ours["disk"]["failed"] > 0
    assert not any(files_of_ranks(tmp_path)), "the first rank keeps no file that the second does not have"


@pytest.mark.parametrize("what", ["removed", "damaged"])
def test_blocks_that_one_rank_has_lost_are_no_hits(
    processes: RankProcesses, alone: Alone, tmp_path: Path, what: str
) -> None:
    start(processes, alone, tmp_path, "TP")
    for path in files_of_ranks(tmp_path)[1]:
        if what == "removed":
            path.unlink()
        else:
            damage_every_block(path)
    again = start(processes, alone, tmp_path, "TP", first=2)
    assert again["num_restored"] == 0
    assert (again["disk"]["lost"] > 0) == (what == "damaged")
