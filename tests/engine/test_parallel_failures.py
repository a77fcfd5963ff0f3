"""Parallel ranks that do not match, do not come, fail or are lost, in real processes on gloo."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from safetensors.torch import load_file, save_file
from tests.conftest import wait_for

from moiety_engine.distribution.rank_heartbeat import LOST_RANK

from .rank_processes import Alone, RankProcesses, assert_same, ranks_of, requests, settings_of, thorough


@pytest.mark.parametrize(
    ("family", "settings", "words"),
    [
        ("mixtral", {}, "checkpoint of rank 1 differs"),
        ("qwen3_moe", {"max_running": 7}, "max_running is 7 there and 8"),
    ],
)
def test_parallel_ranks_that_do_not_belong_together_all_say_so(
    processes: RankProcesses, folders: dict[str, Path], family: str, settings: dict[str, Any], words: str
) -> None:
    first, (_, rendezvous) = ranks_of(settings_of(folders["qwen3_moe"], tp=2))
    other = settings_of(folders[family], tp=2, **settings)
    if family == "mixtral":
        other = msgspec.structs.replace(other, kv_memory_bytes=first[0].kv_memory_bytes)
    for answer in processes.work(first, (other, rendezvous)):
        assert words in answer["error"]


def test_a_parallel_rank_that_does_not_come_is_named(processes: RankProcesses, folders: dict[str, Path]) -> None:
    first, second, third, _ = ranks_of(settings_of(folders["qwen3_moe"], tp=4, join_timeout_s=3))
    for answer in processes.work(first, second, third):
        assert "(--join-timeout-s): 3" in answer["error"]


EXCLUDED = [  # the missing ranks, and how many are excluded
    ("qwen3_moe", {"dp_attention": 2, "ffn_ranks": 2, "ep": 2, "micro_batch_tokens": 2}, {3}, 1),
    thorough("gpt_oss", {"ffn_ranks": 2}, {2}, 1),  # the last rank with experts
    thorough("gpt_oss", {"dp_attention": 4, "ep": 2}, {3}, 1),  # pieces of experts become whole ones
    thorough("mixtral", {"tp": 2, "ffn_ranks": 2, "ep": 2, "redundant_experts": 2}, {2}, 1),
    thorough("deepseek_v3", {"dp_attention": 4, "ep": 4}, {2}, 1),
    ("qwen3_moe", {"dp_attention": 4, "ep": 4, "redundant_experts": 8}, {1, 3}, 2),  # experts keep moving
    ("qwen3_moe", {"dp_attention": 2, "tp": 2, "ep": 4}, {3}, 2),  # rank 2 has half of the heads of an empty group
    thorough("mixtral", {"dp_attention": 2, "ep": 2}, {1}, 1),  # one is left
    ("qwen3_moe", {"prefill_context_parallel": 2, "ep": 2}, {1}, 1),
    thorough("qwen3_moe", {"prefill_context_parallel": 4, "ep": 4, "redundant_experts": 4}, {1, 3}, 2),
    thorough("deepseek_v3", {"prefill_context_parallel": 2, "tp": 2, "ep": 4}, {3}, 2),
]


@pytest.mark.parametrize(("family", "layout", "away", "num_excluded"), EXCLUDED, ids=str)
def test_parallel_ranks_without_those_that_do_not_come_say_what_one_rank_says(
    processes: RankProcesses,
    alone: Alone,
    family: str,
    layout: dict[str, Any],
    away: set[int],
    num_excluded: int,
) -> None:
    config = settings_of(alone.folders[family], **layout, exclude_rank_after_s=5)
    coming = [one for rank, one in enumerate(ranks_of(config)) if rank not in away]
    moves = layout.get("redundant_experts") == 8
    ours, *others = processes.work(*coming, waves=requests(), shuffles=moves)
    assert_same(alone.says(family), ours)
    assert ours["num_excluded"] == num_excluded
    assert not moves or ours["moves"]["rebalances"] >= 2
    dismissed = [other["error"] for other in others if other["error"]]
    assert len(dismissed) == num_excluded - len(away)
    assert all("another rank that shares heads with it did not join" in error for error in dismissed)


def test_parallel_ranks_that_have_no_room_for_the_parts_of_one_that_is_gone_say_without_whom(
    processes: RankProcesses, folders: dict[str, Path], tmp_path: Path
) -> None:
    losses = tmp_path / "losses"
    config = settings_of(folders["qwen3_moe"], ffn_ranks=2, ep=2, exclude_rank_after_s=5, rank_failure_log=str(losses))
    first, second, _ = ranks_of(config)
    for answer in processes.work(first, second, lacks="weights"):
        assert "has 0.00 GiB free" in answer["error"]
        assert answer["error"].count("(the group runs without rank 2 and holds its part of the model)") == 1
    assert [line.split()[1] for line in losses.read_text().splitlines()[1:]] == ["1"]  # it cannot continue


@pytest.mark.parametrize(
    ("layout", "away", "words"),
    [
        ({"tp": 2, "dp_attention": 2}, {1}, "rank 0 needs rank 1, which holds the other heads"),
        ({"pp": 2, "ffn_ranks": 2}, {1}, "rank 1 is the only one with its layers"),
        ({"tp": 2, "ffn_ranks": 2}, {2, 3}, "no rank with experts is left"),
    ],
    ids=str,
)
def test_a_parallel_rank_that_cannot_be_done_without_is_waited_for_and_then_named(
    processes: RankProcesses, folders: dict[str, Path], layout: dict[str, int], away: set[int], words: str
) -> None:
    config = msgspec.structs.replace(
        settings_of(folders["qwen3_moe"]), **layout, join_timeout_s=3, exclude_rank_after_s=1
    )
    coming = [one for rank, one in enumerate(ranks_of(config)) if rank not in away]
    for answer in processes.work(*coming):
        assert f"(--join-timeout-s): {', '.join(map(str, sorted(away)))}" in answer["error"]
        assert f"The other ranks cannot start without them: {words}" in answer["error"]


def test_a_parallel_launch_of_another_number_of_ranks_is_refused(
    processes: RankProcesses, folders: dict[str, Path]
) -> None:
    ranks = ranks_of(settings_of(folders["qwen3_moe"], dp_attention=2, ep=2))
    started = [(config, replace(rendezvous, num_ranks=3)) for config, rendezvous in ranks if rendezvous is not None]
    for answer in processes.work(*started):
        assert "--dp-attention 2 × --tp 1 needs 2 ranks, but 3 were started" in answer["error"]


def test_the_other_rank_reports_why_the_first_parallel_rank_failed(folders: dict[str, Path]) -> None:
    pair = RankProcesses(2, silence_s=120)
    _, second = wait_for(lambda: len(pair.pids()) == 2 and pair.pids(), "both ranks")
    pair.start(*ranks_of(settings_of(folders["qwen3_moe"], tp=2)), waves=requests()[:1], fails="no luck")
    ended, logged = pair.end()
    assert f"{second} {LOST_RANK}" in ended
    assert "the first rank cannot continue: no luck" in logged


def has_ended(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.slow
@pytest.mark.thorough
def test_a_parallel_group_that_has_lost_a_rank_for_good_says_the_same_without_it(alone: Alone, tmp_path: Path) -> None:
    layout = {"dp_attention": 2, "ffn_ranks": 2, "ep": 2, "exclude_rank_after_s": 20, "micro_batch_tokens": 2}
    losses = tmp_path / "losses"
    layout |= {"rank_failure_log": str(losses), "exclude_rank_after_failures": 2}
    config = settings_of(alone.folders["qwen3_moe"], **layout)
    whole = RankProcesses(4, silence_s=120)
    whole.start(*ranks_of(config), waves=requests()[:1], again=True, served=str(tmp_path / "served"))
    wait_for((tmp_path / "served").exists, "steps that run")
    *living, dead = whole.pids()
    os.kill(dead, signal.SIGKILL)
    wait_for(lambda: all(map(has_ended, living)), "the end of the other ranks")
    assert "rank 3 is lost" in whole.end()[1]
    head, *lines = losses.read_text().splitlines()
    assert head.startswith("lost ranks of ") and [line.split()[1] for line in lines] == ["3"]
    left = RankProcesses(4, silence_s=120)
    first, second, third, _ = ranks_of(config)
    ours, *others = left.work(first, second, third, waves=requests())
    assert_same(alone.says("qwen3_moe"), ours)
    assert ours["num_excluded"] == 1 and not any(other["error"] for other in others)
    back = left.work(*ranks_of(config), waves=requests())  # it takes part again, since it came in time
    assert_same(alone.says("qwen3_moe"), back[0])
    assert back[0]["num_excluded"] == 0 and not any(other["error"] for other in back)
    losses.write_text(losses.read_text() * 2)
    again, *_, refused = left.work(*ranks_of(config), waves=requests())  # it comes, but was lost too often
    assert_same(alone.says("qwen3_moe"), again)
    assert again["num_excluded"] == 1
    assert any(one in refused["error"] for one in ("rank 3 failed 2 times in 600 s", "rank 3 joined after the others"))
    assert '"event": "ranks_excluded"' in left.end()[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "layout"),
    [(signal.SIGKILL, {"ffn_ranks": 1}), (signal.SIGKILL, {"pp": 2}), thorough(signal.SIGSTOP, {"tp": 2})],
)
def test_a_lost_parallel_rank_ends_the_group(
    folders: dict[str, Path], tmp_path: Path, number: int, layout: dict[str, int]
) -> None:
    pair = RankProcesses(2, silence_s=10 if number == signal.SIGSTOP else 120)
    config = settings_of(folders["qwen3_moe"], **layout)
    pair.start(*ranks_of(config), waves=requests()[:1], again=True, served=str(tmp_path / "served"))
    wait_for((tmp_path / "served").exists, "steps that run")
    first, second = pair.pids()
    os.kill(second, number)
    wait_for(lambda: has_ended(first), "the end of the other rank")
    with contextlib.suppress(ProcessLookupError):
        os.kill(second, signal.SIGKILL)
    ended, logged = pair.end()
    assert f"{first} {LOST_RANK}" in ended
    assert "rank_lost" in logged
    assert ("sent no heartbeat" if number == signal.SIGSTOP else "is lost") in logged


@pytest.mark.parametrize(
    "layout", [thorough({"tp": 2}), thorough({"pp": 2}), {"dp_attention": 2, "ep": 2}, {"ffn_ranks": 1}]
)
def test_a_request_that_is_not_finite_fails_alone_on_every_layout(
    processes: RankProcesses, folders: dict[str, Path], tmp_path: Path, layout: dict[str, int]
) -> None:
    folder = tmp_path / "poisoned"
    shutil.copytree(folders["mixtral"], folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][384] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    good = requests()[0]
    bad = [msgspec.structs.replace(good[key], key=20 + key, prompt_ids=[*good[key].prompt_ids, 384]) for key in (1, 3)]
    (alone,) = processes.work(*ranks_of(settings_of(folder)), waves=[good], some_fail=True, exact=True)
    config = settings_of(folder, **layout)
    found = processes.work(*ranks_of(config), waves=[[*good, *bad]], some_fail=True, exact=True)[0]
    assert found["failed"] == dict.fromkeys(("21", "23"), "non_finite_output")
    said = {key: tokens for key, tokens in found["token_ids"].items() if key not in found["failed"]}
    assert said == alone["token_ids"]
    assert [found["token_ids"][key] for key in found["failed"]] == [[], []]
